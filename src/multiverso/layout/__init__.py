"""Where each word of shared memory lies: the control segment and dense tables, and keyed tables."""
