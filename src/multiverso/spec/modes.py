"""The modes of a job: when a read may go ahead, and what everything around a table has to know about that."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

from msgspec import Struct

from multiverso.errors import StartupError
from multiverso.layout import words as at

Grace = float | Literal["auto"]
_MOST_TICKS = 2**60
_MOST_SECONDS = 1e9


class ConsistencyMode(Struct, frozen=True):
    """One of them. What the modes have in common is asked for by property, never by comparing names.

    Attributes:
        name: in messages, and in what a rule is defined for.
        code: in a table's header.
        option: how `init` is called for it.
        in_rounds: all workers' adds of a round take effect together. A table's values are there twice, and
            there are no words of stripes.
        has_clocks: workers tick, and a read waits for workers that are too far behind.
        by_quorum: a round may be closed without those who are late.
        family: the name of the mode that it is a kind of, where not its own: a rule that is defined for that one is for
            this.
    """

    name: str
    code: int
    option: str
    in_rounds: bool = False
    has_clocks: bool = False
    by_quorum: bool = False
    family: str = ""

    @property
    def in_step(self) -> bool:
        """Whether all workers are in the same round after equally many reads."""
        return self.in_rounds and not self.by_quorum

    @property
    def reads_wait(self) -> bool:
        """Whether a read may have to wait for what other workers do."""
        return self.in_rounds or self.has_clocks


_ALL = (
    ConsistencyMode("async", at.ASYNCHRONOUS, "init()"),
    ConsistencyMode("bounded", at.BOUNDED, "init(staleness=...)", has_clocks=True),
    ConsistencyMode("sync", at.SYNCHRONOUS, "init(sync=True)", in_rounds=True),
    ConsistencyMode("quorum", at.QUORUM, "init(sync=True, quorum=...)", in_rounds=True, by_quorum=True, family="sync"),
)
MODES = {mode.name: mode for mode in _ALL}
BY_CODE = {mode.code: mode for mode in _ALL}


class Quorum(Struct, frozen=True):
    """How many workers have to come before a round is closed without the others.

    Attributes:
        needed: so many; with ``of`` above 0, so many of every ``of`` that are there, rounded up.
        of: of how many.
        grace_ns: how long it is then left open, in nanoseconds.
        adapts: instead, each worker leaves it open for a tenth of what it takes from a read to the next, for those
            who are about to come.
        replayed: instead, those have to come who were in the same round of a run before.
    """

    needed: int
    of: int = 0
    grace_ns: int = 0
    adapts: bool = False
    replayed: bool = False

    @classmethod
    def of_options(cls, quorum: float, grace_seconds: Grace | None, replayed: bool) -> Quorum:
        """Returns what ``init(quorum=, grace_seconds=)`` mean.

        Raises:
            StartupError: one of them makes no sense.
        """
        adapts = isinstance(grace_seconds, str) and grace_seconds == "auto"
        grace = 0.0 if grace_seconds is None or adapts else grace_seconds
        if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace < _MOST_SECONDS:
            raise StartupError(f'grace_seconds is a number of seconds, 0 or more, or "auto"; got {grace_seconds!r}')
        nanoseconds = math.ceil(grace * 1e9)
        if isinstance(quorum, int) and not isinstance(quorum, bool) and 1 <= quorum <= at.MOST_WORKERS:
            return cls(quorum, 0, nanoseconds, adapts, replayed)
        if isinstance(quorum, float) and 0 < quorum <= 1:
            part = Fraction(quorum).limit_denominator(10_000)
            return cls(max(1, part.numerator), part.denominator, nanoseconds, adapts, replayed)
        raise StartupError(
            f"quorum is a number of workers, 1 to {at.MOST_WORKERS}, or a fraction of them, above 0.0 and up to 1.0; "
            f"got {quorum!r}"
        )

    def __str__(self) -> str:
        grace = "auto" if self.adapts else f"{self.grace_ns / 1e9:g}"
        of, replayed = f"/{self.of}" if self.of else "", ", replayed" if self.replayed else ""
        return f"{self.needed}{of}, grace_seconds={grace}{replayed}"


def chosen_mode(sync: bool, staleness: int | None, quorum: Quorum | None = None) -> tuple[ConsistencyMode, int]:
    """Returns what ``init(sync=, staleness=, quorum=)`` mean together: the mode, and its bound in ticks (0 for none).

    Raises:
        StartupError: they exclude each other, or one of them makes no sense.
    """
    if sync not in (True, False):
        raise StartupError(f"sync is True or False; got {sync!r}")
    if quorum is not None and not sync:
        raise StartupError(
            "quorum= says which rounds are closed without whom, and there are rounds with sync=True only"
        )
    if staleness is None:
        return MODES["quorum" if quorum is not None else "sync" if sync else "async"], 0
    if sync:
        raise StartupError("sync=True and staleness= exclude each other: choose one")
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise StartupError(f"staleness is a number of ticks, 0 or more; got {staleness!r}")
    if staleness >= _MOST_TICKS:
        raise StartupError(f"staleness is a number of ticks below 2**60; for no bound leave it out; got {staleness}")
    return MODES["bounded"], staleness
