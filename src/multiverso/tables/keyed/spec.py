"""What the workers of a keyed table agree on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from multiverso.checks import positive, whole
from multiverso.layout.keyed import MOST_STATES
from multiverso.layout.words import CACHE_LINE, round_up
from multiverso.spec.states import State, check_numbers, states_of
from multiverso.updaters import Updater

KINDS = ("constant", "uniform", "normal")
_SCALE = 0.05
_MOST_ADDS = 255  # that an entry of the index can count
_MOST_IDLE = 50_000  # its ticks begin again after 65,536


@dataclass(frozen=True)
class Eviction:
    """Which keys a `KeyedTable` evicts. Each condition that is given is a reason of its own.

    A key is *used* when something is added to it; reading it is not. How often is counted roughly: exactly up to 16,
    then to within a fifth or so.

    Attributes:
        idle_ticks: keys that have not been used for this many ticks of the table (`KeyedTable.tick`), at most 50,000.
        most_keys: keys beyond this number. Which of them is decided within each segment of a few hundred keys.
        by: of those, ``"recency"``: the least recently used go first, or ``"frequency"``: the least frequently used.
        least_norm: keys whose row has a smaller L2 norm.
    """

    idle_ticks: int | None = None
    most_keys: int | None = None
    by: str = "recency"
    least_norm: float | None = None

    def __post_init__(self) -> None:
        if self.idle_ticks is not None:
            whole(self.idle_ticks, "idle_ticks", 1, _MOST_IDLE)
        if self.most_keys is not None:
            whole(self.most_keys, "most_keys", 1)
        if self.by not in ("recency", "frequency"):
            raise ValueError(f"by is 'recency' or 'frequency'; got {self.by!r}")
        if self.least_norm is not None:
            positive(self.least_norm, "least_norm")
        if self.idle_ticks is None and self.most_keys is None and self.least_norm is None:
            raise ValueError("an Eviction says what to evict: idle_ticks=, most_keys= or least_norm=")


@dataclass(frozen=True)
class KeyedSpec:
    """A keyed table: everything that its workers have to agree on.

    Attributes:
        in_rounds: adds take effect in rounds, and beside each row stands the last one that it was changed in.
        copies: on how many hosts each row is.
    """

    dim: int
    dtype: str
    kind: str
    scale: float
    seed: int
    updater: str
    hyper: tuple[float, ...]
    states: tuple[State, ...]
    name: str | None = None
    admission: int = 1
    eviction: Eviction | None = None
    in_rounds: bool = False
    copies: int = 1

    @classmethod
    def of(
        cls,
        dim: int,
        dtype: str,
        initial: Any,
        seed: int,
        updater: Updater,
        name: str | None,
        admission: int = 1,
        eviction: Eviction | None = None,
        copies: int = 1,
    ) -> KeyedSpec:
        """Returns the table that a constructor's arguments mean.

        Raises:
            ValueError: an invalid initial value, seed, admission, eviction or number of copies, or fractions for a
                table of integers.
        """
        kind, scale = initial if isinstance(initial, tuple) and len(initial) == 2 else (initial, _SCALE)
        if isinstance(kind, int | float | np.number) and not isinstance(kind, bool) and not isinstance(initial, tuple):
            kind, scale = "constant", np.asarray(kind).item()
        usable = isinstance(scale, int | float) and np.isfinite(scale) and (kind == "constant" or scale >= 0)
        if kind not in KINDS or not usable:
            raise ValueError(
                f"initial is a number, 'uniform', 'normal', or (kind, scale) with a scale of 0 or more; got {initial!r}"
            )
        integer = np.dtype(dtype).kind == "i"
        with np.errstate(all="ignore"):
            held = np.array(float(scale)).astype(dtype).item()
        if integer and (kind != "constant" or scale != held):
            raise ValueError(
                f"the rows of a table of {dtype} begin with a whole number that it and float64 can hold; "
                f"got {initial!r}"
            )
        if not np.isfinite(held):
            raise ValueError(f"the rows of a table of {dtype} begin with numbers that it can hold; got {initial!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is an integer of at most 64 bits; got {seed!r}")
        admission = whole(admission, "admission", 1, _MOST_ADDS)
        copies = whole(copies, "copies", 1, 2)
        if eviction is not None and not isinstance(eviction, Eviction):
            raise ValueError(f"eviction is an Eviction or None; got {eviction!r}")
        if integer and eviction is not None and eviction.least_norm is not None:
            raise ValueError(f"least_norm is for tables of floats; this one is of {dtype}")
        states = states_of(updater.states)
        if any(state.per == "table" for state in states):
            raise ValueError(
                f"the updater {updater.name} counts the steps of a whole table, and rows by key have steps of their "
                "own: use the form that keeps a number for each element"
            )
        if len(states) > MOST_STATES:
            raise ValueError(f"an updater of a keyed table keeps at most {MOST_STATES} numbers; got {len(states)}")
        hyper = tuple(map(float, updater.hyper))
        check_numbers(f"the updater {updater.name}", hyper, dtype)
        check_numbers(f"the updater {updater.name}", [state.initial for state in states], dtype)
        rule = updater.name, hyper, states
        return cls(dim, dtype, kind, float(scale), int(seed), *rule, name, admission, eviction, copies=copies)

    def part_of(self, hosts: int) -> KeyedSpec:
        """Returns what each of several hosts has of it: all, and as many keys as are its part of the most."""
        if self.eviction is None or self.eviction.most_keys is None:
            return self
        return replace(self, eviction=replace(self.eviction, most_keys=-(-self.eviction.most_keys // hosts)))

    def as_message(self) -> dict[str, Any]:
        """Returns it as JSON can carry it."""
        return asdict(self)

    @property
    def keeps_use(self) -> bool:
        """Whether the index says when and how often each key is used."""
        return self.eviction is not None and (
            self.eviction.idle_ticks is not None or self.eviction.most_keys is not None
        )

    def widths(self) -> list[int]:
        """Numbers of a row: its values, then each of the updater's states."""
        return [self.dim, *(1 if state.per == "row" else self.dim for state in self.states)]

    @property
    def row_bytes(self) -> int:
        """From one row to the next: values and state, in rounds the last one, in whole cache lines."""
        return round_up(sum(self.widths()) * np.dtype(self.dtype).itemsize + 8 * self.in_rounds, CACHE_LINE)

    @property
    def log_bytes(self) -> int:
        """What a key takes in a worker's log of a round: in the index, at most, itself and its delta."""
        return 8 * (4 + 1) + self.dim * np.dtype(self.dtype).itemsize if self.in_rounds else 0

    def __str__(self) -> str:
        name = f" named {self.name!r}" if self.name else ""
        initial = f"{self.kind} {self.scale:g}"
        return f"keyed table of {self.dim} {self.dtype}{name} (updater {self.updater}, initial {initial})"
