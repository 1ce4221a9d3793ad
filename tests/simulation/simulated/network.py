"""Virtual time, and connections whose bytes come late, in pieces, or not at all."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


class Clock:
    """Events in their order of virtual seconds; equal moments in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def at(self, moment: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (moment, self._count, do))

    def step(self) -> bool:
        """Does what comes next; False when nothing does."""
        if not self._queue:
            return False
        self.now, _, do = heapq.heappop(self._queue)
        self.events += 1
        do()
        return True


@dataclass(frozen=True)
class Line:
    """How a direction of a connection is.

    Attributes:
        latency: seconds.
        rate: bytes a second.
        pieces: bytes that arrive at once, at most; 0 for whole frames.
        shared: the rate is a host's, for all that it sends, instead of each connection's.
    """

    latency: float = 1e-4
    rate: float = 1e9
    pieces: int = 0
    shared: bool = False


class Card:
    """What a host sends by."""

    def __init__(self) -> None:
        self.free_at = 0.0


class Direction:
    """One direction of one connection: bytes in order, until it is cut."""

    def __init__(self, clock: Clock, random: Random, line: Line, card: Card, deliver: Callable[[bytes], None]) -> None:
        self._clock, self._random, self._line, self._deliver = clock, random, line, deliver
        self._card = card
        self._last = 0.0
        self.cut = False
        self.silent_until = 0.0
        self.left: int | None = None  # bytes until it breaks
        self.broken: Callable[[], None] = lambda: None
        self.sent = 0

    def send(self, data: bytes) -> float:
        """Gives bytes to the connection; returns the moment when the sender may go on."""
        clock = self._clock
        start = max(clock.now, self._card.free_at, self.silent_until)
        free_at = self._card.free_at = start + len(data) / self._line.rate
        self.sent += len(data)
        if self.left is not None:
            data, self.left = data[: self.left], self.left - len(data)
        step = self._line.pieces or len(data) or 1
        at = 0
        while at < len(data):
            size = self._random.randint(1, step) if self._line.pieces else step
            piece = data[at : at + size]
            at += size
            when = max(self._last, start + at / self._line.rate + self._line.latency)
            self._last = when
            # not `after`: now + (when - now) may be less than it was for the piece before, by rounding
            clock.at(when, lambda piece=piece: None if self.cut else self._deliver(piece))  # type: ignore[misc]
        if self.left is not None and self.left <= 0:
            self.left = None
            clock.at(max(clock.now, self._last), self.broken)
        return free_at
