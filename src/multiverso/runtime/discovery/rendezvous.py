"""How the hosts of a job find each other where our launcher has not started them.

Three ways, by what has started them. Under torchrun over the store that its agents keep; under mpirun over MPI itself;
under srun from Slurm's variables and what only this user knows, without a word between the hosts.
"""

from __future__ import annotations

from multiverso.runtime.discovery.environment import JobInfo
from multiverso.runtime.discovery.meetings.meeting import Met


def meet(job: JobInfo, number: int, secret: str, timeout_seconds: float) -> Met:
    """Waits until the job's hosts have found each other.

    Args:
        job: what the environment says.
        number: of this `init` in this process, as each makes a job of its own.
        secret: what only this user knows; empty where there is nothing.
        timeout_seconds: how long to wait for what another host has to say.

    Raises:
        StartupError: the others cannot be reached, or not all came in time.
    """
    if job.store is not None:
        from multiverso.runtime.discovery.meetings.store import meet_over_store

        return meet_over_store(job, number, timeout_seconds)
    if job.roster is not None:
        from multiverso.runtime.discovery.meetings.slurm import meet_in_slurm

        return meet_in_slurm(job, job.roster, number, secret)
    from multiverso.runtime.discovery.meetings.mpi import meet_over_mpi

    return meet_over_mpi(job, number, timeout_seconds)
