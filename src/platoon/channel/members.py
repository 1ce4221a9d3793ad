"""The workers that a controller knows: those that it started, and those that came by themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from platoon.channel.secret import VARIABLE, Secret
from platoon.processes import Process, end_processes, failure_text, launch_process
from platoon.reporting import Reporter
from platoon.util import PlatoonError, counted

MOST_WORKERS = 64

# A worker is no MPI process, even if its controller is: with these variables its own mpi4py would think so.
_OF_MPI = ("PMI", "OMPI_", "HYD", "MPI_LOCAL")


@dataclass
class Member:
    """A worker: its rank on this host, its process id, and the process if the controller started it.

    ``watch`` is a pidfd, readable when the process has ended.
    """

    rank: int
    pid: int
    watch: int
    process: Process | None = None
    present: bool = False
    done: bool = False


class Members:
    """Who belongs to this controller. Used by its serving thread alone."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self.by_rank: dict[int, Member] = {}
        self.ever = 0

    def start_all(
        self,
        devices: Sequence[str],
        experiment: str,
        arguments: list[str],
        log_directory: str,
        control_port: int | None,
        secret: Secret,
    ) -> None:
        """Starts a worker on each device, in rank order.

        Raises:
            PlatoonError: the experiment has no worker file.
        """
        script = f"{experiment}_worker.py"
        if not Path(script).is_file():
            raise PlatoonError(f"there is no {script} in {Path.cwd()}")
        share = max(1, len(os.sched_getaffinity(0)) // len(devices))
        for rank, device in enumerate(devices):
            variables = {
                "PLATOON_CONTROL_PORT": str(control_port),
                VARIABLE: secret.text,
                "PLATOON_LOCAL_RANK": str(rank),
                # so that workers do not fight for the cores
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(share),
            }
            process = launch_process(
                f"worker{rank}_{device}",
                [script, *arguments],
                device,
                log_directory,
                variables=variables,
                without=_OF_MPI,
            )
            self.by_rank[rank] = Member(rank, process.pid, os.pidfd_open(process.pid), process)
            self.ever += 1
            log = str(process.err)
            self._reporter.event("started", rank=rank, device=device, pid=process.pid, log=log)

    def note_end(self, member: Member) -> bool:
        """Notes that a worker's process has ended; returns whether that is as it should be."""
        self.remove(member)
        process, who = member.process, f"worker {member.rank} (process {member.pid})"
        if process is None:
            if not member.done:
                self._reporter.say("lost", f"{who} ended without Worker.close(): it died, or was killed")
            return True
        code = process.handle.wait()
        end_processes([process], 0)  # what it left behind in its process group
        self._reporter.event("ended", rank=member.rank, code=code)
        if code == 0:
            return True
        self._reporter.say("failed", failure_text(who, process, code))
        return False

    def come(self, pid: int, rank: int | None, most: int | None) -> Member:
        """Enters a worker that says hello.

        Args:
            pid: its process id.
            rank: the rank that it was started with, or None if it was started by hand.
            most: how many workers there may be, or None for any number.

        Raises:
            PlatoonError: there is no place for it.
        """
        if rank is not None and not 0 <= rank < (MOST_WORKERS if most is None else most):
            raise PlatoonError(f"there is no place {rank} among {counted(most or MOST_WORKERS, 'worker')}")
        known = self.by_pid(pid)
        if known is not None:
            known.present, known.done = True, False
            return known
        if rank is None:
            rank = next(i for i in range(len(self.by_rank) + 1) if i not in self.by_rank)
            if most is not None and rank >= most:
                raise PlatoonError(
                    f"this controller has devices for {counted(most, 'worker')}, and no more can come"
                )
        elif rank in self.by_rank:
            # Started by the controller through another program: the process that says hello is the worker.
            member = self.by_rank[rank]
            if member.present:
                raise PlatoonError(f"worker {rank} is already there, as process {member.pid}")
            member.pid, member.present = pid, True
            return member
        try:
            watch = os.pidfd_open(pid)
        except OSError as error:
            raise PlatoonError(
                f"there is no process {pid} here: a worker runs on its controller's host"
            ) from error
        member = self.by_rank[rank] = Member(rank, pid, watch, present=True)
        self.ever += 1
        return member

    def by_pid(self, pid: int) -> Member | None:
        """Returns the worker with a process id."""
        return next((member for member in self.by_rank.values() if member.pid == pid), None)

    def remove(self, member: Member) -> None:
        """Forgets a worker whose process has ended."""
        os.close(member.watch)
        del self.by_rank[member.rank]

    @property
    def processes(self) -> list[Process]:
        """Those that the controller started and that have not been removed."""
        return [member.process for member in self.by_rank.values() if member.process is not None]

    @property
    def all_gone(self) -> bool:
        """True when at least one worker has come, and all have ended or, if started by hand, are done."""
        return self.ever > 0 and all(
            member.done and member.process is None for member in self.by_rank.values()
        )

    def close(self) -> None:
        """Forgets everyone."""
        for member in list(self.by_rank.values()):
            self.remove(member)
