"""A worker's session: its place in the job, its connection to the node, and waiting."""
