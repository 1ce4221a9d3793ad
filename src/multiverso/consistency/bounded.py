"""Bounded staleness: as asynchronous, but a read waits until the slowest worker is at most ``staleness`` ticks behind.

Each read, exchange, or step that pulls is a tick of this worker's clock of the table (stale synchronous parallel:
Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"). The tick is done
by the kernel that reads, in one step with it.

A worker that takes a dead one's place may do again what the others have done before: its clock begins at theirs, and
then runs ahead of those who wait at a barrier until it comes there. They do not tick before that. So its reads do not
wait for them, and do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from multiverso.consistency.asynchronous import NO_TICK, TICK, Asynchronous
from multiverso.consistency.protocol import Array, Call, CompiledRule, TableAccess
from multiverso.deadline import Deadline
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.memory.words import load64

T = TypeVar("T")


def _waiting(read: Callable[..., T]) -> Callable[..., T]:
    """Makes of a read, whose last argument is the deadline, one that waits first."""

    @wraps(read)
    def waiting(self: Bounded, *arguments: Any) -> T:
        self._wait_for_slowest(arguments[-1])
        return read(self, *arguments)

    return waiting


class Bounded(Asynchronous):
    """Its methods are those of `Consistency`."""

    ticks = TICK

    def __init__(self, access: TableAccess) -> None:
        super().__init__(access)
        self._wait_clock = waits.wait_clock.compiled()

    get = _waiting(Asynchronous.get)
    exchange = _waiting(Asynchronous.exchange)
    get_rows = _waiting(Asynchronous.get_rows)
    exchange_rows = _waiting(Asynchronous.exchange_rows)
    changed_stripes = _waiting(Asynchronous.changed_stripes)  # what comes until then has changed, too

    def apply_rule(
        self, rule: CompiledRule, local: Array, push: bool, pull: bool, call: Call, deadline: Deadline | None
    ) -> None:
        if pull:
            self._wait_for_slowest(deadline)
        super().apply_rule(rule, local, push, pull, call, deadline)

    def _wait_for_slowest(self, deadline: Deadline | None) -> None:
        """Waits until this read may go ahead: until the slowest worker's clock is at most the bound behind ours."""
        access = self.access
        access.check_may_wait()
        target = load64(access.line + at.CLOCK) - access.staleness
        self.ticks = TICK
        code = self._wait_unless_excused(target)
        if code:
            what = f"tick {target} (bounded staleness) of {access.name}"
            access.resume(code, lambda: self._wait_unless_excused(target), deadline, what)

    def _wait_unless_excused(self, target: int) -> int:
        if self.access.is_awaited is not None and self.access.is_awaited(target):
            self.ticks = NO_TICK
            return 0
        return self._wait_clock(self._control, self._base, self._me, target)
