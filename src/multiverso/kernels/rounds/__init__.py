"""Kernels of synchronous rounds: `calls` is what a worker calls, the others are its parts."""
