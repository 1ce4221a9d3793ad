"""Meetings of a job's hosts: over MPI, in Slurm, or by the store of torchrun."""
