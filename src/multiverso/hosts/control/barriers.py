"""What the coordinator decides of barriers: when all hosts have settled, and whose values a table then has.

A barrier takes two steps: a host whose workers are all there pushes what they have added and says so (*settled*); when
all have, everyone takes what the others pushed and lets its workers go (*take*). A *gathering* is the same for one
host, while all continue: each *brings* what it has not sent yet.
"""

from __future__ import annotations

from multiverso.hosts.control.known_hosts import KnownHosts
from multiverso.hosts.control.messages import Bring, Brought, Gather, Gathered, Settled, Take, ToHost

# turns that a host which comes later might not have gone through: the others are at most a few behind
_KEPT = 64


class Barriers:
    """Owner: the coordinator, one call at a time. A call returns what the hosts are to do.

    Args:
        hosts: what is known of them.
        overwritten: gets, by table, the turns at which a host's values become everybody's, and whose these are.

    Attributes:
        released: the last barrier that all have passed.
    """

    def __init__(self, hosts: KnownHosts, overwritten: dict[int, dict[int, int]]) -> None:
        self.released = 0
        self._hosts = hosts
        self._overwritten = overwritten
        self._written: dict[int, int] = {}  # since the last barrier: whose values a synchronous table has got
        self._turns: dict[int, dict[int, int]] = {}  # how far each host's rounds are, by table
        # by host and number: the hosts that still have to bring
        self._gatherings: dict[tuple[int, int], set[int]] = {}

    def look(self) -> list[ToHost]:
        """Looks what nobody has to be waited for any more: a host is lost, or its workers have gone."""
        return self._release() + self._gathered()

    def note_settled(self, host: int, report: Settled) -> list[ToHost]:
        """A host's workers have all reached a barrier, and what they added is at the homes."""
        self._hosts[host].settled = max(self._hosts[host].settled, report.barrier)
        for number in report.written:
            self._written[number] = min(self._written.get(number, host), host)
        self._turns[host] = report.turns
        return self._release()

    def _release(self) -> list[ToHost]:
        reached = min((self._hosts[host].settled for host in self._hosts.there()), default=self.released)
        if reached <= self.released:
            return []
        self.released = reached
        written, self._written = self._written, {}
        return self._hosts.to_all(Take(reached, self._in_turn(written)))

    def _in_turn(self, written: dict[int, int]) -> dict[int, tuple[int, int, bool]]:
        """Returns whose values come when in each table's rounds, and whether all hosts are as far as that."""
        there = self._hosts.there()
        found = {}
        for number, writer in written.items():
            turns = [self._turns[host][number] for host in there if number in self._turns.get(host, {})]
            if turns:  # else it is closed
                found[number] = (writer, max(turns), min(turns) == max(turns))
                kept = self._overwritten.setdefault(number, {})
                kept[max(turns)] = writer
                while len(kept) > _KEPT:
                    del kept[next(iter(kept))]
        return found

    # -- everything to one host ------------------------------------------------------------------------------

    def gather(self, host: int, report: Gather) -> list[ToHost]:
        """A host wants what the others have and have not sent yet, while all continue: each brings it to the homes."""
        there = set(self._hosts.there())
        self._gatherings[host, report.number] = there
        orders = self._hosts.to_all(Bring(host, report.number))
        return [order for order in orders if order[0] in there] + self._gathered()

    def note_brought(self, host: int, report: Brought) -> list[ToHost]:
        """A host has brought what it had not sent yet."""
        self._gatherings.get((report.host, report.number), set()).discard(host)
        return self._gathered()

    def _gathered(self) -> list[ToHost]:
        there = set(self._hosts.there())
        done = [which for which, left in self._gatherings.items() if not left & there]
        for which in done:
            del self._gatherings[which]
        return [(host, Gathered(number)) for host, number in done if host in there]
