"""The three ways to a table's memory: at once, by rounds, by clocks. Flat arrays in, an effect in place out.

Arguments have been checked. ``again``-able: a kernel that stops half-way (a lock is held, a round not full) is
taken up where it stopped, between two looks at signals and deadlines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from multiverso import kernels
from multiverso import layout as at
from multiverso.deadline import Deadline
from multiverso.errors import InterruptedRoundError, RowIdError, WaitTimeoutError
from multiverso.memory.words import load64
from multiverso.runtime.session import Session
from multiverso.shards.shard import Shard

Array = npt.NDArray[Any]
RowIds = npt.NDArray[np.int64]
_SNAPSHOT_TRIES = 1000


@dataclass(frozen=True)
class Loops:
    """A rule, compiled: what a kernel needs to call it."""

    push: int  # addresses of the code; pull may be 0
    pull: int
    own: int  # address of this worker's own arrays
    hyper: Array

    @cached_property
    def hyper_address(self) -> int:
        """Where the hyperparameters are; asking NumPy takes a third of a small step's time."""
        return int(self.hyper.ctypes.data)


class Access(Protocol):
    """What a table does with flat arrays."""

    def add(self, delta: Array) -> None: ...
    def get(self, out: Array, deadline: Deadline | None) -> None: ...
    def exchange(self, local: Array, last: Array, deadline: Deadline | None) -> None: ...
    def step(self, loops: Loops, local: Array, push: bool, pull: bool, deadline: Deadline | None) -> None: ...
    def add_rows(self, ids: RowIds, delta: Array) -> None: ...
    def get_rows(self, ids: RowIds, out: Array, deadline: Deadline | None) -> None: ...
    def snapshot(self, out: Array) -> None: ...
    def put(self, values: Array) -> None: ...
    def version(self) -> int: ...
    def staged(self) -> Array | None: ...
    def restage(self, delta: Array | None) -> None: ...
    def leave(self) -> None: ...
    def refuse_unfinished(self) -> None: ...


def access_to(session: Session, shard: Shard, update: int, name: str) -> Access:
    """Returns the way that the session's consistency asks for."""
    ways: dict[int, type[Asynchronous]] = {at.ASYNCHRONOUS: Asynchronous, at.BOUNDED: Bounded}
    if shard.mode == at.SYNCHRONOUS:
        return Synchronous(session, shard, update, name)
    return ways[shard.mode](session, shard, update, name)


def bad_row(ids: RowIds, position: int, shard: Shard) -> RowIdError:
    """Returns the error for a row id that the kernel found to be out of range."""
    return RowIdError(
        f"row id {ids[position]} (at position {position}) is not in 0 .. {shard.spec.rows - 1}; nothing was changed"
    )


