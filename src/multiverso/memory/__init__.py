"""Shared memory from plain Python: anonymous files, robust locks, single words."""
