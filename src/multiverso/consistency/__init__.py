"""What reads and adds of a table mean: one file for each consistency, over what it knows of a table."""
