"""Makes and ends tables on all hosts, step by step: which step each table is at, and which hosts still have to do it.

A table comes to be in steps, each begun when all hosts have done the one before: *ask* (by order: all hosts whose
workers live; by name: the first), *make* (memory, all zero, into which the workers whose initial value counts write,
each on its own host; nothing comes from other hosts yet, as a mean is divided here), *join* (from here on the hosts
exchange differences), *push* (what was written reaches the homes), *finish* (take what the others wrote; let the
constructors return).

A table ends when no worker of any host has it and one of them has closed it (the others may have left): everyone
*parts* with it, so that nobody waits for its values any more, and when all have, *frees* it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from multiverso.hosts.control.known_hosts import KnownHosts
from multiverso.hosts.control.messages import (
    Address,
    Begin,
    Create,
    Done,
    Drop,
    Free,
    Key,
    Make,
    Order,
    Part,
    Reached,
    Step,
    ToHost,
    Unused,
    Used,
    Withdraw,
)

_NEXT: dict[Step, Literal["join", "push"]] = {"make": "join", "join": "push"}

_ORDER = "order"


@dataclass
class _Creation:
    """A table in the making; ``waits_for`` are the hosts that have not done the step yet."""

    asked: dict[int, Create] = field(default_factory=dict)
    step: Step | None = None  # None: hosts still ask
    waits_for: set[int] = field(default_factory=set)


@dataclass
class _Unused:
    """A table that some hosts' workers have closed; ``waits_for``: who still has it, once all are to close it."""

    key: Key
    hosts: set[int] = field(default_factory=set)
    closing: bool = False
    waits_for: set[int] | None = None


def writers_of(key: Key, spec: dict[str, Any], workers: list[int], masters: list[int]) -> list[int]:
    """Returns the workers whose initial value counts, in the order of their turns, of those that have asked."""
    if key[0] == _ORDER and spec.get("initial") == "master":
        return (masters or workers)[:1]
    return workers


