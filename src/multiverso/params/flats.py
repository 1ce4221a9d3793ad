"""Many arrays of a model as few flat buffers beside their tables: one for each dtype and kind, one for each by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.checks import whole
from multiverso.due import Due
from multiverso.params.rows import RowExchange
from multiverso.params.values import check_alike, shared_dtype
from multiverso.rules import Rule, share
from multiverso.rules.averaging import share_of_difference, take_centre
from multiverso.rules.shared import Shared
from multiverso.tables import TableHandler

Array = NDArray[Any]


@dataclass(eq=False)
class Flat:
    """One table with the buffer that this worker exchanges with it, all of one dtype and size."""

    shared: Shared
    local: Array

    @property
    def table(self) -> TableHandler:
        """The shared numbers."""
        return self.shared.table

    def exchange(self, workers: int, whole: bool, always: bool) -> None:
        """Pushes and pulls by the rule, or ``always``."""
        self.shared.exchange(self.local, always=always)

    def state(self) -> dict[str, Any]:
        """Returns what is this worker's own: the arrays themselves, not copies."""
        return {"local": self.local, "rule": self.shared.state()}

    def check(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Raises SnapshotError unless `restore` can take the states."""
        self.shared.state()  # raises where an exchange has to be finished first
        check_alike(state["local"], self.local)
        self.shared.check_state(state["rule"], [each["rule"] for each in left])

    def restore(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Continues from what `state` returned, once the table has its values; ``left``: of those that do not."""
        np.copyto(self.local, state["local"])
        self.shared.set_state(state["rule"], [each["rule"] for each in left])

    def join(self, state: dict[str, Any]) -> None:
        """Begins from the table's values, in step with a worker that continues from ``state``."""
        self.shared.join(self.local, state["rule"])


@dataclass(eq=False)
class Averaged(Flat):
    """Statistics: each moves its share of the way from the table's value to this worker's.

    From the value that the table has under the lock, and not from one that was read before: a straggler's
    difference to an old variance, added to one that has shrunk since, would make it negative.
    """

    last: Array  # what was taken last
    # of an exchange that raised: whether it has found a change, once it has looked, and whether that was applied
    changed: bool | None = None
    applied: bool = False

    def exchange(self, workers: int, whole: bool, always: bool) -> None:
        """Moves by this worker's share, one of ``workers``."""
        # An unchanged one only reads, so that workers agree after a barrier and an exchange. Bytes: NaN included,
        # and many times quicker than array_equal.
        if self.changed is None:
            self.changed = self.local.tobytes() != self.last.tobytes()
        compiled = self.shared.compiled
        assert compiled is not None  # that of _AVERAGE
        compiled.hyper[0] = 1 / workers
        if not self.applied:
            self.shared.ruled.apply(compiled, self.local, self.changed, True)
            self.applied = True
        np.copyto(self.last, self.local)
        self.changed, self.applied = None, False  # no exception comes between this and the return

    def state(self) -> dict[str, Any]:
        """Returns what is this worker's own: the arrays themselves, not copies."""
        return super().state() | {"last": self.last}

    def restore(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Continues from what `state` returned, once the table has its values."""
        super().restore(state, left)
        self.changed, self.applied = None, False
        np.copyto(self.last, state["last"])

    def join(self, state: dict[str, Any]) -> None:
        """Begins with the table's values: for a worker that did not take part when `state` was saved."""
        super().join(state)
        self.changed, self.applied = None, False
        np.copyto(self.last, self.local)


_AVERAGE = Rule("average of statistics", share_of_difference, take_centre, hyper=(1.0,), convex=True)


def _share_flat(flat: Array, averaged: bool, rule: Rule, name: str | None, **more: Any) -> Flat:
    """Shares one flat array: by ``rule``, or (``averaged``) as statistics."""
    if name is not None:
        name = f"{name}/{'statistics' if averaged else 'parameters'}/{flat.dtype}"
    shared = share(flat, _AVERAGE if averaged else rule, name=name, **more)
    return Averaged(shared, flat, flat.copy()) if averaged else Flat(shared, flat)


@dataclass(frozen=True)
class Packed:
    """A model's arrays in the buffers that are exchanged.

    Attributes:
        views: one for each array, of its shape, in float32 or float64: a part of a buffer.
        flats: the parts of buffers beside their tables, in the order in which they are exchanged.
        fragments: the same by the exchange that merges them: those of each take turns.
        buffers: of each buffer its parts, and the numbers of the arrays that are in it, both in their order.
    """

    views: list[Array]
    fragments: list[list[Flat | RowExchange]]
    flats: list[Flat | RowExchange] = field(default_factory=list)
    buffers: list[tuple[list[Flat | RowExchange], list[int]]] = field(default_factory=list)

    def add(self, parts: list[Flat | RowExchange], members: list[int]) -> None:
        """Adds a buffer; its last part belongs to the last fragment."""
        self.buffers.append((parts, members))
        self.flats.extend(parts)
        for fragment, part in zip(self.fragments[-len(parts) :], parts, strict=True):
            fragment.append(part)

    def centre(self) -> list[Array]:
        """Returns copies of the shared arrays as they are now, in the views' order, shapes and dtypes."""
        out = [view.copy() for view in self.views]
        for parts, members in self.buffers:
            pieces, start = [part.table.snapshot().reshape(-1) for part in parts], 0
            values = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
            for index in members:
                out[index][...] = values[start : start + out[index].size].reshape(out[index].shape)
                start += out[index].size
        return out


def pack(
    given: Sequence[tuple[Array, bool]],
    in_rows: range,
    allocate: Callable[[int, np.dtype[Any]], Array],
    rule: Rule,
    whole_every: int,
    fragments: int,
    name: str | None,
    holds: str,
    **more: Any,
) -> Packed:
    """Copies arrays into flat buffers and makes their tables: first by dtype and kind, then the matrices.

    Args:
        given: each array, and whether it is averaged.
        in_rows: the numbers of the matrices that are exchanged by rows.
        allocate: makes a buffer, given its size and dtype.
        rule, whole_every, fragments, name: as for `SharedParams`. The same order in every worker.
        holds: what lies in the buffers, in words.
        more: the session, and whose values count.
    """
    groups: dict[tuple[bool, np.dtype[Any]], list[int]] = {}
    for index, (array, averaged) in enumerate(given):
        if index not in in_rows:
            groups.setdefault((averaged, shared_dtype(array.dtype)), []).append(index)
    packed = Packed([np.empty(0)] * len(given), [[] for _ in range(fragments)])
    for (averaged, dtype), members in sorted(groups.items(), key=str):
        flat = allocate(sum(given[index][0].size for index in members), dtype)
        start = 0
        for index in members:
            array = given[index][0]
            packed.views[index] = flat[start : start + array.size].reshape(array.shape)
            packed.views[index][...] = array
            start += array.size
        if flat.size:
            parts = np.array_split(flat, 1 if averaged else min(fragments, flat.size))
            shared: list[Flat | RowExchange] = []
            for index, part in enumerate(parts):
                called = f"{name}/{index}" if name is not None and index else name
                shared.append(_share_flat(part, averaged, rule, called, holds=holds, **more))
            packed.add(shared, members)
    for number, index in enumerate(in_rows):
        array = given[index][0]
        packed.views[index] = view = allocate(array.size, array.dtype).reshape(array.shape)
        view[...] = array
        called = None if name is None else f"{name}/matrix/{number}"
        packed.add([RowExchange(view, rule, whole_every=whole_every, name=called, **more)], [index])
    return packed


def steps_between_turns(every: int | timedelta, fragments: int) -> int | timedelta:
    """Returns the time, or the steps, from one fragment's exchange to the next one's."""
    if whole(fragments, "fragments", 1) == 1:
        return every
    Due(every)  # refuses what is neither
    if isinstance(every, timedelta):
        return every / fragments
    if every % fragments:
        raise ValueError(f"fragments take turns at equal intervals: every={every} is no multiple of {fragments}")
    return every // fragments
