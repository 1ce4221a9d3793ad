"""Authenticated connections between the nodes of a job, and the port where they come in."""
