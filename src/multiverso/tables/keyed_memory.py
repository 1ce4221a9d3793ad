"""A keyed table's memory: made by its first worker, attached to by all, read segment by segment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso import keyed_layout as layout
from multiverso.errors import TableMismatchError
from multiverso.kernels import keyed as kernels
from multiverso.kernels.compiling import compile_update
from multiverso.keyed_layout import at
from multiverso.layout import CACHE_LINE, MAX_WORKERS, round_up
from multiverso.memory.shared import SharedMemory
from multiverso.memory.words import load64, store64
from multiverso.runtime.session import Session
from multiverso.spec import DTYPES
from multiverso.states import State, states_of
from multiverso.tables.convert import Array
from multiverso.updaters import Updater

Keys = npt.NDArray[np.int64]
_KINDS = ("constant", "uniform", "normal")
_SCALE = 0.05
_INDEX_BYTES = 40  # of a key, beside its row: at most, with segments just split
_MOST_STATES = 8


@dataclass(frozen=True)
class KeyedSpec:
    """A keyed table: everything that its workers have to agree on."""

    dim: int
    dtype: str
    kind: str
    scale: float
    seed: int
    updater: str
    hyper: tuple[float, ...]
    states: tuple[State, ...]
    name: str | None = None

    @classmethod
    def of(
        cls, dim: int, dtype: str, initial: Any, seed: int, updater: Updater, name: str | None
    ) -> KeyedSpec:
        """Returns the table that a constructor's arguments mean.

        Raises:
            ValueError: an initial value or a seed that is none, or fractions for a table of integers.
        """
        kind, scale = initial if isinstance(initial, tuple) and len(initial) == 2 else (initial, _SCALE)
        if (
            isinstance(kind, int | float | np.number)
            and not isinstance(kind, bool)
            and not isinstance(initial, tuple)
        ):
            kind, scale = "constant", float(kind)
        if kind not in _KINDS or not isinstance(scale, int | float) or not np.isfinite(scale):
            raise ValueError(
                f"initial is a number, 'uniform', 'normal', or (kind, scale) with a finite scale; got {initial!r}"
            )
        if np.dtype(dtype).kind == "i" and (kind != "constant" or scale != int(scale)):
            raise ValueError(f"the rows of a table of {dtype} begin with a whole number; got {initial!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is an integer of at most 64 bits; got {seed!r}")
        states = states_of(updater.states)
        if len(states) > _MOST_STATES:
            raise ValueError(
                f"an updater of a keyed table keeps at most {_MOST_STATES} numbers; got {len(states)}"
            )
        hyper = tuple(map(float, updater.hyper))
        return cls(dim, dtype, kind, float(scale), int(seed), updater.name, hyper, states, name)

    def as_message(self) -> dict[str, Any]:
        """Returns it as JSON can carry it."""
        return asdict(self)

    @property
    def row_bytes(self) -> int:
        """From one row to the next: values and state, in whole cache lines."""
        return round_up(self.dim * (1 + len(self.states)) * np.dtype(self.dtype).itemsize, CACHE_LINE)

    def __str__(self) -> str:
        name = f" named {self.name!r}" if self.name else ""
        initial = f"{self.kind} {self.scale:g}"
        return f"keyed table of {self.dim} {self.dtype}{name} (updater {self.updater}, initial {initial})"


class KeyedMemory:
    """The memory itself. Owner: the table of its session that was made first."""

    def __init__(self, session: Session, memory: SharedMemory, spec: KeyedSpec) -> None:
        self.address = memory.address
        self._memory = memory
        self._spec = spec
        self._session = session

    @classmethod
    def of(cls, session: Session, called: str, spec: KeyedSpec) -> KeyedMemory:
        """Makes the memory, or attaches to what another worker has made, and takes this worker's place in it.

        Raises:
            TableMismatchError: what is there is another table.
        """
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        places = layout.places(spec.row_bytes, min(most // (spec.row_bytes + 16), 2**32 - 1))

        def initialise(memory: SharedMemory) -> None:
            _write_header(memory.address, spec, places)

        name = f"multiverso-keyed-{called}"
        memory = cls(session, session.shared_memory(name, places["size"], initialise, sparse=True), spec)
        memory.check_equal(spec)
        line = memory._line(session.worker_id)
        store64(line + at.INCARNATION, load64(line + at.INCARNATION) % 255 + 1)
        arguments = (session.control.address, memory.address, session.worker_id)
        enter = kernels.enter.compiled()
        code = enter(*arguments)
        if code:
            session.resume(code, lambda: enter(*arguments), None, f"a row of the {spec}")
        return memory

    def check_equal(self, spec: KeyedSpec) -> None:
        """Raises TableMismatchError unless the memory is of such a table."""
        made, asked = self.array(0, layout.LINES), np.zeros(layout.LINES, np.uint8)
        places = {name: load64(self.address + getattr(at, name)) for name in _PLACES}
        _write_header(asked.ctypes.data, spec, places, whole=False)
        if not np.array_equal(made[: at.HINT], asked[: at.HINT]):
            raise TableMismatchError(
                f"another worker has made a keyed table here with other arguments than the {spec}: dim, dtype, "
                "initial, seed and updater must be equal in all workers"
            )

    @property
    def bytes_a_key(self) -> int:
        """Memory that another key takes."""
        return self._spec.row_bytes + _INDEX_BYTES

    def updater(self, updater: Updater) -> int:
        """Returns the address of an updater's loop, compiled for this table."""
        return compile_update(updater.apply, self._spec.dtype)

    # -- counting --------------------------------------------------------------------------------------------

    def rows_handed_out(self) -> int:
        """Rows that belong to a key, or to nobody because their worker was killed."""
        claimed = sum(self._claims(worker) for worker in range(MAX_WORKERS))
        return min(load64(self.address + at.NEXT_ROW), load64(self.address + at.CAPACITY)) - claimed

    def keys(self) -> int:
        """Keys that have a row; one less for each worker that was killed at the wrong moment."""
        return self.rows_handed_out()

    def _claims(self, worker: int) -> int:
        return load64(self._hand(worker) + at.CLAIMED)

    def _line(self, worker: int) -> int:
        return self.address + layout.LINES + layout.LINE_BYTES * worker

    def _hand(self, worker: int) -> int:
        stride = load64(self.address + at.HAND_BYTES)
        return self.address + load64(self.address + at.HANDS) + stride * worker

    def _segment_words(self) -> npt.NDArray[np.int64]:
        """The words of all segments that there are, by number."""
        number = 1 << load64(self.address + at.HINT)
        return self.array(load64(self.address + at.SEGMENT_WORDS), 8 * number).view(np.int64)

    def held(self) -> int:
        """Words that somebody holds, or held when it was killed."""
        shift = load64(self.address + at.SHIFT)
        blocks = (min(load64(self.address + at.NEXT_ROW), load64(self.address + at.CAPACITY)) >> shift) + 1
        rows = self.array(load64(self.address + at.ROW_WORDS), 8 * blocks).view(np.int64)
        return sum(int(np.count_nonzero(words & layout.OWNER)) for words in (rows, self._segment_words()))

    def statistics(self) -> dict[str, Any]:
        """Returns what the table holds, and what its workers have done."""
        keys, segments = self.keys(), int(np.count_nonzero(self._segment_words()))
        used = keys * self._spec.row_bytes + segments * layout.SEGMENT_BYTES
        counts = {
            name.lower(): sum(load64(self._line(w) + getattr(at, name)) for w in range(MAX_WORKERS))
            for name in _COUNTS
        }
        return {"keys": keys, "bytes": used, "segments": segments, **counts}

    # -- reading everything ----------------------------------------------------------------------------------

    def segments(self, rest: Callable[[int], None]) -> Iterator[tuple[Keys, Keys]]:
        """Yields the keys and rows of one segment after another; each key exactly once, while others add.

        In the order of the reversed hash: a segment that splits afterwards splits into what was read.

        Args:
            rest: waits until nobody holds a segment.
        """
        pattern = 0
        while True:
            number, depth, keys, rows = self._stable(pattern, rest)
            yield keys, rows
            bit = 1 << (depth - 1) if depth else 0
            while bit and number & bit:
                number, bit = number & ~bit, bit >> 1
            if not bit:
                return
            pattern = number | bit

    def _stable(self, pattern: int, rest: Callable[[int], None]) -> tuple[int, int, Keys, Keys]:
        while True:
            number = self._resolve(pattern)
            word = self._word(number)
            depth = self._depth(word)
            if depth < 0 or pattern & ((1 << depth) - 1) != number:
                continue
            if word & layout.OWNER:
                rest(number)
                continue
            start = load64(self.address + at.SEGMENTS) + layout.SEGMENT_BYTES * number
            buckets = self.array(start, layout.SEGMENT_BYTES).copy().reshape(-1, layout.BUCKET_BYTES)
            if self._word(number) == word:
                used = (buckets[:, : layout.ENTRIES] & 0x80) != 0
                entries = buckets.view(np.int64)
                return number, depth, entries[:, 2::2][used], entries[:, 3::2][used] & 0xFFFFFFFF

    def _word(self, number: int) -> int:
        return load64(self.address + load64(self.address + at.SEGMENT_WORDS) + 8 * number)

    @staticmethod
    def _depth(word: int) -> int:
        return ((word >> layout.OWNER_BITS) & 63) - 1

    def _resolve(self, key_hash: int) -> int:
        depth = load64(self.address + at.HINT)
        while self._depth(self._word(key_hash & ((1 << depth) - 1))) < 0:
            depth -= 1
        return key_hash & ((1 << self._depth(self._word(key_hash & ((1 << depth) - 1)))) - 1)

    # -- rows, without their words ---------------------------------------------------------------------------

    def states(self, rows: Keys) -> list[Array]:
        """Returns the updater's numbers of rows, each (rows, dim)."""
        return [self._row_part(part)[rows] for part in range(1, 1 + len(self._spec.states))]

    def initial_states(self, shape: tuple[int, ...]) -> list[Array]:
        """Returns the updater's numbers of rows that nothing was added to."""
        return [np.full(shape, state.initial, self._spec.dtype) for state in self._spec.states]

    def write(self, rows: Keys, values: Array, states: list[Array]) -> None:
        """Overwrites rows, values and state, while nobody else uses them."""
        for part, numbers in enumerate([values, *states]):
            self._row_part(part)[rows] = numbers

    def _row_part(self, part: int) -> Array:
        spec = self._spec
        begun = min(load64(self.address + at.NEXT_ROW), load64(self.address + at.CAPACITY))
        start = load64(self.address + at.ROWS)
        whole = self.array(start, begun * spec.row_bytes).reshape(begun, spec.row_bytes)
        return whole.view(spec.dtype)[:, part * spec.dim : (part + 1) * spec.dim]

    def array(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns a part of the memory itself."""
        return self._memory.array[offset : offset + nbytes]


_PLACES = (
    "ROW_BYTES",
    "SHIFT",
    "CAPACITY",
    "MOST_DEPTH",
    "HAND_BYTES",
    "HANDS",
    "ROW_WORDS",
    "SEGMENT_WORDS",
    "SEGMENTS",
    "ROWS",
)
_COUNTS = ("ADDS", "GETS", "ROWS_ADDED", "ROWS_READ", "SPLITS", "WAITS", "TAKEN_OVER", "PUT_BACK")


def _write_header(address: int, spec: KeyedSpec, places: dict[str, int], whole: bool = True) -> None:
    words = {
        "MAGIC": layout.MAGIC,
        "COLUMNS": spec.dim,
        "DTYPE": DTYPES.index(spec.dtype),
        "ITEMSIZE": np.dtype(spec.dtype).itemsize,
        "STATES": len(spec.states),
        "SEED": spec.seed,
        "KIND": _KINDS.index(spec.kind),
        **{name: places[name] for name in _PLACES},
    }
    for name, value in words.items():
        store64(address + getattr(at, name), value)
    scale = np.float64(spec.scale)
    store64(address + at.SCALE, int(scale.view(np.int64)))
    for place, state in enumerate(spec.states):
        store64(address + at.STATE_INITIAL + 8 * place, int(np.float64(state.initial).view(np.int64)))
    hyper = np.zeros(64, np.uint8)
    packed = np.asarray(spec.hyper, spec.dtype).view(np.uint8)
    hyper[: packed.size] = packed
    for place, word in enumerate(hyper.view(np.int64)):
        store64(address + at.HYPER + 8 * place, int(word))
    if not whole:
        return
    for worker in range(MAX_WORKERS):
        store64(address + places["HANDS"] + places["HAND_BYTES"] * worker + at.ROW, -1)
    store64(address + places["SEGMENT_WORDS"], layout.SEGMENT_VERSION | layout.DEPTH_BIT)