class Asynchronous:
    """Every operation takes effect at once, stripe by stripe."""

    def __init__(self, session: Session, shard: Shard, update: int, name: str) -> None:
        self._session = session
        self._control = session.control.address
        self._shard = shard
        self._base = shard.base
        self._me = session.worker_id
        self._update = update
        self._name = name
        self._kernels = kernels.load(shard.spec.dtype)
        self._waits = kernels.load_waits()
        dense = self._kernels.dense
        self._add, self._get, self._put, self._exchange = dense.add, dense.get, dense.put, dense.exchange
        if shard.spec.kind == "matrix":
            rows = self._kernels.rows
            self._add_rows, self._get_rows = rows.add_rows, rows.get_rows

    def add(self, delta: Array) -> None:
        code = self._add(self._control, self._base, self._update, self._me, delta, 0)
        if code:
            self._resume(
                code,
                lambda done: self._add(self._control, self._base, self._update, self._me, delta, done),
                None,
            )

    def get(self, out: Array, deadline: Deadline | None) -> None:
        code = self._get(self._control, self._base, self._me, out, 0)
        if code:
            self._resume(
                code, lambda done: self._get(self._control, self._base, self._me, out, done), deadline
            )

    def exchange(self, local: Array, last: Array, deadline: Deadline | None) -> None:
        code = self._exchange(self._control, self._base, self._update, self._me, local, last, 0)
        if code:
            self._resume(
                code,
                lambda done: self._exchange(
                    self._control, self._base, self._update, self._me, local, last, done
                ),
                deadline,
            )

    def step(self, loops: Loops, local: Array, push: bool, pull: bool, deadline: Deadline | None) -> None:
        kernel = kernels.load_steps(self._shard.spec.dtype).step

        def go(done: int) -> int:
            code: int = kernel(
                self._control,
                self._base,
                self._update,
                loops.push if push else 0,
                loops.pull if pull else 0,
                self._me,
                loops.own,
                loops.hyper_address,
                local,
                int(pull),
                done,
            )
            return code

        code = go(0)
        if code:
            self._resume(code, go, deadline)

    def add_rows(self, ids: RowIds, delta: Array) -> None:
        code = self._add_rows(self._control, self._base, self._update, self._me, ids, delta, 0)
        if code:
            self._resume_rows(
                code,
                ids,
                lambda done: self._add_rows(
                    self._control, self._base, self._update, self._me, ids, delta, done
                ),
                None,
            )

    def get_rows(self, ids: RowIds, out: Array, deadline: Deadline | None) -> None:
        code = self._get_rows(self._control, self._base, self._me, ids, out, 0)
        if code:
            self._resume_rows(
                code,
                ids,
                lambda done: self._get_rows(self._control, self._base, self._me, ids, out, done),
                deadline,
            )

    def snapshot(self, out: Array) -> None:
        Asynchronous.get(self, out, None)

    def put(self, values: Array) -> None:
        code = self._put(self._control, self._base, self._me, values, 0)
        if code:
            self._resume(
                code, lambda done: self._put(self._control, self._base, self._me, values, done), None
            )

    def version(self) -> int:
        return int(self._waits.version(self._base))

    def staged(self) -> Array | None:
        return None

    def restage(self, delta: Array | None) -> None:
        if delta is not None:  # saved in a synchronous job
            self.add(delta)

    def leave(self) -> None:
        pass

    def refuse_unfinished(self) -> None:
        pass

    def _resume(self, code: int, again: Callable[[int], int], deadline: Deadline | None) -> None:
        """Goes on where a kernel stopped at a lock that it did not get in half a second."""
        last = [code]

        def once_more() -> int:
            last[0] = again(last[0] >> 16)
            return last[0]

        self._session.go_on(code, once_more, deadline, f"a lock of {self._name}")

    def _resume_rows(
        self, code: int, ids: RowIds, again: Callable[[int], int], deadline: Deadline | None
    ) -> None:
        if code & 0xFFFF == kernels.BAD_ROW:
            raise bad_row(ids, code >> 16, self._shard)
        self._resume(code, again, deadline)


class Bounded(Asynchronous):
    """As asynchronous, but a read waits until the slowest worker is at most ``staleness`` ticks behind."""

    def get(self, out: Array, deadline: Deadline | None) -> None:
        self._wait(deadline)
        super().get(out, deadline)
        self._tick()

    def exchange(self, local: Array, last: Array, deadline: Deadline | None) -> None:
        self._wait(deadline)
        super().exchange(local, last, deadline)
        self._tick()

    def step(self, loops: Loops, local: Array, push: bool, pull: bool, deadline: Deadline | None) -> None:
        if pull:
            self._wait(deadline)
        super().step(loops, local, push, pull, deadline)
        if pull:
            self._tick()

    def get_rows(self, ids: RowIds, out: Array, deadline: Deadline | None) -> None:
        self._wait(deadline)
        super().get_rows(ids, out, deadline)
        self._tick()

    def _wait(self, deadline: Deadline | None) -> None:
        self._session.enter()
        ticks = load64(self._shard.line(self._me) + at.CLOCK)
        target = ticks - self._session.consistency.staleness
        arguments = (self._control, self._base, self._me, target)
        code = self._waits.wait_clock(*arguments)
        if code:
            what = f"clock {target} of {self._name}"
            self._session.go_on(code, lambda: self._waits.wait_clock(*arguments), deadline, what)

    def _tick(self) -> None:
        self._waits.tick(self._control, self._base, self._me)


