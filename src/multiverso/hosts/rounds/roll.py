"""Whether a round with a quorum may be closed: the head says so, by beginning it, from what all hosts have told it.

Each host tells the head whenever another number of its workers has come, or may come. Who is ready when the round's
sum passes by its host is in it; who is not, in the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

CAME = struct.Struct("!9Q")


class Came(NamedTuple):
    """Of a host's workers in a round; the body of a frame, in which it travels as `CAME`.

    Attributes:
        came: they are ready, those that have left or died since among them.
        awaiting: of these, those that wait for the round to end.
        there: others that may come.
        elsewhere: of these, those that do not come before they have been in another table's round.
        held: others that wait in the barrier after the one that this host was the last to let its workers pass.
        released: the number of that one.
        needed, of: how many have to come, of how many; 0: so many.
        grace: nanoseconds.
    """

    came: int
    awaiting: int
    there: int
    elsewhere: int
    held: int
    released: int
    needed: int
    of: int
    grace: int


@dataclass(eq=False, slots=True)
class Roll:
    """What the head knows of a table's next round.

    Attributes:
        told: by host, the round that it has spoken of last, and what it has said.
        closed: the last round that may begin.
        enough_since: since when enough have come to the next; None: they have not.
    """

    told: dict[int, tuple[int, Came]] = field(default_factory=dict)
    closed: int = 0
    enough_since: float | None = None

    def close(self, number: int, hosts: Iterable[int], now: float) -> float | None:
        """Closes the next round if all have come, or enough and their grace is over.

        Args:
            number: the round.
            hosts: all that are there.
            now: in seconds.

        Returns:
            the seconds of grace that are left; None where nothing is to be waited for.
        """
        told = [self.told.get(host) for host in hosts]
        if number <= self.closed or None in told:
            return None
        all_told = [(round_number == number, found) for round_number, found in filter(None, told)]
        awaiting = [found for here, found in all_told if here and found.awaiting]
        # who waits in a barrier that those who came have not reached does not come: it waits for them
        passed = min((found.released for found in awaiting), default=0)
        came = sum(found.came for here, found in all_told if here)
        there = came + sum(found.there + (0 if here else found.came) for here, found in all_told)
        there += sum(found.held for _, found in all_told if found.released < passed)
        needed = max(
            (-(-found.needed * there // found.of) if found.of else found.needed for found in awaiting), default=0
        )
        coming = there - sum(found.elsewhere for _, found in all_told)
        if not awaiting or came < min(needed, coming):
            self.enough_since = None
            return None
        if self.enough_since is None:
            self.enough_since = now
        left = 0.0 if came == coming else self.enough_since + min(found.grace for found in awaiting) / 1e9 - now
        if left > 0:
            return left
        self.closed, self.enough_since = number, None
        return None
