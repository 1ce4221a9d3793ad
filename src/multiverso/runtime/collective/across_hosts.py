"""A worker's part in an all_reduce over several hosts; the node's is `runtime.several_hosts.reductions`."""

from __future__ import annotations

import time
import zlib
from contextlib import ExitStack
from typing import Any

import numpy as np

from multiverso import kernels
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.combining import PIECE_BYTES, PIECES
from multiverso.hosts.peer.resources import Array
from multiverso.layout import words as at
from multiverso.layout.worker_index import bits_of, workers_in
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import load32, load64, wait_for_change
from multiverso.runtime.session.session import Session
from multiverso.runtime.session.waiting import Patience
from multiverso.runtime.several_hosts.reductions import (
    DIFFERENT,
    DONE,
    FAILED,
    MISSING,
    SMALL_NAME,
    memory_bytes,
    slot_at,
)
from multiverso.wire.requests import Combine

# What a worker that is gone has told its node before is on its way for a moment; one that has left in order may have
# done so because it had everything.
_LOST_SECONDS, _LEFT_SECONDS = 0.5, 10.0


class AcrossHosts:
    """Owner: one worker's `Reducer`.

    Args:
        session: its session.

    Raises:
        MultiversoError: this worker has taken another's place.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        control = session.control
        self._workers, self._slot = len(control.local), control.local.index(session.worker_id)
        self._memories: dict[str, SharedMemory] = {}
        self._line = self._memory(SMALL_NAME).address
        self._before = 0  # pieces of calls that have returned
        self._given = self._taken = 0  # pieces of this one
        self._gone_since = 0.0
        self.is_new = not load64(self._line + DONE)

    def reduce(self, flat: Array, result: Array, operation: str, what: str, deadline: Deadline) -> None:
        """Reduces an array; what an exception has interrupted continues where it stopped when it is called again.

        Args:
            flat: this worker's.
            result: where the reduction goes; may be ``flat``.
            operation: "sum", "product", "max" or "min".
            what: the call in words, the same in all workers.
            deadline: until when.

        Raises:
            ShapeMismatchError: other workers reduce something else.
            WorkerLostError, WaitTimeoutError, NodeLostError: they do not come.
        """
        length = PIECE_BYTES // flat.itemsize
        pieces = -(-flat.size // length)
        signature = zlib.crc32(what.encode()) << 29
        while self._taken < pieces:
            ahead = self._given - self._taken
            if self._given < pieces and ahead < PIECES:
                part = flat[self._given * length : (self._given + 1) * length]
                self._give(part, operation, signature ^ flat.size)
                self._given += 1
            else:
                part = result[self._taken * length : (self._taken + 1) * length]
                number = self._before + self._taken + 1
                self._wait(number, what, deadline)
                part[...] = self._array(number, self._workers, part.nbytes, part.dtype)
                self._taken += 1
        self._before += pieces
        self._given = self._taken = 0

    def _give(self, part: Array, operation: str, signature: int) -> None:
        number = self._before + self._given + 1
        self._array(number, self._slot, part.nbytes, part.dtype)[...] = part
        self._session.node.tell(Combine(number, signature, part.nbytes, part.dtype.name, operation))

    def _array(self, number: int, slot: int, nbytes: int, dtype: np.dtype[Any]) -> Array:
        name, begin = slot_at(number, slot, nbytes, self._workers)
        return self._memory(name).array[begin : begin + nbytes].view(dtype)

    def _memory(self, name: str) -> SharedMemory:
        if name not in self._memories:
            nbytes = memory_bytes(name, self._workers)
            self._memories[name] = self._session.shared_memory(name, nbytes, on_this_host=True)
        return self._memories[name]

    def _wait(self, number: int, what: str, deadline: Deadline) -> None:
        session, line = self._session, self._line
        control = session.control
        patience = Patience(session, deadline, what)
        said: set[int] | None = None
        # A worker that went while this one trained may have given its part before.
        self._gone_since = time.monotonic()
        with ExitStack() as wait:
            while True:
                seen = load32(control.address + at.EVENT)
                if load64(line + DONE) >= number:
                    return
                failed = load64(line + FAILED)
                if failed == DIFFERENT:
                    patience.raise_if_hopeless(kernels.MISMATCH)
                if failed:
                    raise MultiversoError(f"{what}: the hosts' nodes cannot exchange it; see the job's log")
                missing = self._missing(number)
                if missing != said:
                    said = missing
                    wait.close()
                    memory = self._memories[SMALL_NAME].number
                    wait.enter_context(session.waiting(at.FOR_OTHER_HOSTS, memory, *bits_of(missing)))
                left = deadline.slice_left()
                gone = self._gone_for(missing)
                if gone is not None:
                    if gone <= 0:
                        patience.raise_if_hopeless(kernels.LOST_SOMEONE)
                    left = min(gone, left)
                patience.raise_if_over()
                wait_for_change(control.address + at.EVENT, seen, left)

    def _missing(self, number: int) -> set[int]:
        words = range(-(-self._session.control.capacity // 64))
        missing = workers_in(load64(self._line + MISSING + 8 * word) for word in words)
        return missing if load64(self._line + DONE) == number - 1 else set()

    def _gone_for(self, missing: set[int]) -> float | None:
        """Returns how many seconds a message of a worker that is missing and has gone may still take."""
        now = time.monotonic()
        grace = [
            _LOST_SECONDS if worker.liveness == at.LOST else _LEFT_SECONDS
            for worker in self._session.control.workers()
            if worker.worker_id in missing and (worker.liveness == at.LOST or worker.has_left)
        ]
        if not grace:
            self._gone_since = now
            return None
        return min(grace) - (now - self._gone_since)
