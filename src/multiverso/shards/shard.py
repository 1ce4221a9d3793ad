"""One part of a table in a segment: header, workers' lines, words and undo slots, values, updater state, slots.

Today a host's shard is the whole table. Made by the node, used by the sessions; it starts nothing and waits
for nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory.segment import Segment
from multiverso.memory.words import load32, load64, store32, store64
from multiverso.spec.modes import BY_CODE, ConsistencyMode
from multiverso.spec.states import states_of
from multiverso.spec.table import Partition, Places, TableSpec, chunk_of


class WorkerProgress(Struct, frozen=True):
    """One worker's progress in one table: in steps of rounds, and in ticks.

    Attributes:
        staged, folded, first_step, clock, reached: see ``layout/words.py``.
    """

    staged: int
    folded: int
    first_step: int
    clock: int
    reached: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether it has been in a round since it takes part."""
        return self.staged >= self.first_step

    def is_behind(self, step: int, stage: int) -> bool:
        """Returns whether a step waits for it: for its slot (stage 0), or for its part of the folding (stage 1)."""
        if step < self.first_step:
            return False
        return self.folded < step if stage else self.staged < step or self.folded < step - 1


class TableProgress(Struct, frozen=True):
    """A table's workers."""

    name: str
    chunks: int
    members: Mapping[int, WorkerProgress]
    by_quorum: bool = False

    def behind(self, step: int, stage: int) -> list[int]:
        """Returns those that a step waits for; with a quorum nobody, once enough have come (stage 1)."""
        if self.by_quorum:
            return [i for i, member in self.members.items() if not stage and member.staged < step]
        return [i for i, member in self.members.items() if member.is_behind(step, stage)]


