"""How the hosts of a job find each other: over MPI, in Slurm, or by the store of torchrun."""
