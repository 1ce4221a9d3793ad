"""A node's part in a job on several hosts: what it reports, moves and shows of the workers elsewhere."""