class Synchronous:
    """Adds go to this worker's slot; a read is the end of a round. One thread at a time."""

    def __init__(self, session: Session, shard: Shard, update: int, name: str) -> None:
        self._session = session
        self._control = session.control.address
        self._shard = shard
        self._base = shard.base
        self._me = session.worker_id
        self._update = update
        self._name = name
        self._rounds = kernels.load(shard.spec.dtype).rounds
        self._waits = kernels.load_waits()
        self._like = np.empty(0, shard.spec.dtype)
        self._lock = threading.Lock()
        self._staged = False
        # open, chunk, round, stage, members of each chunk: the unfinished round; see kernels.rounds
        self._progress = np.zeros(4 + load64(shard.base + at.CHUNKS), np.int64)
        self._progress[2] = shard.first_round(session.worker_id)
        self._reading: str | None = None  # what an interrupted read was

    def add(self, delta: Array) -> None:
        with self._lock:
            self._refuse_in_round()
            self._rounds.stage(self._base, self._me, delta, int(not self._staged))
            self._staged = True

    def add_rows(self, ids: RowIds, delta: Array) -> None:
        with self._lock:
            self._refuse_in_round()
            bad = self._rounds.stage_rows(self._base, self._me, ids, delta, int(not self._staged))
            if bad >= 0:
                raise bad_row(ids, bad, self._shard)
            self._staged = True

    def get(self, out: Array, deadline: Deadline | None) -> None:
        with self._lock:
            self._commit("get", deadline)
            self._rounds.take(self._base, self._me, self._progress, out)

    def get_rows(self, ids: RowIds, out: Array, deadline: Deadline | None) -> None:
        if ids.size and (ids.min() < 0 or ids.max() >= self._shard.spec.rows):
            outside = (ids < 0) | (ids >= self._shard.spec.rows)
            raise bad_row(ids, int(np.argmax(outside)), self._shard)
        with self._lock:
            self._commit("get", deadline)
            self._rounds.take_rows(self._base, self._me, self._progress, ids, out)

    def exchange(self, local: Array, last: Array, deadline: Deadline | None) -> None:
        with self._lock:
            if self._progress[0] and self._reading != "exchange":
                self._refuse_in_round()
            if self._staged:  # adds of this round are in the slot already: this one joins them
                if not self._progress[0]:
                    self._rounds.stage_difference(self._base, self._me, local, last, 0)
                self._commit("exchange", deadline)
                self._rounds.take_both(self._base, self._me, self._progress, local, last)
                return
            self._reading = "exchange"
            arguments = (self._control, self._base, self._update, self._me, self._progress, local, last)
            self._go_through(lambda: self._rounds.commit_exchange(*arguments), deadline)

    def step(self, loops: Loops, local: Array, push: bool, pull: bool, deadline: Deadline | None) -> None:
        steps = kernels.load_steps(self._shard.spec.dtype)
        own, hyper = loops.own, loops.hyper_address
        with self._lock:
            if not (self._progress[0] and self._reading == "step"):  # else: this push is in the open round
                self._refuse_in_round()
                if push:
                    first = int(not self._staged)
                    steps.stage_step(
                        self._base, loops.push, self._me, own, hyper, self._progress, local, first, int(pull)
                    )
                    self._staged = True
            if pull:
                self._commit("step", deadline)
                steps.finish_step(
                    self._base, loops.pull, self._me, own, hyper, self._progress, local, int(push)
                )

    def snapshot(self, out: Array) -> None:
        for _ in range(_SNAPSHOT_TRIES):
            number = self._shard.committed
            self._rounds.committed_copy(self._base, number, out)
            # a buffer is written to again only after the next round is finished
            if self._shard.committed == number:
                return
        raise WaitTimeoutError(
            f"no consistent copy of {self._name} in {_SNAPSHOT_TRIES} tries: its rounds are too quick"
        )

    def put(self, values: Array) -> None:
        with self._lock:
            self._refuse_in_round()
            self._rounds.committed_put(self._base, self._shard.committed, values)

    def version(self) -> int:
        return self._shard.committed

    def staged(self) -> Array | None:
        with self._lock:
            self._refuse_in_round()
            return self._shard.slot(self._me).copy() if self._staged else None

    def restage(self, delta: Array | None) -> None:
        with self._lock:
            self._refuse_in_round()
            self._staged = False
        if delta is not None:
            self.add(delta)

    def leave(self) -> None:
        """What was added since the last read goes into the others' next round."""
        if self._staged and self._progress[0] == 0:
            self._staged = False
            self._waits.leave(self._control, self._base, self._me, int(self._progress[2]))

    def refuse_unfinished(self) -> None:
        """Before the table is closed: what was added since the last read would be lost."""
        with self._lock:
            self._refuse_in_round()
            if self._staged:
                raise InterruptedRoundError(
                    f"this worker has added to {self._name} since its last read, which no round has taken up; "
                    "get() first, in every worker, or shutdown()"
                )

    def _refuse_in_round(self) -> None:
        if self._progress[0] != 0:
            raise InterruptedRoundError(
                f"a {self._reading} of {self._name} was interrupted in round {self._progress[2]}; "
                f"call {self._reading} again to finish it first"
            )

    def _commit(self, reading: str, deadline: Deadline | None) -> None:
        if self._progress[0] and self._reading != reading:
            self._refuse_in_round()
        self._reading = reading
        arguments = (
            self._control,
            self._base,
            self._update,
            self._me,
            int(self._staged),
            self._progress,
            self._like,
        )
        self._go_through(lambda: self._rounds.commit(*arguments), deadline)
        self._staged = False

    def _go_through(self, commit: Callable[[], int], deadline: Deadline | None) -> None:
        self._session.enter()
        code = commit()
        if code:
            what = f"round {self._progress[2]} of {self._name}"
            self._session.go_on(code, commit, deadline, what)
