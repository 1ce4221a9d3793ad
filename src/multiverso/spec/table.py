"""What a table is, and how it is cut: plain data and arithmetic."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from multiverso.checks import whole
from multiverso.errors import DtypeMismatchError, ShapeMismatchError
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.spec.states import MOST_HYPER, State, check_numbers, states_of

DTYPES = ("float32", "float64", "int32", "int64")
Initial = Literal["master", "mean", "sum"]
INITIAL: tuple[Initial, ...] = get_args(Initial)
ROUNDS_OF = "rounds of the keyed table "  # before what the job calls that: what a table holds that is a part of it
MOST_WEIGHT = (1 << 20) - 1  # of an add in a mean: what 4,096 workers give is counted in 32 bits between hosts
_LONGEST_TEXT = 2000
_MOST_ELEMENTS = 2**48
_MOST_ARRAYS = 64

# What a message may have; Python code that makes a spec checks before.
_Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]
_Size = Annotated[int, Meta(ge=1, le=_MOST_ELEMENTS)]
_Arrays = Annotated[int, Meta(ge=0, le=_MOST_ARRAYS)]


class _Described(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of records that are described in messages and in files."""

    def as_message(self) -> dict[str, Any]:
        """Returns it as JSON can carry it."""
        message: dict[str, Any] = msgspec.to_builtins(self)
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Self:
        """The inverse of `as_message`.

        Raises:
            ValueError: the message describes none; that is all that comes of it.
        """
        try:
            return msgspec.convert(message, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


class TableSpec(_Described, frozen=True):
    """One table: everything that its workers have to agree on.

    Attributes:
        rows: rows of a matrix, or 1.
        columns: columns of a matrix, or the elements of an array.
        kind: ``"array"`` or ``"matrix"``.
        dtype: one of DTYPES.
        updater: name of the updater, with its hyperparameters in ``hyper``.
        states: arrays of the table's size that the updater keeps, or how many.
        initial: whose initial value counts: ``"master"``, ``"mean"`` or ``"sum"``.
        name: for tables that are created or attached to by name.
        mean: the updater gets the mean of a round's contributions instead of their sum.
        per_worker: arrays of the table's size that each worker has for itself (a rule's local state).
        rule: the rule by which workers and table move each other, in words; empty for a plain table.
        wire, every: between hosts: how differences travel and how often, in words; empty: as the job's do.
        convex: each value stays between those that the hosts have, as a mean or a variance has to.
        holds: what lies in it, and in which order, in words; empty where nobody says.
    """

    kind: Annotated[str, Meta(pattern=r"\A(array|matrix)\Z")]
    rows: _Size
    columns: _Size
    dtype: Annotated[str, Meta(pattern=rf"\A({'|'.join(DTYPES)})\Z")] = "float32"
    updater: _Text = "add"
    hyper: tuple[float, ...] = ()
    states: _Arrays | Annotated[tuple[State, ...], Meta(max_length=_MOST_ARRAYS)] = ()
    initial: Annotated[str, Meta(pattern=rf"\A({'|'.join(INITIAL)})\Z")] = "master"
    name: _Text | None = None
    mean: bool = False
    per_worker: _Arrays = 0
    rule: _Text = ""
    wire: _Text = ""
    every: _Text = ""
    convex: bool = False
    holds: _Text = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.rows * self.columns > _MOST_ELEMENTS:
            raise ShapeMismatchError(
                f"a table has at most {_MOST_ELEMENTS:,} elements; got {self.rows} x {self.columns}"
            )
        if len(self.hyper) > MOST_HYPER:
            raise ValueError(
                f"an updater has at most {MOST_HYPER} hyperparameters; {self.updater} has {len(self.hyper)}"
            )
        states = states_of(self.states)
        structs.force_setattr(self, "states", states)
        if any(state.per == "row" for state in states):
            raise ValueError(
                f"the updater {self.updater} keeps a number for each row, which only a KeyedTable has a place for"
            )
        check_numbers(f"the updater {self.updater}", self.hyper, self.dtype)
        check_numbers(f"the updater {self.updater}", [state.initial for state in states], self.dtype)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the updater's arrays, in their order in memory."""
        return tuple(state.name for state in states_of(self.states) if state.per == "element")

    @property
    def step_count(self) -> State | None:
        """The updater's count of the table's steps, if it keeps one."""
        states = states_of(self.states)
        return states[-1] if states and states[-1].per == "table" else None

    @property
    def elements(self) -> int:
        """Numbers in the table."""
        return self.rows * self.columns

    @property
    def shape(self) -> tuple[int, ...]:
        """What ``get()`` returns: (elements,) or (rows, columns)."""
        return (self.rows, self.columns) if self.is_matrix else (self.columns,)

    @property
    def part_of(self) -> str | None:
        """What the job calls the keyed table whose rounds it is for; None: it is a table that somebody has made."""
        return self.holds.removeprefix(ROUNDS_OF) if self.holds.startswith(ROUNDS_OF) else None

    @property
    def is_matrix(self) -> bool:
        """Whether its rows can be added to and read by their numbers."""
        return self.kind == "matrix"

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        hyper = f"{self.hyper}" if self.hyper else ""
        name = f" named {self.name!r}" if self.name else ""
        rule = f", rule {self.rule}" if self.rule else ""
        rule += f", wire {self.wire!r}" if self.wire else ""
        rule += f", every {self.every!r}" if self.every else ""
        rule += f", {self.holds}" if self.holds else ""
        return f"{self.kind} of {size} {self.dtype}{name} (updater {self.updater}{hyper}, initial {self.initial}{rule})"


class MemorySpec(_Described, frozen=True):
    """Plain memory that workers share under a name.

    Attributes:
        name: what they call it; tables have names of their own.
        nbytes: its size.
        sparse: what is not written takes no memory, and none is set aside for it.
        once: its name is not given again after all that had it have closed it.
    """

    name: _Text
    nbytes: _Size
    sparse: bool = False
    once: bool = False

    def __post_init__(self) -> None:
        if self.name is None:
            raise ValueError("name is a text that is not empty; got None")
        check_name(self.name)

    def __str__(self) -> str:
        return f"shared memory of {self.nbytes} bytes named {self.name!r}"


def check_name(name: Any) -> None:
    """Refuses what is not a name of a table.

    Raises:
        ValueError: neither None nor a text that is not empty, and not too long.
    """
    if name is not None and not (isinstance(name, str) and name):
        raise ValueError(f"name is a text that is not empty, or None; got {name!r}")
    if name is not None and len(name) > _LONGEST_TEXT:
        raise ValueError(f"a name has at most {_LONGEST_TEXT} characters; got {len(name)}, from {name[:50]!r} on")


def checked_count(value: Any, what: str) -> int:
    """Returns a size as an int.

    Raises:
        ShapeMismatchError: not an integer of at least 1.
    """
    try:
        return whole(value, what, 1)
    except ValueError:
        raise ShapeMismatchError(f"{what} must be an integer of at least 1; got {value!r}") from None


def checked_dtype(value: Any) -> str:
    """Returns the name of a table's dtype, given as NumPy's or as torch's."""
    try:
        name = str(np.dtype(value).name) if value is not None else "None"  # NumPy takes it for float64
    except TypeError:
        name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise DtypeMismatchError(
            f"a table's dtype is one of {', '.join(DTYPES)}; got {value!r} "
            "(16-bit data go into a float32 table: sums stay in float32)"
        )
    return name


class Partition(Struct, frozen=True):
    """How a table is cut into stripes, each under one word. A row is never cut.

    Attributes:
        stripe_size: elements of a stripe.
        stripe_count: how many there are.
        shift: of a matrix: a stripe has ``1 << shift`` rows.
        kept: bytes of a row, and of its part of each of the updater's arrays, that are kept while it is changed.
    """

    stripe_size: int
    stripe_count: int
    shift: int = 0
    kept: int = 0

    @classmethod
    def of(cls, spec: TableSpec) -> Partition:
        """Returns the stripes of a table: 128 KiB each; of a matrix as many rows, a power of two, as 8 KiB hold."""
        if not spec.is_matrix:
            length = max(1, at.STRIPE_BYTES // spec.itemsize)
            return cls(length, math.ceil(spec.elements / length))
        row = spec.columns * spec.itemsize
        shift = max(0, (at.BLOCK_BYTES // row).bit_length() - 1)
        kept = row if row * (1 + len(spec.state_names)) <= at.MOST_KEPT else 0
        return cls(spec.columns << shift, -(-spec.rows >> shift), shift, kept)

    def undo_bytes(self, states: int) -> int:
        """From one undo slot to the next: its words, and the copy of a row with its state."""
        return at.round_up(at.UNDO_BYTES + self.kept * (1 + states), at.CACHE_LINE)


def chunk_of(spec: TableSpec) -> int:
    """Returns how many elements go through one step of a synchronous round."""
    return min(spec.elements, at.CHUNK_BYTES // spec.itemsize)


class Places(Struct, frozen=True):
    """Offsets of a table's parts from its first byte, the end of what the node maps of it, and its size, in bytes."""

    lines: int
    words: int
    undo_slots: int
    buffers: tuple[int, int]
    states: tuple[int, int]
    slots: int
    slot_stride: int
    small_slots: int
    local_state: int
    local_state_stride: int
    head: int
    size: int

    @classmethod
    def of(cls, spec: TableSpec, index: WorkerIndex, synchronous: bool, by_quorum: bool = False) -> Places:
        """Lays a table out: header, lines, words and undo slots, values, state, slots, local state.

        Lines are those of all workers and the node; all else only this host's workers have, and the node.

        In synchronous mode there are no words and undo slots, but slots, and values and state are there twice: with a
        quorum twice for each worker, behind its slot.
        """
        end = at.TABLE_HEADER

        def take(size: int, align: int = at.PAGE, skew: int = 0) -> int:
            nonlocal end
            start = at.round_up(max(0, end - skew), align) + skew
            end = start + size
            return start

        whole = spec.elements * spec.itemsize
        lines = take((index.workers + 1) * at.LINE_STRIDE, at.CACHE_LINE)
        head = end
        words = undo_slots = 0
        if not synchronous:
            partition = Partition.of(spec)
            words = take(partition.stripe_count << at.WORD_SPACING, at.CACHE_LINE)
            undo = partition.undo_bytes(len(spec.state_names))
            undo_slots = take(undo * at.UNDO_SLOTS_EACH * (index.here + 1), at.CACHE_LINE)
        align, skew = (at.PAGE, at.SKEW) if whole >= at.PAGE else (at.CACHE_LINE, 0)
        first = take(whole, align, skew)
        # with a quorum wherever the values are, the state is right behind them
        state = take(whole * len(spec.state_names), *((1, 0) if by_quorum else (align, skew)))
        buffers, states, slots, stride, small = (first, first), (state, state), 0, 0, 0
        if synchronous:
            # a slot of the table's size, for adds, and two of a chunk's, for exchanges
            small = at.round_up(whole, align)
            behind = at.round_up(chunk_of(spec) * spec.itemsize, at.CACHE_LINE)
            if by_quorum:
                behind = at.round_up(whole * (1 + len(spec.state_names)), align)
            else:
                buffers = (first, take(whole, align, skew))
                states = (state, take(whole * len(spec.state_names), align, skew))
            stride = at.round_up(small + 2 * behind, align)
            slots = take(stride * index.slots, align)
        local_stride = at.round_up(whole * spec.per_worker, align)
        local = take(local_stride * index.here, align)
        size = at.round_up(end, at.CACHE_LINE)
        return cls(lines, words, undo_slots, buffers, states, slots, stride, small, local, local_stride, head, size)
