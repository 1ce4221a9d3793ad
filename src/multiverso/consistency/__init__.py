"""What reads and adds of a table mean: one file for each consistency, over the port of a table's memory."""
