"""What workers do, as the coordinator tells it to the hosts: each line once to each, many in a message.

A host that is told something else hears first what is new, the others a moment later. So the messages of a start, or
of an end, grow with the number of hosts and not with its square.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from multiverso.hosts.control.known_hosts import KnownHosts
from multiverso.hosts.control.messages import Line, ToHost, Workers

_AT_ONCE = 4  # messages to all hosts between two calls of `tell_all`


class News:
    """Owner: the coordinator.

    Args:
        hosts: what is known of them.
    """

    def __init__(self, hosts: KnownHosts) -> None:
        self._hosts = hosts
        self._lines: dict[int, tuple[int, Line]] = {}  # by worker, the newest last, each with a number
        self._number = 0
        self._at_once = 0

    def note(self, line: Line) -> Line:
        """Takes in a worker's line; returns it, with the note that not all hosts have been told."""
        _, untold = self._lines.pop(line.worker_id, (0, None))
        if line.note is None and untold is not None and untold.pid == line.pid:
            line = replace(line, note=untold.note)
        self._number += 1
        self._lines[line.worker_id] = self._number, line
        return line

    def drop(self, worker_id: int) -> None:
        """What is new of a worker is told in another way."""
        self._lines.pop(worker_id, None)

    def tell(self, hosts: Iterable[int]) -> list[ToHost]:
        """Tells some hosts what they do not know yet."""
        made: dict[int, Workers] = {}  # one for all that know the same: it is encoded once
        orders: list[ToHost] = []
        for host in hosts:
            known = self._hosts[host]
            told, known.told = known.told, self._number
            if told < self._number and not known.lost:
                if told not in made:
                    made[told] = Workers(self._since(told))
                if made[told].workers:
                    orders.append((host, made[told]))
        return orders

    def _since(self, number: int) -> list[Line]:
        found = []
        for at, line in reversed(self._lines.values()):
            if at <= number:
                break
            found.append(line)
        return found[::-1]

    def tell_soon(self, at_once: bool) -> list[ToHost]:
        """Tells all hosts, or, if that was done several times just now, leaves it to the next `tell_all`."""
        self._at_once += 1
        return self.tell(self._hosts.left()) if at_once or self._at_once <= _AT_ONCE else []

    def tell_all(self) -> list[ToHost]:
        """Tells all hosts."""
        self._at_once = 0
        orders = self.tell(self._hosts.left())
        self._lines.clear()
        return orders
