"""The modes of a job: when a read may go ahead, and what everything around a table has to know about that."""

from __future__ import annotations

from msgspec import Struct

from multiverso.errors import StartupError
from multiverso.layout import words as at

_MOST_TICKS = 2**60


class ConsistencyMode(Struct, frozen=True):
    """One of them. What the modes have in common is asked for by property, never by comparing names.

    Attributes:
        name: in messages, and in what a rule is defined for.
        code: in a table's header.
        option: how `init` is called for it.
        in_rounds: all workers' adds of a round take effect together. A table's values are there twice, and
            there are no words of stripes.
        has_clocks: workers tick, and a read waits for workers that are too far behind.
    """

    name: str
    code: int
    option: str
    in_rounds: bool = False
    has_clocks: bool = False

    @property
    def reads_wait(self) -> bool:
        """Whether a read may have to wait for what other workers do."""
        return self.in_rounds or self.has_clocks


_ALL = (
    ConsistencyMode("async", at.ASYNCHRONOUS, "init()"),
    ConsistencyMode("bounded", at.BOUNDED, "init(staleness=...)", has_clocks=True),
    ConsistencyMode("sync", at.SYNCHRONOUS, "init(sync=True)", in_rounds=True),
)
MODES = {mode.name: mode for mode in _ALL}
BY_CODE = {mode.code: mode for mode in _ALL}


def chosen_mode(sync: bool, staleness: int | None) -> tuple[ConsistencyMode, int]:
    """Returns what ``init(sync=, staleness=)`` mean together: the mode, and its bound in ticks (0 where it has none).

    Raises:
        StartupError: they exclude each other, or one of them makes no sense.
    """
    if sync not in (True, False):
        raise StartupError(f"sync is True or False; got {sync!r}")
    if staleness is None:
        return MODES["sync" if sync else "async"], 0
    if sync:
        raise StartupError("sync=True and staleness= exclude each other: choose one")
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise StartupError(f"staleness is a number of ticks, 0 or more; got {staleness!r}")
    if staleness >= _MOST_TICKS:
        raise StartupError(f"staleness is a number of ticks below 2**60; for no bound leave it out; got {staleness}")
    return MODES["bounded"], staleness
