"""The arrays of a model, shared: parameters add up what each worker changed, statistics are averaged.

What every binding needs once: many arrays become a few flat buffers, one for each dtype, so that a model of a
thousand arrays is one exchange and not a thousand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.rules import Rule, share
from multiverso.rules.averaging import share_of_difference, take_centre
from multiverso.rules.shared import Shared, check_mode
from multiverso.runtime import Session
from multiverso.runtime.current import current
from multiverso.spec import check_name
from multiverso.tables import ArrayTableHandler
from multiverso.tables.access import Loops

Array = NDArray[Any]


def shared_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which arrays of ``dtype`` are shared: float32, or float64 for float64.

    Sums stay in float32 for 16-bit floats, where small changes would vanish.

    Raises:
        DtypeMismatchError: not a real floating dtype; integers and booleans are counters and masks, which
            neither a sum nor an average keeps meaningful, so they stay with their worker.
    """
    if dtype == np.float64:
        return np.dtype(np.float64)
    if dtype == np.float32 or dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    raise DtypeMismatchError(
        f"a parameter of dtype {dtype} cannot be shared: expected float16, bfloat16, float32 or float64; "
        "keep integer and boolean arrays out of the shared ones"
    )


@dataclass(frozen=True)
class _Flat:
    """One table with the buffer that this worker exchanges with it, all of one dtype and size."""

    shared: Shared
    local: Array

    def exchange(self, workers: int) -> None:
        self.shared.exchange(self.local)


@dataclass(frozen=True)
class _Averaged(_Flat):
    """Statistics: each moves its share of the way from the table's value to this worker's.

    From the value that the table has under the lock, and not from one that was read before: a straggler's
    difference to an old variance, added to one that has shrunk since, would make it negative.
    """

    loops: Loops
    last: Array  # what was taken last

    def exchange(self, workers: int) -> None:
        # An unchanged one only reads, so that workers agree after a barrier and an exchange. Bytes: NaN included,
        # and many times quicker than array_equal.
        changed = self.local.tobytes() != self.last.tobytes()
        self.loops.hyper[0] = 1 / workers
        self.shared.table.step(self.loops, self.local, changed, True)
        np.copyto(self.last, self.local)


_AVERAGE = Rule("average of statistics", share_of_difference, take_centre)


