"""One pair of hosts, seen from one of them: what is pushed and what is answered. No sockets, no clock, no threads.

Of a table's chunks some have their home here, some at the peer, the rest elsewhere. A link pushes what belongs to the
peer and answers what the peer pushes; all of it arrives exactly once and in order (`Numbered`)::

    this host                          its peer, the chunk's home
    PUSH (FRESH)       ------------>   the first: T takes it, S = T
                       <------------   VALUE: S
    PUSH: V - S        ------------>   T and S take it
                       <------------   ANSWER: T - S
                       <------------   NEWS: T has changed since your last pass

One frame of a chunk is under way at a time, and a window of chunks. What is under way is kept until it is answered, and
taken back if the peer is lost. A pass over a table begins when this host's workers have changed it, when news came, or
when the last one still found differences; a table at rest sends nothing.

Two threads may call a link at once, one that sends (``next``) and one that receives (``accept``, ``arrived``; what
these do is in ``receiving.py``): a chunk's memory belongs to the thread that handles its frame, and the lock guards the
state alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from multiverso.errors import ClosedError, MultiversoError
from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import LONGEST_BODY, Header, Outgoing
from multiverso.hosts.peer.resources import Array, Pace, view
from multiverso.hosts.transport.channel import megabytes_for
from multiverso.hosts.values import frames
from multiverso.hosts.values.coding import make_push, take_back
from multiverso.hosts.values.copies import Chunk, Copy
from multiverso.hosts.values.frames import Opened
from multiverso.hosts.values.receiving import Receiving
from multiverso.hosts.values.state import Away, Held, Here, LinkTable, Ticket, UnderWay
from multiverso.spec.table import DTYPES

WINDOW = 8


class Link(Receiving):
    """This host's end of a pair.

    Args:
        me: this host's number.
        peer: the other's.
        pace: the node's budget.
        window: chunks that are under way at a time, at most.
        settled: called by ``wake`` when a settle is over.
    """

    def __init__(
        self, me: int, peer: int, pace: Pace, window: int = WINDOW, settled: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(peer, window, pace, settled)
        self.me = me
        self._ticket = 0

    # -- tables ----------------------------------------------------------------------------------------------

    def attach(self, number: int, held: Held, epoch: int = 0) -> None:
        """Begins to keep a table near the peer's, once that has it too.

        Args:
            number: of the table in the job.
            held: what this host has of it.
            epoch: how often homes were reassigned.
        """
        copy, homes = held.copy, held.homes
        opened = Opened(copy.elements, DTYPES.index(copy.dtype.name), copy.chunks[0].size, epoch)
        table = LinkTable(number, held, opened)
        table.away = {c.number: Away(c, s) for c, s in _agreed(copy, homes, self.peer)}
        table.here = {c.number: Here(c, s) for c, s in _agreed(copy, homes, self.me)}
        with self._lock:
            if number in self._tables:
                raise MultiversoError(f"table {number} is attached already")
            self._closed.discard(number)
            self._tables[number] = table
            self._say_open(table)

    def detach(self, number: int) -> None:
        """Releases a table: frames of it that are under way are forgotten, and those that still come dropped."""
        with self._lock:
            table = self._tables.pop(number)
            self._closed.add(number)
            self._queues.forget(table)
            self.post(Outgoing(Header(frames.CLOSE, table=number)))
            for ticket in self._tickets:
                ticket.left -= set(table.away.values())

    def begin_ruling(self, number: int) -> None:
        """From now on what this side pushes goes through the rule between hosts: initial values are there."""
        with self._lock:
            self._tables[number].ruling = True

    def hand_over(self, number: int) -> dict[int, Array]:
        """Returns what was agreed with a peer that is lost, for each chunk that lived there; its threads have ended.

        What was under way is taken back: it is unknown whether it arrived.
        """
        with self._lock:
            table = self._tables[number]
            for part in table.away.values():
                if part.frame is not None:
                    take_back(table, part, part.frame, self._pool)
            return {chunk: part.agreed for chunk, part in table.away.items()}

    def regroup(self, number: int, epoch: int, away: dict[int, Array], here: Iterable[int]) -> None:
        """Homes were reassigned: the peer's and this side's frames of the table count once both know it.

        Args:
            number: of the table.
            epoch: how often that has happened.
            away: chunks that live at the peer from now on, with what was agreed with their last home.
            here: chunks that live here from now on.
        """
        with self._lock:
            table = self._tables[number]
            for chunk, agreed in away.items():
                table.away[chunk] = Away(table.held.copy.chunks[chunk], agreed.copy())
                table.again.add(chunk)
            for chunk in here:
                part = table.held.copy.chunks[chunk]
                table.here[chunk] = Here(part, np.zeros(part.size, table.held.copy.dtype))
            table.opened = table.opened._replace(epoch=epoch)
            self._say_open(table)

    # -- the connection --------------------------------------------------------------------------------------

    def at_distance(self, seconds: float) -> None:
        """Says how long the way there and back takes at least: no more is under way than keeps it busy."""
        with self._lock:
            self._queues.bytes_window = megabytes_for(seconds) << 20

    # -- what is to do ---------------------------------------------------------------------------------------

    def look(self, now: float) -> float | None:
        """Begins the passes that are due and tells the peer news; returns what `wait` does."""
        with self._lock:
            for table in self._tables.values():
                if self._reaches(table):
                    self._begin_what_is_due(table, now)
                    if not table.differs:
                        table.alike_at = now
            return self.wait(now)

    def _reaches(self, table: LinkTable) -> bool:
        """Whether the peer has a table, and can be told of it."""
        return self._ready and table.ready

    def behind(self, now: float) -> float:
        """Returns how long ago the copies here and at the peer last had what there was then, in seconds."""
        with self._lock:
            tables = [table for table in self._tables.values() if table.differs or not self._reaches(table)]
            return max((now - table.alike_at for table in tables if table.alike_at is not None), default=0.0)

    @property
    def passing(self) -> bool:
        """Whether a look finds nothing to begin before a frame has come: it looks then by itself."""
        with self._lock:
            tables = [table for table in self._tables.values() if self._reaches(table)]
            return bool(tables) and all(table.passing and (table.announced or not table.here) for table in tables)

    def settle(self, take: bool, tables: Iterable[int] | None = None) -> Ticket:
        """Asks that all that is in V now gets to the peer, unquantised; with ``take``, all that is there comes here.

        Returns:
            what is left; it is done once each chunk's frame that began after this call was answered, and the last
            has left nothing to rounding.
        """
        with self._lock:
            self._ticket += 1
            parts: set[Away] = set()
            for table in self._tables.values():
                if tables is not None and table.number not in tables:
                    continue
                for part in table.away.values():
                    part.take = take or (part.take and part.goal > part.done)
                    part.goal, part.tries = self._ticket, 0
                    parts.add(part)
                    self._queues.ask(table, part)
            ticket = Ticket(self._ticket, parts)
            self._tickets = [t for t in self._tickets if t.left] + [ticket]
            return ticket

    # -- sending ---------------------------------------------------------------------------------------------

    def wait(self, now: float) -> float | None:
        """Returns the seconds until ``next`` has something: 0 for at once, None to wait for an event."""
        with self._lock:
            if self._speaks():
                return 0.0
            return self._queues.wait(now) if self._ready else None

    def pause(self, now: float) -> float:
        """Returns the seconds that the peer's next frame should wait: 0 where a worker waits for it."""
        with self._lock:
            return 0.0 if self._serving_urgent else self._queues.pause(now)

    @property
    def has_something(self) -> bool:
        """Whether there may be something to send, now or later."""
        return self._speaks() or self._queues.has_something

    def next(self, now: float, most_new: int = LONGEST_BODY) -> Outgoing | None:
        """Returns the next frame to send.

        Args:
            now: the time.
            most_new: bytes of the body of one that is made at this moment, from a chunk's values; a longer one is left
                for another call.
        """
        while True:
            with self._lock:
                found = self._queues.choose(now, most_new) if self._ready and self._sent == self._last else None
                if found is None:
                    return self._next()
                table, part = found
                wire, flags = self._wire_and_flags(table, part)
                ticket = self._ticket
            frame: UnderWay | None
            try:
                frame = make_push(table, part, wire, flags, ticket, self._pool)
            except ClosedError:
                frame = None
            except MemoryError:  # nothing has changed
                with self._lock:
                    self._give_up(table, part, flags)
                raise
            with self._lock:
                if frame is None or table.closed or self._tables.get(table.number) is not table:
                    self._queues.came_back(part)
                    continue
                part.frame = frame
                self._post(Outgoing(frame.header, view(frame.buffer, frame.header.length)))
                return self._next()

    def _wire_and_flags(self, table: LinkTable, part: Away) -> tuple[int, int]:
        urgent = part.goal > part.done
        flags = (frames.FRESH if part.fresh else 0) | (frames.URGENT if urgent else 0)
        part.fresh = False
        flags |= frames.RULED if table.ruling else 0
        flags |= frames.REST if (part.tries > 0 if urgent else part.rest) else 0
        if table.first:
            flags |= frames.FIRST
            table.first = False
        return codecs.NATIVE if urgent else table.held.wire.number, flags

    def _give_up(self, table: LinkTable, part: Away, flags: int) -> None:
        """A push could not be made: as if it had not been begun, so that another one is."""
        self._queues.came_back(part)
        part.fresh = bool(flags & frames.FRESH)
        table.first |= bool(flags & frames.FIRST)
        if self._tables.get(table.number) is table:
            if part.goal > part.done:
                self._queues.ask(table, part)
            self._queues.passed(table, part, again=True)


def _agreed(copy: Copy, homes: list[int], home: int) -> Iterator[tuple[Chunk, Array]]:
    """Gives each chunk that lives at a host, with memory for S, zeroed."""
    chunks = [chunk for chunk in copy.chunks if homes[chunk.number] == home]
    memory = np.zeros(sum(chunk.size for chunk in chunks), copy.dtype)
    low = 0
    for chunk in chunks:
        yield chunk, memory[low : low + chunk.size]
        low += chunk.size


class Loop:
    """Carries a link's frames back to it, in the thread that asks for it.

    Args:
        link: whose peer is its own host.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        link.connect(0)

    def pump(self) -> None:
        """Moves what there is to move. If another thread does so already, that continues with it."""
        while self._lock.acquire(blocking=False):
            try:
                while (outgoing := self.link.next(time.monotonic())) is not None:
                    room = self.link.accept(outgoing.header)
                    if room:
                        room[:] = outgoing.body
                    self.link.arrived(outgoing.header, room, time.monotonic())
                    self.link.wake()
            finally:
                self._lock.release()
            if self.link.wait(time.monotonic()) != 0.0:  # nothing came between the last look and the release
                return

    poke = pump

    def receive_now(self) -> None:
        """All was received when it was sent."""
