"""The workers that a controller knows: those that it started, and those that came by themselves."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverso.launch import Job, WorkerExit
from multiverso.runtime import MAX_WORKERS
from platoon.processes import GRACE_SECONDS, Program, program
from platoon.reporting import Reporter
from platoon.util import PlatoonError, counted, exit_text, readable

# A worker is no MPI process, even if its controller is: with these variables its own mpi4py would think so.
_OF_MPI = ("PMI", "OMPI_", "HYD", "MPI_LOCAL")


@dataclass
class Member:
    """A worker: its rank on this host and its process id.

    Attributes:
        rank: its rank.
        pid: its process id.
        watch: a pidfd, readable when the process has ended; None if the controller started it, which the job
            then watches.
        present: whether it has said hello.
        done: whether it has said goodbye.
    """

    rank: int
    pid: int
    watch: int | None = None
    present: bool = False
    done: bool = False


class Members:
    """Who belongs to this controller. Used by its serving thread alone."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._programs: list[Program] = []
        self._ends: list[WorkerExit] = []
        self._first = 0  # this host's first worker among those of all
        self.job: Job | None = None
        self.by_rank: dict[int, Member] = {}
        self.ever = 0

    def start_all(
        self,
        devices: Sequence[str],
        experiment: str,
        arguments: Sequence[str],
        log_directory: str,
        variables: Mapping[str, str],
        first_rank: int = 0,
    ) -> None:
        """Starts a worker on each device, in rank order.

        Args:
            devices: their names.
            experiment: its file is ``EXPERIMENT_worker.py``.
            arguments: those of each worker.
            log_directory: where their output goes.
            variables: what their environment has besides ours.
            first_rank: the first worker's number among those of all hosts, for the names of the logs.

        Raises:
            PlatoonError: the experiment has no worker file, or a device does not exist; nothing was started.
        """
        script = f"{experiment}_worker.py"
        if not Path(script).is_file():
            raise PlatoonError(f"there is no {script} in {Path.cwd()}")
        self._first = first_rank
        share = max(1, len(os.sched_getaffinity(0)) // len(devices))
        marker = f"PLATOON_JOB={uuid.uuid4().hex}"
        own = {
            # so that workers do not fight for the cores
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(share),
            **variables,
            **dict([marker.split("=")]),
        }
        self._programs = [
            program(
                f"worker{first_rank + rank}_{device}",
                [script, *arguments],
                device,
                log_directory,
                {**own, "PLATOON_LOCAL_RANK": str(rank)},
                without=_OF_MPI,
            )
            for rank, device in enumerate(devices)
        ]
        job = Job(
            [each.command for each in self._programs],
            marker=marker,
            on_failure="continue",  # what one's failure means is the controller's business
            grace_seconds=GRACE_SECONDS,
            on_start=self._note_start,
            on_exit=self._ends.append,
        )
        job.__enter__()
        self.job = job

    def _note_start(self, rank: int, pid: int) -> None:
        self.by_rank[rank] = Member(rank, pid)
        self.ever += 1
        each = self._programs[rank]
        number = self._first + rank
        self._reporter.event("started", rank=number, device=each.device, pid=pid, log=str(each.err))

    def note_ends(self, failures: bool = True) -> bool:
        """Notes which of the workers that the controller started have ended; returns whether all did well.

        Args:
            failures: False: it does not matter any more how they end.
        """
        if self.job is None:
            return True
        self.job.step()
        well = True
        while self._ends:
            well = self._note_exit(self._ends.pop(0), failures) and well  # each has to be noted
        return well

    def _note_exit(self, end: WorkerExit, failures: bool) -> bool:
        member = self.by_rank.pop(end.worker_id)
        number = self._first + end.worker_id
        self._reporter.event("ended", rank=number, code=end.code, how=exit_text(end))
        if end.code == 0 or not failures:
            return True
        who = f"worker {number} (process {member.pid})"
        self._reporter.say("failed", self._programs[end.worker_id].failure_text(who, end))
        return False

    def note_gone(self, member: Member) -> None:
        """Notes the end of a worker that was started by hand."""
        self._remove(member)
        if not member.done:
            who = f"worker {member.rank} (process {member.pid})"
            self._reporter.say("lost", f"{who} ended without Worker.close(): it died, or was killed")

    def admit(self, pid: int, rank: int | None, most: int | None) -> Member:
        """Enters a worker that says hello.

        Args:
            pid: its process id.
            rank: the rank that it was started with, or None if it was started by hand.
            most: how many workers there may be, or None for any number.

        Raises:
            PlatoonError: there is no place for it.
        """
        if rank is not None and not 0 <= rank < (MAX_WORKERS if most is None else most):
            raise PlatoonError(f"there is no place {rank} among {counted(most or MAX_WORKERS, 'worker')}")
        known = self.by_pid(pid)
        if known is not None:
            known.present, known.done = True, False
            return known
        if rank is None:
            rank = next(i for i in range(len(self.by_rank) + 1) if i not in self.by_rank)
            if most is not None and rank >= most:
                raise PlatoonError(f"this controller has devices for {counted(most, 'worker')}, and no more can come")
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
            raise PlatoonError(f"there is no process {pid} here: a worker runs on its controller's host") from error
        member = self.by_rank[rank] = Member(rank, pid, watch, present=True)
        self.ever += 1
        return member

    def by_pid(self, pid: int) -> Member | None:
        """Returns the worker with a process id."""
        return next((member for member in self.by_rank.values() if member.pid == pid), None)

    def _remove(self, member: Member) -> None:
        if member.watch is not None:
            os.close(member.watch)
        del self.by_rank[member.rank]

    @property
    def watched(self) -> dict[int, Member]:
        """The workers that were started by hand, by the descriptor that is readable at their end."""
        return {member.watch: member for member in self.by_rank.values() if member.watch is not None}

    @property
    def all_gone(self) -> bool:
        """True when at least one worker has come, and all have ended or, if started by hand, are done."""
        return self.ever > 0 and all(member.done and member.watch is not None for member in self.by_rank.values())

    @property
    def all_ended(self) -> bool:
        """The same of their processes, noted or not: for any thread, and while no end can be noted."""
        return self.ever > 0 and all(_has_ended(member.pid) for member in list(self.by_rank.values()))

    def end(self) -> None:
        """Ends the workers that the controller started, and all that they started; forgets everyone."""
        if self.job is not None:
            self.job.end()
            try:
                self.job.finish()
            finally:
                self.job.__exit__()
        for member in list(self.by_rank.values()):
            self._remove(member)


def _has_ended(pid: int) -> bool:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(readable([watch], 0))
    finally:
        os.close(watch)
