"""Synchronous rounds along the chain of hosts."""