def initialise(address: int, spec: TableSpec, table_id: int, index: WorkerIndex, mode: int) -> None:
    """Writes a table's header into zeroed memory; all that is zero is right: free words, idle undo slots."""
    partition = Partition.of(spec)
    consistency = BY_CODE[mode]
    places = Places.of(spec, index, consistency.in_rounds, consistency.by_quorum)
    chunk = chunk_of(spec)  # with a quorum only what travels between hosts
    words = {
        "elements": spec.elements,
        "stripe_size": partition.stripe_size,
        "stripe_count": partition.stripe_count,
        "itemsize": spec.itemsize,
        "columns": spec.columns,
        "table_workers": index.count,
        "node_line": index.here,
        "mode": mode,
        "words": places.words,
        "undo_slots": places.undo_slots,
        "shift": partition.shift,
        "undo_stride": partition.undo_bytes(len(spec.state_names)),
        "kept": partition.kept,
        "buffer_0": places.buffers[0],
        "buffer_1": places.buffers[1],
        "state_0": places.states[0],
        "state_1": places.states[1],
        "state_count": len(spec.state_names),
        "slots": places.slots,
        "slot_stride": places.slot_stride,
        "lines": places.lines,
        "table_id": table_id,
        "chunk_size": chunk,
        "chunk_count": 1 if consistency.by_quorum else -(-spec.elements // chunk),
        "small_slots": places.small_slots,
        "mean": int(spec.mean),
    }
    if spec.step_count is not None:
        words |= {"step_place": 1 + len(spec.hyper), "steps_before": int(spec.step_count.initial)}
    header = at.TABLE.at(address)
    for name, value in words.items():
        header[name] = value
    hyper = np.asarray(spec.hyper, dtype=spec.dtype).tobytes()
    ctypes.memmove(address + at.HYPER, hyper, len(hyper))
    _fill_states(address + places.states[0], spec)
    store64(address + at.MAGIC, at.TABLE_MAGIC)


def _fill_states(address: int, spec: TableSpec) -> None:
    """Writes what an updater's arrays are at first, where that is not zero."""
    whole = spec.elements * spec.itemsize
    for i, state in enumerate(states_of(spec.states)):
        if state.initial and state.per == "element":
            memory: Any = (ctypes.c_char * whole).from_address(address + i * whole)
            np.frombuffer(memory, spec.dtype)[:] = state.initial


class Shard(Struct, frozen=True, dict=True):
    """A table's memory as one process sees it.

    Attributes:
        segment: the memory, as much of it as this process maps.
        spec: the table.
        index: which line is whose.
        mode: the code of its consistency, as its header has it.
    """

    segment: Segment
    spec: TableSpec
    index: WorkerIndex
    mode: int

    @property
    def workers(self) -> int:
        """How many workers it has room for."""
        return self.index.workers

    @property
    def consistency(self) -> ConsistencyMode:
        """When a read of it may go ahead."""
        return BY_CODE[self.mode]

    @property
    def base(self) -> int:
        """Address of the table's first byte."""
        return self.segment.address

    @property
    def addresses(self) -> range:
        """Where its header and lines lie in this process: what waits may point to."""
        return range(self.base, self.base + self.places.head)

    @property
    def places(self) -> Places:
        """Where its parts lie."""
        return Places.of(self.spec, self.index, self.consistency.in_rounds, self.consistency.by_quorum)

    @functools.cached_property
    def header(self) -> Any:
        """What was written once, when the table was made: ``header["chunk_count"]``."""
        return at.TABLE.at(self.base)

    def line(self, worker_id: int) -> int:
        """Address of a worker's line."""
        return self.base + int(self.header["lines"]) + at.LINE_STRIDE * self.index.of(worker_id)

    @property
    def committed(self) -> int:
        """The last finished synchronous round; 0 before the first."""
        word = load64(self.base + at.COMMITTED)
        return word >> 16 if self.consistency.by_quorum else word

    def values_offset(self) -> int:
        """Where the current values begin: in sync mode, the last committed round's."""
        return self._places_now()[0]

    def _places_now(self) -> tuple[int, int]:
        """Where the current values and updater's arrays begin."""
        places, word = self.places, load64(self.base + at.COMMITTED)
        if not self.consistency.by_quorum:
            return places.buffers[word & 1], places.states[word & 1]
        if word & 0xFFFF == 0:
            return places.buffers[0], places.states[0]
        # as ``kernels.quorum.place_of``
        owner, which = ((word & 0xFFFF) >> 1) - 1, word & 1
        behind = (places.slot_stride - places.small_slots) // 2
        values = places.slots + owner * places.slot_stride + places.small_slots + which * behind
        return values, values + self.spec.elements * self.spec.itemsize

    def values(self) -> npt.NDArray[Any]:
        """The current values themselves, flat and writable."""
        return self.segment.array(self.values_offset(), self.spec.elements, self.spec.dtype)

    def stripe_words(self) -> npt.NDArray[np.int64]:
        """The word of each stripe itself; none in rounds."""
        apart = (1 << at.WORD_SPACING) // 8
        count = int(self.header["stripe_count"]) * apart
        return self.segment.array(self.places.words, count, np.int64)[::apart]

    def states(self) -> list[npt.NDArray[Any]]:
        """The updater's arrays themselves, flat and writable."""
        return self.states_at(self._places_now()[1])

    def states_at(self, offset: int) -> list[npt.NDArray[Any]]:
        """The same, of a round whose arrays begin somewhere."""
        count, elements = len(self.spec.state_names), self.spec.elements
        return list(self.segment.array(offset, count * elements, self.spec.dtype).reshape(count, elements))

    @property
    def steps(self) -> int:
        """What the updater's count of the table's steps is now."""
        return load64(self.base + at.STEPS_BEFORE) + self._steps_here()

    def set_steps(self, steps: int) -> None:
        """Sets the count of steps; no worker may add meanwhile."""
        store64(self.base + at.STEPS_BEFORE, steps - self._steps_here())

    def _steps_here(self) -> int:
        if self.consistency.in_rounds:
            return self.committed
        lines = map(self.line, range(self.workers))
        return sum(load64(line + at.ADDS) + load64(line + at.EXCHANGES) for line in lines)

    def slot(self, worker_id: int) -> npt.NDArray[Any]:
        """Where a worker adds up what it contributes to a synchronous round, flat and writable."""
        places = self.places
        start = places.slots + places.slot_stride * self.index.of(worker_id)
        return self.segment.array(start, self.spec.elements, self.spec.dtype)

    def local_state(self, worker_id: int) -> list[npt.NDArray[Any]]:
        """The arrays that a worker has for itself, flat and writable; windows, which a closed table leaves behind."""
        start = self.local_state_address(worker_id) - self.base
        whole = self.spec.elements * self.spec.itemsize
        count, dtype = self.spec.elements, self.spec.dtype
        return [
            self.segment.window(start + i * whole, count, dtype, writable=True) for i in range(self.spec.per_worker)
        ]

    def local_state_address(self, worker_id: int) -> int:
        """Address of the first of them."""
        places = self.places
        return self.base + places.local_state + places.local_state_stride * self.index.of(worker_id)

    def enrol(self, worker_id: int, others: Sequence[int] | None = None) -> None:
        """Makes a worker take part in the table's rounds and clocks (the node, or a late one itself).

        A worker that joins late begins at the fastest clock, so that no worker has to wait for it, and its first
        round is the one after the last finished (the round then in flight may still continue without it).

        Args:
            worker_id: its number.
            others: where it takes a dead worker's place, those that continue: it begins at the slowest of their clocks,
                so that it does not wait, and is not waited for longer than that one.
        """
        line = self.line(worker_id)
        for offset in range(0, at.LINE_STRIDE, 8):
            # the table's version never goes back, and neither does what others may still look at
            if offset not in (at.ADDS, at.EXCHANGES, at.STAGED, at.FOLDED):
                store64(line + offset, 0)
        clocks = {w: load64(self.line(w) + at.CLOCK) for w in range(self.workers) if self.enrolled(w)}
        slow = [clocks[w] for w in others or () if w in clocks]
        store64(line + at.CLOCK, min(slow) if slow else max(clocks.values(), default=0))
        last = self.committed * int(self.header["chunk_count"])
        store64(line + at.STAGED, last)
        store64(line + at.FOLDED, last)
        store64(line + at.FIRST_STEP, last + 1)
        store32(line + at.ENROLLED, 1)

    def first_round(self, worker_id: int) -> int:
        """The round that a worker's first read ends, or one before it if that continues without the worker."""
        return load64(self.line(worker_id) + at.STAGED) // int(self.header["chunk_count"]) + 1

    def clock(self, worker_id: int) -> int:
        """How many ticks a worker has done, or was given when it came."""
        return load64(self.line(worker_id) + at.CLOCK)

    def needs(self, worker_id: int) -> bool:
        """Returns whether an unfinished round may still ask for what a worker that is gone has staged."""
        last = self.committed * int(self.header["chunk_count"])
        # on several hosts: no worker here may make values of the sum that has come
        if load64(self.base + at.TOTALS):
            last = load64(self.base + at.ARRIVED)
        return self.enrolled(worker_id) and load64(self.line(worker_id) + at.STAGED) > last

    def withdraw(self, worker_id: int) -> None:
        """Ends a worker's part in the table's rounds and clocks (the node, before its number is given away)."""
        store32(self.line(worker_id) + at.ENROLLED, 0)

    def enrolled(self, worker_id: int) -> bool:
        """Returns whether a worker takes part."""
        return load32(self.line(worker_id) + at.ENROLLED) == 1

    def progress(self) -> TableProgress:
        """Returns the members and their progress."""
        return TableProgress(
            self.spec.name or f"table {self.header['table_id']}",
            int(self.header["chunk_count"]),
            {
                worker: WorkerProgress(*(load64(self.line(worker) + word) for word in _PROGRESS))
                for worker in range(self.workers)
                if self.enrolled(worker)
            },
            self.consistency.by_quorum,
        )

    def statistics(self, worker_id: int) -> dict[str, float]:
        """What a worker has done with the table: operations, bytes, seconds waited, staleness in pushes."""
        line = self.line(worker_id)
        number = load64(line + at.STALENESS_COUNT)
        return {
            "adds": load64(line + at.ADDS),
            "gets": load64(line + at.GETS),
            "exchanges": load64(line + at.EXCHANGES),
            "bytes": load64(line + at.BYTES),
            "wait_seconds": load64(line + at.LINE_WAITED) / 1e9,
            "locks_recovered": load64(line + at.COUNTS + at.TAKEN_OVER),
            "rows_put_back": load64(line + at.COUNTS + at.PUT_BACK),
            "staleness_last": load64(line + at.STALENESS_LAST),
            "staleness_max": load64(line + at.STALENESS_MAX),
            "staleness_mean": load64(line + at.STALENESS_SUM) / number if number else 0.0,
            "staleness_reads": number,
            "clock": load64(line + at.CLOCK),
            "late": load64(line + at.LATE),
        }


_PROGRESS = (at.STAGED, at.FOLDED, at.FIRST_STEP, at.CLOCK, at.REACHED)
