"""What a consistency knows of one table: its memory, its kernels, and how to wait.

A consistency (``asynchronous``, ``bounded``, ``synchronous``) is what reads and adds mean. It gets flat arrays that
have been checked, works on the table's memory through kernels, and knows no session, node or process: what it needs
of them is a `TableAccess`. A new one is a file beside those three, with the methods of `Consistency`,
and a line in ``tables/held.py``.

**What a call that raised has done is in memory.** An exception (Ctrl-C, an alarm's handler, a deadline) may come
between any two steps of Python, also after a kernel is done and before its caller knows it. So every kernel writes how
far it is into the `Call` that it gets, and what a round needs into the round's own words, in the same step as
its effects. A call that goes in again with the same ``Call`` does what is left to do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import RowIdError
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory.words import load64
from multiverso.spec.modes import Quorum
from multiverso.spec.table import TableSpec

Array = npt.NDArray[Any]
RowIds = npt.NDArray[np.int64]
Versions = npt.NDArray[np.int64]


class Call:
    """How far one call is. The kernels write it, the caller looks at it when an exception came.

    Attributes:
        address: where the kernels find it.
        done: stripes or rows that are done, of a call that is not complete.
        complete: 1 once everything is done; who returns to the user sets it to 0 again.
    """

    __slots__ = ("_words", "address", "complete", "done")

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 2)()
        self.address = ctypes.addressof(self._words)
        self.done = ctypes.c_int64.from_buffer(self._words, at.CALL_DONE)
        self.complete = ctypes.c_int64.from_buffer(self._words, at.CALL_COMPLETE)


@dataclass(frozen=True)
class CompiledRule:
    """A rule's two loops, compiled: what a kernel needs to call them.

    Attributes:
        push, pull: addresses of the code; ``pull`` may be 0.
        local_state: address of this worker's own arrays.
        hyper: the hyperparameters, in the table's dtype.
    """

    push: int
    pull: int
    local_state: int
    hyper: Array = field(compare=False)

    @cached_property
    def words(self) -> Array:
        """All of it as kernels take it: see ``kernels/rules.py``."""
        return np.array([self.push, self.pull, self.local_state, self.hyper.ctypes.data])


@dataclass(frozen=True)
class TableAccess:
    """One worker's way to the memory of one table.

    Attributes:
        control: address of the job's control segment.
        base: address of the table's first byte.
        worker_id: this worker's number.
        index: which line of the table is whose.
        update: address of the updater's compiled loop; 0 for plain adding.
        spec: the table.
        name: what error messages call it.
        staleness: the bound, in ticks, where there is one.
        first_round: the first synchronous round that this worker takes part in.
        quorum: how many have to come to a round; None: all.
        record, replay: the folder that tells which rounds each read was in, to be written, and to be followed.
        slot: gives the memory in which this worker adds up what it contributes to a round.
        check_may_wait: to be called before anything that may wait for other workers; raises where that makes no sense.
        resume: ``resume(code, again, deadline, what)`` calls ``again`` until it returns 0; raises when the wait
            cannot end well.
        is_awaited: of a worker that takes a dead one's place: whether all whose clocks are below this one wait for it,
            and so do not tick before it comes where they are.
    """

    control: int
    base: int
    worker_id: int
    index: WorkerIndex
    update: int
    spec: TableSpec
    name: str
    staleness: int
    first_round: int
    slot: Callable[[], Array]
    check_may_wait: Callable[[], None]
    resume: Callable[[int, Callable[[], int], Deadline | None, str], None]
    is_awaited: Callable[[int], bool] | None = None
    quorum: Quorum | None = None
    record: Path | None = None
    replay: Path | None = None

    @property
    def me(self) -> int:
        """This worker's index, as kernels know it."""
        return self.index.of(self.worker_id)

    @property
    def line(self) -> int:
        """Address of this worker's line of the table."""
        return self.line_of(self.worker_id)

    def line_of(self, worker_id: int) -> int:
        """Address of a worker's line of the table."""
        return self.base + load64(self.base + at.LINES) + at.LINE_STRIDE * self.index.of(worker_id)

    def block_of(self, worker_id: int) -> int:
        """Address of a worker's block in the control segment."""
        return self.control + at.worker_block(self.index.of(worker_id))


