"""Which worker's number may be given to whom: a free one, one whose owner has gone, one whose owner died.

Owner: the node's thread.
"""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverso.layout import words as at
from multiverso.runtime.job.control import Control
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection


@dataclass(frozen=True)
class Numbers:
    """The numbers of one run of a job.

    Attributes:
        control: the control segment.
        catalogue: the tables.
        attached: the processes of those that are there, by number; one that has withdrawn has given its number back.
        fixed: whether the job has a fixed number of workers, each of which comes once.
        replaces: whether, in such a job, a new process may take the place of a worker that died.
    """

    control: Control
    catalogue: Catalogue
    attached: Mapping[int, Connection]
    fixed: bool
    replaces: bool

    def free(self, wanted: int | None) -> int | None:
        """Returns a number that can be given out now: the wanted one, if one is wanted; None where there is none."""
        return next(filter(self._is_free, self._candidates(wanted)), None)

    def is_over(self, wanted: int | None) -> bool:
        """Returns whether the owner has gone already, or is about to."""
        # its own word counts before the watcher has noticed: `init` may follow `shutdown` at once
        return any(
            self.control.liveness(i) in (at.GONE, at.LOST) or self.control.participation(i) == at.LEFT
            for i in self._candidates(wanted)
        )

    def is_late(self, wanted: int | None) -> bool:
        """Returns whether the wanted one will be free soon: its owner is over, with effects still to come."""
        if wanted is None:
            return False
        liveness = self.control.liveness(wanted)
        if not self.fixed:  # its connection's end may be read after the next one's first words
            left = liveness == at.GONE or self.control.participation(wanted) == at.LEFT
            return left and not self._is_free(wanted)
        if not self._may_be_replaced:
            return False
        dead = liveness == at.LOST or (liveness == at.ALIVE and self._has_ended(wanted))
        return dead and not self._is_free(wanted)

    @property
    def _may_be_replaced(self) -> bool:
        return self.fixed and self.replaces and self.control.continues

    def _candidates(self, wanted: int | None) -> Sequence[int]:
        return self.control.local if wanted is None else [wanted]

    def _is_free(self, worker_id: int) -> bool:
        if worker_id in self.attached and self.attached[worker_id].worker_id != worker_id:
            return True  # its `init` was interrupted; its process is there, and may return
        liveness = self.control.liveness(worker_id)
        if liveness == at.FREE:
            return True
        if self.fixed and not (self._may_be_replaced and liveness == at.LOST):
            return False
        return self._is_released(worker_id, liveness)

    def _is_released(self, worker_id: int, liveness: int) -> bool:
        """Returns whether a number may be given out again.

        Only when its last owner's process has left it or really is gone, the node has done what its end asks for, and
        no round still needs what it staged (where no worker is left to end that round, it is not waited for).
        """
        if liveness not in (at.GONE, at.LOST) or worker_id in self.attached:
            return False
        if self.catalogue.needs(worker_id) and not (self.fixed and not self.control.live()):
            return False
        return liveness == at.GONE or self._has_ended(worker_id)

    def _has_ended(self, worker_id: int) -> bool:
        """Whether its process is over, with all its threads, even if its exit code was not collected yet."""
        pid = self.control.worker(worker_id).pid
        return not pid or has_ended(pid)  # without one it has never come


def has_ended(pid: int) -> bool:
    """Whether a process is over, with all its threads, even if its exit code was not collected yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # no such call here (Linux before 5.3, some sandboxes), or no descriptor left
        return _is_no_more(Path("/proc", str(pid)))
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def _is_no_more(process: Path) -> bool:
    """Whether a process is not in /proc, or is there until its exit code is asked for. Where nothing is there: no."""
    try:
        state = (process / "stat").read_text().rpartition(") ")[2][:1]
        return state in "ZX" and len(list((process / "task").iterdir())) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return (process.parent / "self").exists()
    except OSError:
        return False
