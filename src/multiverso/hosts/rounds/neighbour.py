"""The frames of rounds as a connection to another host carries them."""

from __future__ import annotations

import math

from multiverso.hosts.peer.frames import LONGEST_BODY, Carried, Header, Outgoing
from multiverso.hosts.rounds.frames import KINDS, RoundHeader
from multiverso.hosts.rounds.rounds import Rounds


class Neighbour(Carried):
    """The rounds' frames between this host and another one.

    Args:
        rounds: of this host.
        peer: the other host's number.
    """

    kinds = KINDS

    def __init__(self, rounds: Rounds, peer: int) -> None:
        self._rounds, self._peer = rounds, peer
        self.idle = not rounds  # until there is a table

    def connect(self, incarnation: int) -> None:
        self._rounds.connect(self._peer)

    def at_distance(self, seconds: float) -> None:
        self._rounds.at_distance(self._peer, seconds)

    def cut(self) -> None:
        self._rounds.cut(self._peer)

    @property
    def has_something(self) -> bool:
        return self._rounds.may_have(self._peer)

    def wait(self, now: float) -> float | None:
        return 0.0 if self._rounds.has(self._peer) else None

    def pause(self, now: float) -> float:
        return 0.0 if self._rounds else math.inf

    def next(self, now: float, most_new: int = LONGEST_BODY) -> Outgoing | None:
        return self._rounds.next(self._peer, LONGEST_BODY) if self.has_something else None

    def accept(self, header: Header) -> memoryview | None:
        return self._rounds.accept(self._peer, RoundHeader(*header))

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        if body is not None:
            self._rounds.arrived(self._peer, RoundHeader(*header), body)
        return False  # what it has left to send was sent: `wake` of the rounds
