"""Kernels of tables of rows by key: `calls` is what a worker calls, the others are its parts."""
