"""Files that others may have written: opened without surprises, parsed by a schema."""