class SharedParams:
    """Shares a model's arrays between all workers: collective, or by name.

    Each worker's changes since its last exchange are added to the shared parameters; of ``statistics``
    (running means and variances) it contributes a weighted average instead, so that a variance stays one. All
    workers begin with the same values.

    Attributes:
        arrays: one writable view for each given array, of its shape, in float32 or float64 (`shared_dtype`).
            Train on these views themselves, or copy into them before an exchange and out of them after it.
        statistics: the same for the given statistics.

    Not thread-safe: one thread at a time.

    Example:
        >>> import numpy as np, multiverso as mv
        >>> mv.init()
        >>> shared = SharedParams([np.zeros((2, 3), "float32"), np.zeros(3, "float32")])
        >>> shared.arrays[0] += 1  # a training step
        >>> shared.exchange()
        >>> mv.shutdown()
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        statistics: Sequence[Array] = (),
        *,
        name: str | None = None,
        every: int | timedelta = 1,
        initial: str = "master",
        rule: Rule | None = None,
        allocate: Callable[[int, np.dtype[Any]], Array] = np.empty,
        session: Session | None = None,
    ) -> None:
        """Makes the tables; returns when every live worker has done so (with ``name``: at once).

        Args:
            arrays: parameters of any shape, float16, bfloat16, float32 or float64. Copied, never modified.
            statistics: arrays that are averaged; the same dtypes.
            name: create the tables, or attach to those of this name.
            every: `step` exchanges at every so many calls, or when that much time has passed since the last
                exchange. Time does not tick alike in all workers, so a synchronous job refuses it.
            initial: whose values count, as in `multiverso.ArrayTableHandler`.
            rule: how parameters are exchanged (`multiverso.rules`); changes add up (ASGD) by default.
            allocate: makes the flat buffers, given a size and a dtype: pinned memory, say.
            session: the session to use instead of the current one.

        Raises:
            DtypeMismatchError: an array that is not of a floating dtype; nothing has been made then.
            ValueError: no arrays at all; a name that is no text; ``every`` below one call or not above zero time;
                a rule that is not defined for the session's consistency.
        """
        given = [(np.asarray(array), False) for array in arrays]
        given += [(np.asarray(array), True) for array in statistics]
        if not given:
            raise ValueError("there is nothing to share: both lists of arrays are empty")
        check_name(name)
        session = session or current()
        if rule is not None:
            check_mode(rule, session.consistency.mode)  # before any table is made
        self._session = session
        self._due = Every(every)
        if self._due.by_time and session.consistency.mode == "sync":
            raise ValueError(
                "every= by time lets workers exchange unequally often, and a synchronous round needs all of "
                "them: give a number of steps"
            )
        groups: dict[tuple[bool, np.dtype[Any]], list[int]] = {}
        for index, (array, averaged) in enumerate(given):
            groups.setdefault((averaged, shared_dtype(array.dtype)), []).append(index)
        views: list[Array] = [np.empty(0)] * len(given)
        self._flats: list[_Flat] = []
        self._at = 0
        self._members: list[list[int]] = []
        for (averaged, dtype), members in sorted(groups.items(), key=str):
            flat = allocate(sum(given[index][0].size for index in members), dtype)
            start = 0
            for index in members:
                array = given[index][0]
                views[index] = flat[start : start + array.size].reshape(array.shape)
                views[index][...] = array
                start += array.size
            if flat.size:
                self._flats.append(_share(flat, averaged, name, initial, rule, session))
                self._members.append(members)
        self._views = views
        self._dtypes = [array.dtype for array, _ in given]
        self._given: dict[int, Array] = {}  # 16-bit values as they were given out, in float32
        self.arrays = views[: len(arrays)]
        self.statistics = views[len(arrays) :]

    def values(self) -> list[Array]:
        """Returns fresh copies of all arrays and then all statistics, in the dtypes that were handed in."""
        out = [view.astype(dtype) for view, dtype in zip(self._views, self._dtypes, strict=True)]
        self._given = {i: a.astype(np.float32) for i, a in enumerate(out) if a.dtype.itemsize == 2}
        return out

    def sync(self, values: Sequence[Any]) -> list[Array]:
        """Takes a model's values, exchanges, and returns what they are now: for models that are not views.

        Of 16-bit values only what changed since they were given out is taken: the shared ones are finer, and
        a rounding error is nothing that this worker has learned.

        Args:
            values: all arrays and then all statistics, of the shapes handed in. They are not modified.

        Raises:
            ShapeMismatchError: other shapes, or another number of arrays; nothing has been exchanged.
        """
        new = [np.asarray(value) for value in values]
        shapes, expected = [value.shape for value in new], [view.shape for view in self._views]
        if shapes != expected:
            raise ShapeMismatchError(
                f"the model's arrays have the shapes {shapes} now; they had {expected} when they were shared"
            )
        for index, (view, value) in enumerate(zip(self._views, new, strict=True)):
            if index in self._given:
                view += value.astype(np.float32) - self._given[index]
            else:
                np.copyto(view, value, casting="same_kind")
        self.exchange()
        return self.values()

    def exchange(self) -> None:
        """Adds this worker's changes to the shared values and takes the values of all, in place.

        Blocks as `multiverso.ArrayTableHandler.exchange` does: not at all in an asynchronous job, for the
        round in a synchronous one (one exchange is one round). After one that raised, the next takes it up where
        it stopped: there the others wait.
        """
        self._exchange()
        self._due.restart()

    def begin(self) -> Callable[[], None]:
        """Counts steps anew from here, and returns what exchanges: for another thread, beside the training."""
        self._due.restart()
        return self._exchange

    def hasten(self) -> None:
        """Makes an exchange due at the next step: one that was begun has failed."""
        self._due.hasten()

    def _exchange(self) -> None:
        self._session.check()
        for index in range(self._at, len(self._flats)):
            self._at = index
            self._flats[index].exchange(self._session.workers_num)
        self._at = 0

    def centre(self) -> list[Array]:
        """Returns copies of the shared arrays and then statistics as they are now: what to validate and save.

        Never waits and exchanges nothing. This worker's own may differ, and with EASGD they do.
        """
        out = [view.copy() for view in self._views]
        for flat, members in zip(self._flats, self._members, strict=True):
            values, start = flat.shared.table.snapshot(), 0
            for index in members:
                out[index][...] = values[start : start + out[index].size].reshape(out[index].shape)
                start += out[index].size
        return out

    def due(self) -> bool:
        """Counts one step of training; returns whether an exchange is due now."""
        return self._due.step()

    def step(self) -> bool:
        """Counts one step of training and exchanges when that is due; returns whether it did."""
        due = self.due()
        if due:
            self.exchange()
        return due


def _share(
    flat: Array, averaged: bool, name: str | None, initial: str, rule: Rule | None, session: Session
) -> _Flat:
    if name is not None:
        name = f"{name}/{'statistics' if averaged else 'parameters'}/{flat.dtype}"
    shared = share(flat, _AVERAGE if averaged else rule, name=name, initial=initial, session=session)
    if not averaged:
        return _Flat(shared, flat)
    loops = shared.table.compile_rule(_AVERAGE.push, _AVERAGE.pull, (1.0,))
    return _Averaged(shared, flat, loops, flat.copy())


_BROADCAST = 1 << 20


def broadcast(arrays: Sequence[Array], session: Session | None = None) -> None:
    """Gives all workers the first live worker's values, bit for bit and in place: collective.

    For what is not trained but has to be equal. They pass through one table of at most 4 MiB.

    Args:
        arrays: writable C-contiguous arrays of any dtype; of the same sizes in every worker.
        session: the session to use instead of the current one.
    """
    session = session or current()
    raw = [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes]
    total = sum(part.size for part in raw)
    if not total:
        return
    size = min(_BROADCAST, -(-total // 4))
    table = ArrayTableHandler(size, dtype="int32", session=session)
    buffer = np.zeros(size, np.int32)
    window = buffer.view(np.uint8)
    giver = session.worker_id == min(session.live_workers())
    for start in range(0, total, window.size):
        if giver:
            _pass(raw, start, window, out=True)
            table.replace(buffer, [])
        session.barrier()
        if not giver:
            table.snapshot(out=buffer)
            _pass(raw, start, window, out=False)
        session.barrier()


def _pass(raw: list[Array], start: int, window: Array, out: bool) -> None:
    """Copies what lies at ``start`` of all arrays, laid end to end, to or from the window."""
    position = 0
    for part in raw:
        low, high = max(start, position), min(start + window.size, position + part.size)
        if low < high:
            mine, shared = part[low - position : high - position], window[low - start : high - start]
            np.copyto(*((shared, mine) if out else (mine, shared)))
        position += part.size


class Every:
    """Says when to exchange: every so many steps, or when so much time has passed."""

    def __init__(self, every: int | timedelta) -> None:
        if isinstance(every, timedelta):
            self._steps, self._seconds = 0, every.total_seconds()
            if self._seconds <= 0:
                raise ValueError(f"every={every!r}: expected a time above zero")
        elif isinstance(every, int) and not isinstance(every, bool):
            self._steps, self._seconds = every, 0.0
            if every < 1:
                raise ValueError(f"every={every}: expected at least 1 step")
        else:
            raise TypeError(f"every={every!r}: expected a number of steps (int) or a datetime.timedelta")
        self.restart()

    @property
    def by_time(self) -> bool:
        """Whether time and not steps decides."""
        return self._steps == 0

    def step(self) -> bool:
        """Counts a step; returns whether an exchange is due."""
        self._count += 1
        if self.by_time:
            return time.monotonic() - self._since >= self._seconds
        return self._count >= self._steps

    def hasten(self) -> None:
        """Makes the next step due."""
        self._count, self._since = self._steps, -math.inf

    def restart(self) -> None:
        """Counts anew from here."""
        self._count = 0
        self._since = time.monotonic()