def refuse_bad_rows(ids: RowIds, spec: TableSpec) -> None:
    """Raises RowIdError where an id is out of range."""
    if ids.size and (ids.min() < 0 or ids.max() >= spec.rows):
        outside = (ids < 0) | (ids >= spec.rows)
        raise bad_row(ids, int(np.argmax(outside)), spec)


def bad_row(ids: RowIds, position: int, spec: TableSpec) -> RowIdError:
    """Returns the error for a row id that is out of range."""
    return RowIdError(
        f"row id {ids[position]} (at position {position}) is not in 0 .. {spec.rows - 1}; nothing was changed"
    )


class ByStripe(Protocol):
    """What there is beside `Consistency` where adds take effect at once, one stripe after another."""

    def exchange_rows(self, ids: RowIds, local: Array, last: Array, call: Call, deadline: Deadline | None) -> None:
        """Pushes ``local - last`` of some rows and pulls the result into both; RowIdError before anything changes."""

    def changed_stripes(self, seen: Versions, found: Versions, deadline: Deadline | None) -> int:
        """Writes the numbers of the stripes of a matrix whose version is not the one seen; returns how many.

        It waits for what `get_stripes` of them may not be without.
        """

    def get_stripes(
        self, stripes: Versions, versions: Versions, out: Array, call: Call, deadline: Deadline | None
    ) -> None:
        """Reads stripes of a matrix one after another, and the version that each has."""


class Consistency(Protocol):
    """What reads and adds of one table mean.

    Each method continues where ``call`` says that an earlier one stopped, and may raise what a wait may raise:
    WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError. ``deadline`` None is the session's own time
    from when it first has to wait.

    Arrays are C-contiguous and of the table's dtype. Of a whole table they are flat, (rows * columns,); of ``n`` rows
    they are (n * columns,) beside ``ids`` of (n,), int64. ``seen`` and ``found`` have a place for each stripe,
    ``stripes`` and ``versions`` for each that is read, int64. What is only read (``delta``, ``ids``) is never changed.

    Attributes:
        in_rounds: whether adds take effect in rounds.
    """

    in_rounds: bool

    @property
    def by_stripe(self) -> ByStripe | None:
        """What goes by stripe; None in rounds: there an exchange of rows is an ``add_rows`` and a ``get_rows``."""

    def add(self, delta: Array, call: Call, deadline: Deadline | None = None) -> None:
        """Adds to the whole table."""

    def get(self, out: Array, call: Call, deadline: Deadline | None) -> None:
        """Reads the whole table into ``out``."""

    def get_again(self, out: Array) -> None:
        """Reads once more what a ``get`` that is complete has read, as its repetition: no tick, no round."""

    def exchange(self, local: Array, last: Array, call: Call, deadline: Deadline | None) -> None:
        """Pushes ``local - last`` and pulls the result into both."""

    def apply_rule(
        self, rule: CompiledRule, local: Array, push: bool, pull: bool, call: Call, deadline: Deadline | None
    ) -> None:
        """Runs a rule's push, pull or both."""

    def add_rows(self, ids: RowIds, delta: Array, call: Call, deadline: Deadline | None = None) -> None:
        """Adds to some rows; RowIdError before anything is changed."""

    def get_rows(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        """Reads some rows."""

    def get_rows_again(self, ids: RowIds, out: Array) -> None:
        """As ``get_again``."""

    def snapshot(self, out: Array) -> None:
        """Reads the whole table outside the rounds and clocks."""

    def put(self, values: Array) -> None:
        """Overwrites the whole table."""

    def version(self) -> int:
        """How often it has changed, as this worker is to see it."""

    def newest(self) -> int:
        """How often it has changed by now."""

    def staged(self) -> Array | None:
        """Returns a copy of what this worker has added since its last read and nobody has seen, or None."""

    def restage(self, delta: Array | None) -> None:
        """Puts back what ``staged`` returned, in the place of what was added since."""

    def refuse_unfinished(self) -> None:
        """Before the table is closed: raises InterruptedRoundError where something would be lost."""

    def leave(self) -> None:
        """Ends this worker's part in the table."""

    @property
    def open_round(self) -> str | None:
        """What an interrupted call was that has begun a round which is not finished, in words; or None."""
