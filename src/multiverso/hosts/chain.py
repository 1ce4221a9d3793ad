"""The hosts that are left, in their order: who stands before this one in the chain of rounds, and who after it."""

from __future__ import annotations

from collections.abc import Sequence

from multiverso.hosts.distance import FAR, megabytes_for

_EPOCHS = 256


class Chain:
    """One host's place. It changes when hosts are lost or come again, which begins a new *epoch*.

    Args:
        host: its number.
        live: the hosts of the job.
        most: steps that may be under way.

    Attributes:
        before: the host before, None for the head.
        next: the host after it, None for the tail.
        epoch: how often the hosts have formed a chain anew, modulo 256.
        ahead: how many steps the head begins before the total of the first is there: as the way down the chain is long.
    """

    def __init__(self, host: int, live: Sequence[int], most: int) -> None:
        self._host, self._most = host, most
        self._distances: dict[int, float] = {}
        self.epoch = 0
        self._place(live)

    def regroup(self, live: Sequence[int]) -> None:
        """Goes on without lost hosts, or with one that has come again."""
        self.epoch = (self.epoch + 1) % _EPOCHS
        self._place(live)

    def begin_anew(self, live: Sequence[int], epoch: int) -> None:
        """In a host that takes a lost one's place: who is there, and how often that has changed."""
        self.epoch = epoch % _EPOCHS
        self._place(live)

    @property
    def live(self) -> list[int]:
        """The hosts in their order."""
        return list(self._live)

    def at_distance(self, peer: int, seconds: float) -> None:
        """Sets the shortest round-trip time to a host."""
        self._distances[peer] = seconds
        self._look_ahead()

    def _place(self, live: Sequence[int]) -> None:
        self._live = sorted(live)
        index = self._live.index(self._host)
        self.before: int | None = self._live[index - 1] if index else None
        self.next: int | None = self._live[index + 1] if index + 1 < len(self._live) else None
        self._look_ahead()

    def _look_ahead(self) -> None:
        to_next = megabytes_for(self._distances.get(self.next, FAR)) if self.next is not None else 1
        self.ahead = min(self._most, 2 * to_next * (len(self._live) - 1) or 1)
