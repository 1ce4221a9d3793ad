"""Rounds with a quorum: as synchronous, and one may be closed without the workers that are late.

Chen et al. 2016, "Revisiting Distributed Synchronous SGD", whose backup workers' late gradients are dropped; here they
are in the next round. Any round can be repeated with the workers that it had: see ``recording.py``.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import numpy as np

from multiverso.consistency import recording
from multiverso.consistency.protocol import Array, Call, RowIds, TableAccess, refuse_bad_rows
from multiverso.consistency.synchronous import Synchronous
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.kernels import quorum
from multiverso.kernels.codes import DONE, TIMED_OUT
from multiverso.layout import words as at
from multiverso.memory.words import load32, load64, store64
from multiverso.signal_safety import turn

# for "auto": of how many steps the median is taken, and which part of it is the grace, before and after that, too
_STEPS, _GRACE_OF_STEP = 9, 0.1
_LOOK_SECONDS = 0.001  # a replay looks so often whether it may continue
_LEAVE_SECONDS = 30.0  # and gives up that when it leaves


class QuorumRounds(Synchronous):
    """Its methods are those of :class:`~multiverso.consistency.protocol.Consistency`. One thread at a time gets in."""

    def __init__(self, access: TableAccess) -> None:
        super().__init__(access)
        assert access.quorum is not None
        self._plan = self._record = None
        number, self._workers = load64(self._base + at.TABLE_ID), access.index.workers
        if access.replay is not None:
            self._plan = recording.read_plan(access.replay, number, access.name, self._workers, access.worker_id)
        if access.record is not None:
            self._record = recording.begin(access.record, number, access.worker_id, self._workers)
        self._reads: list[tuple[int, int]] = []
        self._progress = np.zeros(at.QUORUM_WORDS, np.int64)
        self._progress[at.ROUND_NEEDED] = access.quorum.needed
        self._progress[at.ROUND_OF] = access.quorum.of
        self._progress[at.ROUND_GRACE] = access.quorum.grace_ns
        self._steps: deque[int] | None = deque(maxlen=_STEPS) if access.quorum.adapts else None
        self._read_at = 0  # of the last read's end; 0: there was none
        self._expect(0, 0)
        like = np.empty(0, self._dtype)
        quorum.keep.compiled(self._dtype)(self._control, self._base, self._me, self._progress, like)

    def _choose_kernels(self) -> None:
        self._kernels, self._apply_rule = quorum, quorum.apply_rule

    def get_again(self, out: Array) -> None:
        quorum.again.compiled(self._dtype)(self._base, self._progress, out)

    def get_rows(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        refuse_bad_rows(ids, self.access.spec)
        self.get(np.empty(self.access.spec.elements, self._dtype), call, deadline)
        self.get_rows_again(ids, out)

    def get_rows_again(self, ids: RowIds, out: Array) -> None:
        refuse_bad_rows(ids, self.access.spec)
        values = np.empty(self.access.spec.elements, self._dtype)
        self.get_again(values)
        out[:] = values.reshape(self.access.spec.rows, -1)[ids].ravel()

    def put(self, values: Array) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            quorum.committed_put.compiled(self._dtype)(self._base, values)
            self._say_written()

    def version(self) -> int:
        """Rounds; where they are to be repeated, the one that this worker has read last, and 0 before."""
        if self._plan is None and self._record is None:
            return self.newest()
        return int(self._progress[at.ROUND_READ]) if self._progress[at.ROUND_READS] else 0

    def newest(self) -> int:
        return super().newest() >> 16

    def leave(self) -> None:
        """What was added since the last read goes into the others' next round."""
        self._note()
        end = Deadline.after(_LEAVE_SECONDS)
        while self._progress[at.ROUND_STAGED] and not (self._may_come() or self._left_too_soon() or end.passed):
            time.sleep(_LOOK_SECONDS)
        left_to = quorum.leave.compiled()(self._control, self._base, self._me, self._progress)
        if left_to:
            self._reads.append((left_to, 0))
        self._write()

    def refuse_unfinished(self) -> None:
        super().refuse_unfinished()
        self._write()

    def _copy(self, out: Array) -> bool:
        return bool(quorum.committed_copy.compiled(self._dtype)(self._base, out))

    def _read(self, reading: str, go: Callable[[], int], deadline: Deadline | None) -> None:
        def come() -> int:
            self._note()  # of a call that raised in the last moment
            if not self._may_come():
                self._refuse_without(self._left_too_soon())
                time.sleep(_LOOK_SECONDS)
                return TIMED_OUT
            if self._steps is not None and self._read_at and not self._progress[at.ROUND_OPEN]:
                self._steps.append(time.monotonic_ns() - self._read_at)
                self._progress[at.ROUND_GRACE] = int(_GRACE_OF_STEP * median(self._steps))
            code = go()
            if code == DONE and self._plan is None:
                self._read_at = time.monotonic_ns()
                if self._steps:
                    step, grace = int(median(self._steps)), int(self._progress[at.ROUND_GRACE])
                    self._expect(self._read_at + step - grace, self._read_at + step + grace)
            self._note()
            return code

        done = int(self._progress[at.ROUND_READS])
        if self._plan is not None and done >= len(self._plan.reads):
            raise MultiversoError(
                f"the recorded run ends here for worker {self.access.worker_id}: it has read {self.access.name} "
                f"{done} times in it"
            )
        super()._read(reading, come, deadline)
        if self._plan is not None:
            joins, gets = self._plan.reads[done]
            # of another host's worker it is known how far it had come before it left
            word = at.STAGED if self._spans_hosts else at.INCLUDED
            rounds = range(joins, gets + 1)
            self._refuse_without([w for n in rounds for w in self._gone(int(self._plan.rounds[n, 0]), n, word)])

    def _may_come(self) -> bool:
        """In a replay: whether this worker's next round is open, and all have read who read the values before it.

        Only those come to a round who were in it, and it is closed when so many have.
        """
        done = int(self._progress[at.ROUND_READS])
        if self._plan is None or self._progress[at.ROUND_OPEN] or done >= len(self._plan.reads):
            return True
        joins, gets = self._plan.reads[done]
        members, readers = (int(word) for word in self._plan.rounds[[joins, joins - 1], [0, 1]])
        self._progress[at.ROUND_NEEDED], self._progress[at.ROUND_OF] = members.bit_count(), 0
        self._progress[at.ROUND_GRACE], self._progress[at.ROUND_GETS] = 0, gets
        folded = (self._word(w, at.FOLDED) for w in range(self._workers) if readers >> w & 1)
        return self.newest() == joins - 1 and min(folded, default=joins) >= joins - 1

    def _left_too_soon(self) -> list[int]:
        """Of a replay that waits: the workers that have left before they did what it waits for."""
        assert self._plan is not None
        last = self.newest()
        members, readers = (int(word) for word in self._plan.rounds[[last + 1, last], [0, 1]])
        return self._gone(members, last + 1, at.STAGED) + self._gone(readers, last, at.FOLDED)

    def _gone(self, workers: int, number: int, word: int) -> list[int]:
        """Those of the workers, a bit each, that have left, or died, with a word of theirs below a round's number."""
        some = [w for w in range(self._workers) if workers >> w & 1]
        blocks = {w: self.access.block_of(w) for w in some}
        left = [w for w in some if load32(blocks[w] + at.PARTICIPATION) == at.LEFT]
        died = [w for w in some if load32(blocks[w] + at.LIVENESS) in (at.LOST, at.GONE)]
        return [w for w in sorted({*left, *died}) if self._word(w, word) < number]

    def _word(self, worker: int, word: int) -> int:
        return load64(self.access.line_of(worker) + word)

    def _refuse_without(self, gone: list[int]) -> None:
        if gone:
            raise MultiversoError(
                f"the recorded run cannot be repeated any further: worker {gone[0]} has left before a round of "
                f"{self.access.name} in which it was; replay the same program, with as many steps"
            )

    def _expect(self, begin: int, end: int) -> None:
        """Says to the others of this host between which times this worker comes next, as a rule."""
        line = self.access.line + at.EXPECTED
        store64(line, begin)
        store64(line + 8, end)

    def _note(self) -> None:
        if self._record is not None and len(self._reads) < self._progress[at.ROUND_READS]:
            self._reads.append((int(self._progress[at.ROUND_NUMBER]), int(self._progress[at.ROUND_READ])))

    def _write(self) -> None:
        if self._record is None:
            return
        try:
            recording.write(self._record, self._workers, self.access.name, self._reads)
        except OSError as error:  # the worker leaves all the same
            sys.stderr.write(
                f"multiverso: the record of worker {self.access.worker_id}'s rounds is not written: {error}\n"
            )
