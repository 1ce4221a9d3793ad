"""The messages between workers and the node, and their bytes."""