class TableSteps:
    """Owner: the coordinator, one call at a time. A call returns what the hosts are to do.

    Args:
        names: the hosts'.
        hosts: what is known of them.
        coming: hosts that take a lost one's place; no table is begun before they are let in.

    Attributes:
        clocks: by table and worker, as far as reported.
        overwritten: of a synchronous table, the last turns at which a host's values became everybody's, and whose.
        ordered: tables made by order, those that are closed included.
    """

    def __init__(self, names: Sequence[str], hosts: KnownHosts, coming: dict[int, Address]) -> None:
        self.clocks: Reached = {}
        self.overwritten: dict[int, dict[int, int]] = {}
        self.ordered = 0
        self._names = names
        self._hosts = hosts
        self._coming = coming
        self._creations: dict[Key, _Creation] = {}
        self._made: dict[Key, Make] = {}  # what makes each table that there is
        self._unused: dict[int, _Unused] = {}
        self._numbers = 0

    @property
    def half_made(self) -> bool:
        """Whether some hosts have a table that others have not."""
        return any(creation.step is not None for creation in self._creations.values())

    def made(self) -> list[Make]:
        """Returns what makes each table that there is."""
        return list(self._made.values())

    def lose(self, host: int) -> list[ToHost]:
        """The others no longer wait for a host."""
        for creation in self._creations.values():
            creation.asked.pop(host, None)
            creation.waits_for.discard(host)
        orders = self.proceed()
        for number in list(self._unused):
            orders += self._part_or_free(number)
        return orders

    def proceed(self) -> list[ToHost]:
        """Begins what nothing stands in the way of any more: who has to ask, or may, has changed."""
        found = list(self._creations.items())
        return [order for key, creation in found for order in self._proceed(key, creation)]

    # -- coming to be ----------------------------------------------------------------------------------------

    def create(self, host: int, report: Create) -> list[ToHost]:
        """All live workers of a host (by name: one or more) have asked for a table."""
        key = report.key
        if key in self._made:
            # another host's worker has made it meanwhile: the order to make it is under way, or was obeyed
            return []
        creation = self._creations.setdefault(key, _Creation())
        creation.asked[host] = report
        return self._proceed(key, creation)

    def withdraw(self, host: int, report: Withdraw) -> list[ToHost]:
        """A worker of a host no longer waits: the host asks again when all have."""
        creation = self._creations.get(report.key)
        if creation is not None and creation.step is None:
            creation.asked.pop(host, None)
            if not creation.asked:
                del self._creations[report.key]
        return []

    def done(self, host: int, report: Done) -> list[ToHost]:
        """A host has done a table's step, or cannot."""
        creation = self._creations.get(report.key)
        if creation is None or creation.step != report.step:
            return []
        if report.error is not None:
            return self._drop(Drop(report.key, report.error))
        creation.waits_for.discard(host)
        return self._proceed(report.key, creation)

    def _proceed(self, key: Key, creation: _Creation) -> list[ToHost]:
        if self._creations.get(key) is not creation:
            return []  # it was dropped when another one had continued
        if creation.step is None:
            return self._decide(key, creation) if self._all_asked(key, creation) else []
        if creation.waits_for:
            return []
        if creation.step != "push":
            step = _NEXT[creation.step]
            return self._begin(creation, step, Begin(key, step))
        del self._creations[key]
        return self._hosts.to_all(Begin(key, "finish"))

    def _all_asked(self, key: Key, creation: _Creation) -> bool:
        if self._coming:
            return False  # they are let in first
        concerned = {host for host in self._hosts.left() if self._hosts[host].is_live}
        return bool(creation.asked) and (key[0] != _ORDER or concerned <= creation.asked.keys())

    def _decide(self, key: Key, creation: _Creation) -> list[ToHost]:
        """Decides, once all that have to ask have asked, whether they have asked for the same table."""
        first = min(creation.asked)
        asked = creation.asked[first]
        if any(other.spec != asked.spec or other.mode != asked.mode for other in creation.asked.values()):
            each = {self._names[host]: other.spec for host, other in sorted(creation.asked.items())}
            return self._drop(Drop(key, ("TableMismatchError", ""), each))
        workers = sorted(i for other in creation.asked.values() for i in other.workers)
        masters = sorted(i for other in creation.asked.values() for i in other.masters)
        writers = writers_of(key, asked.spec, workers, masters)
        self._numbers += 1
        self._made[key] = Make(key, self._numbers, asked.spec, asked.mode)
        self.ordered += key[0] == _ORDER
        return self._begin(creation, "make", replace(self._made[key], writers=writers, workers=workers))

    def _begin(self, creation: _Creation, step: Step, order: Order) -> list[ToHost]:
        creation.step = step
        creation.waits_for = set(self._hosts.left())
        return self._hosts.to_all(order)

    def _drop(self, order: Drop) -> list[ToHost]:
        """A table cannot be made: the workers that wait for it get an error, and may ask again."""
        del self._creations[order.key]
        if self._made.pop(order.key, None) is not None:
            self.ordered -= order.key[0] == _ORDER
        return self._hosts.to_all(order)

    # -- ending ----------------------------------------------------------------------------------------------

    def note_unused(self, host: int, report: Unused) -> list[ToHost]:
        """No worker of a host has a table any more, or none ever had."""
        key, number = report.key, report.number
        if not self._is_made(key, number) or key in self._creations:
            return []
        unused = self._unused.setdefault(number, _Unused(key))
        unused.hosts.add(host)
        unused.closing |= report.closing
        return self._part_or_free(number)

    def note_used(self, host: int, report: Used) -> list[ToHost]:
        """A worker asks again for a table that its host had said to be unused."""
        if not self._is_made(report.key, report.number):
            return []  # too late: it has to part with it
        if report.number in self._unused:
            self._unused[report.number].hosts.discard(host)
        return [(host, report)]

    def note_parted(self, host: int, report: Part) -> list[ToHost]:
        """A host waits for a table's values no longer."""
        unused = self._unused.get(report.number)
        if unused is None or unused.waits_for is None:
            return []
        unused.waits_for.discard(host)
        return self._part_or_free(report.number)

    def _is_made(self, key: Key, number: int) -> bool:
        return key in self._made and self._made[key].number == number

    def _part_or_free(self, number: int) -> list[ToHost]:
        unused = self._unused[number]
        there = set(self._hosts.left())
        if unused.waits_for is None:
            if not unused.closing or not there <= unused.hosts:
                return []
            del self._made[unused.key]
            self.clocks.pop(number, None)
            self.overwritten.pop(number, None)
            unused.waits_for = there
            return self._hosts.to_all(Part(unused.key, number))
        if unused.waits_for & there:
            return []
        del self._unused[number]
        return self._hosts.to_all(Free(unused.key, number))
