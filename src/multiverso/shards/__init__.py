"""A table's parts in memory."""
