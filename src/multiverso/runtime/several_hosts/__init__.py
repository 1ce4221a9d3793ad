"""A node's part in a job on several hosts: what it tells, moves and shows of the workers elsewhere."""
