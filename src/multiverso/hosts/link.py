"""One pair of hosts, seen from one of them: what is pushed, answered, sent again. No sockets, no clock, no threads.

Of a table's chunks some have their home here, some at the peer, the rest elsewhere. A link pushes what belongs to the
peer and answers what the peer pushes; both go over one connection, and over the next after that is cut::

    this host                          its peer, the chunk's home
    PUSH n: V - S      ------------>   not seen yet: T and S take it
                       <------------   ANSWER n: T - S
    PUSH n again       ------------>   n is the last that was applied: the answer was lost
                       <------------   VALUE n: S itself
    PUSH 1 (FRESH)     ------------>   T takes it, S = T
                       <------------   VALUE 1: S
                       <------------   NEWS: T has changed since your last pass

One frame of a chunk is under way at a time, and a window of chunks. What is under way is kept until it is answered,
and sent again when a new connection has begun; it is applied exactly once, with nothing to remember but the number of
the last push of each chunk. A pass over a table begins when this host's workers have changed it, when news came, or
when the last one still found differences; a table at rest sends nothing.

Two threads may call a link at once, one that sends (``next``) and one that receives (``accept``, ``arrived``): a
chunk's memory belongs to whoever has its frame in hand, and the lock guards the books alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from multiverso.errors import ClosedError, MultiversoError
from multiverso.hosts import frames, wires
from multiverso.hosts.books import (
    Away,
    Here,
    LinkTable,
    Outgoing,
    Ticket,
    Traffic,
    UnderWay,
)
from multiverso.hosts.buffers import Array, Buffers, owner, view
from multiverso.hosts.changes import Changes
from multiverso.hosts.checks import check_answer, check_push, check_word
from multiverso.hosts.coding import make_push, repeat_answer, take_answer, take_back, take_push
from multiverso.hosts.copies import Chunk, Copy
from multiverso.hosts.distance import megabytes_for
from multiverso.hosts.frames import LONGEST_BODY, Header, Opened, ProtocolError, RoundHeader
from multiverso.hosts.outer import Outer
from multiverso.hosts.pace import Every, Pace
from multiverso.hosts.queues import Queues
from multiverso.hosts.rounds import Rounds
from multiverso.hosts.wires import Wire
from multiverso.spec import DTYPES

WINDOW = 8
_ENOUGH = 8  # frames of a chunk that a settle waits for while workers go on adding


class Link:
    """This host's end of a pair.

    Args:
        me: this host's number.
        peer: the other's.
        pace: the node's budget.
        window: chunks that are under way at a time at most; fewer to a host that is near.
        settled: called, with the books locked, when a settle is over.
        rounds: of this host; their frames go over the same connections.
    """

    def __init__(
        self,
        me: int,
        peer: int,
        pace: Pace,
        window: int = WINDOW,
        settled: Callable[[], None] = lambda: None,
        rounds: Rounds | None = None,
    ) -> None:
        self.me, self.peer = me, peer
        self.traffic = Traffic()
        self.connected = False
        self.peer_left = False
        self._pace = pace
        self._settled = settled
        self._rounds = Rounds(me, [me], lambda peer: None) if rounds is None else rounds
        self._incarnation: int | None = None
        self._tables: dict[int, LinkTable] = {}
        self._closed: set[int] = set()
        self._answering = 0
        self._serving_urgent = False  # the peer waits for what it pushes
        self._window = window
        self._ticket = 0
        self._tickets: list[Ticket] = []
        self._pool = Buffers(2 * window)
        self._queues = Queues(window, pace)
        self._lock = threading.RLock()

    # -- tables ----------------------------------------------------------------------------------------------

    def attach(
        self,
        number: int,
        copy: Copy,
        changes: Changes,
        homes: list[int],
        wire: Wire,
        every: Every,
        epoch: int = 0,
        outer: Outer | None = None,
    ) -> None:
        """Begins to keep a table near the peer's, once that has it too.

        Args:
            number: of the table in the job.
            copy: of this host.
            changes: counted by all links of this host together.
            homes: of each chunk, the host where it lives.
            wire: the format of what this side sends.
            every: how often a pass begins.
            epoch: how often homes have been given out anew.
            outer: the rule between hosts, with the shared values of what lives here; None where they are summed.
        """
        opened = Opened(copy.elements, DTYPES.index(copy.dtype.name), copy.chunks[0].size, epoch)
        table = LinkTable(number, copy, changes, outer, wire, every, opened)
        table.away = {c.number: Away(c, s) for c, s in _agreed(copy, homes, self.peer)}
        table.here = {c.number: Here(c, s) for c, s in _agreed(copy, homes, self.me)}
        with self._lock:
            if number in self._tables:
                raise MultiversoError(f"table {number} is attached already")
            self._closed.discard(number)
            self._tables[number] = table
            self._say_open(table)

    def detach(self, number: int) -> None:
        """Lets go of a table: frames of it that are under way are forgotten, and those that still come dropped."""
        with self._lock:
            table = self._tables.pop(number)
            self._closed.add(number)
            self._queues.forget(table)
            if self.connected:
                self._queues.words.append(Outgoing(Header(frames.CLOSE, table=number)))
            for ticket in self._tickets:
                ticket.left -= {id(part) for part in table.away.values()}

    @property
    def incarnation(self) -> int | None:
        """The peer's, once it has been connected."""
        return self._incarnation

    def begin_ruling(self, number: int) -> None:
        """From now on what this side pushes goes through the rule between hosts: initial values are there."""
        with self._lock:
            self._tables[number].ruling = True

    def hand_over(self, number: int) -> dict[int, Array]:
        """Returns what was agreed with a peer that is lost, for each chunk that lived there; its threads have ended.

        What was under way is taken back: nobody will ever say whether it arrived.
        """
        with self._lock:
            table = self._tables[number]
            for part in table.away.values():
                if part.frame is not None:
                    take_back(table, part, part.frame, self._pool)
            return {chunk: part.agreed for chunk, part in table.away.items()}

    def regroup(self, number: int, epoch: int, away: dict[int, Array], here: Iterable[int]) -> None:
        """Homes were given out anew: the peer's and this side's frames of the table count once both know it.

        Args:
            number: of the table.
            epoch: how often that has happened.
            away: chunks that live at the peer from now on, with what was agreed with their last home.
            here: chunks that live here from now on.
        """
        with self._lock:
            table = self._tables[number]
            was_ready = table.ready
            for chunk, agreed in away.items():
                table.away[chunk] = Away(table.copy.chunks[chunk], agreed.copy())
                table.again.add(chunk)
            for chunk in here:
                part = table.copy.chunks[chunk]
                table.here[chunk] = Here(part, np.zeros(part.size, table.copy.dtype))
            table.opened = replace(table.opened, epoch=epoch)
            self._say_open(table)
            if table.ready and not was_ready:
                self._queues.send_again(table)

    # -- the connection --------------------------------------------------------------------------------------

    def connect(self, incarnation: int) -> None:
        """A connection has begun, with a peer of this incarnation; nothing came over it yet.

        Raises:
            ProtocolError: the peer has begun anew, and what lived there is lost: homes have to be given out anew.
        """
        with self._lock:
            if self._incarnation not in (None, incarnation):
                if any(part.number for table in self._tables.values() for part in table.away.values()):
                    raise ProtocolError(f"host {self.peer} has begun anew: what had its home there is lost")
                for table in self._tables.values():
                    for here in table.here.values():
                        here.applied = 0
            self._incarnation = incarnation
            self._drop()
            self.connected, self.peer_left = True, False
            self.traffic.connections += 1
            for table in self._tables.values():
                self._say_open(table)
            self._rounds.connect(self.peer)

    def at_distance(self, seconds: float) -> None:
        """Says how long the way there and back takes at least: no more is under way than keeps it busy."""
        with self._lock:
            self._queues.window = min(self._window, megabytes_for(seconds))
        self._rounds.at_distance(self.peer, seconds)

    def cut(self) -> None:
        """The connection has ended: what was under way is kept for the next."""
        with self._lock:
            self.connected = False
            self._rounds.cut(self.peer)
            self._drop()
            self._answering = 0  # a push that had come in part is no more

    def _drop(self) -> None:
        self._queues.words.clear()
        self._queues.drop_again()
        while self._queues.answers:
            self.sent(self._queues.answers.popleft())
        for table in self._tables.values():
            table.theirs, table.told = None, False

    def bye(self) -> None:
        """Says that this side ends on purpose."""
        with self._lock:
            if self.connected:
                self._queues.words.append(Outgoing(Header(frames.BYE)))

    def _say_open(self, table: LinkTable) -> None:
        if self.connected:
            body = memoryview(table.opened.pack())
            self._queues.words.append(
                Outgoing(Header(frames.OPEN, table=table.number, length=len(body)), body)
            )

    # -- what is to do ---------------------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Begins the passes that are due and tells the peer news; returns whether there is something to send."""
        with self._lock:
            if not self.connected:
                return False
            for table in self._tables.values():
                if table.ready:
                    self._look_at(table, now)
            return self._queues.wait(now) == 0.0

    def _look_at(self, table: LinkTable, now: float) -> None:
        changes = table.changes
        if table.here and not table.told and table.home_changes.for_peer(self.peer) != table.marked:
            table.told = True
            self.traffic.news += 1
            self._queues.words.append(Outgoing(Header(frames.NEWS, table=table.number)))
        if table.passing or not table.away or now - table.began < table.every.seconds:
            return
        moved = changes.version - table.seen
        if table.every.changes:
            whole = moved >= table.every.changes
        else:
            whole = moved != 0 or table.news
        if whole:
            table.seen, table.news, table.first = changes.version, False, True
            parts: Iterable[Away] = table.away.values()
        elif table.again and not table.every.changes:
            parts = [table.away[number] for number in sorted(table.again)]
        else:
            return
        table.again = set()
        table.began = now
        self.traffic.passes += 1
        self._queues.begin_pass(table, parts, rest=not whole)

    def settle(self, take: bool, tables: Iterable[int] | None = None) -> Ticket:
        """Asks that all that is in V now gets to the peer, unquantised; with ``take``, all that is there comes here.

        Returns:
            what is left; it is done once each chunk's frame that began after this call was answered, and the last
            has left nothing to rounding.
        """
        with self._lock:
            self._ticket += 1
            parts: dict[int, Away] = {}
            for table in self._tables.values():
                if tables is not None and table.number not in tables:
                    continue
                for part in table.away.values():
                    part.take = take or (part.take and part.goal > part.done)
                    part.goal, part.tries = self._ticket, 0
                    parts[id(part)] = part
                    self._queues.ask(table, part)
            ticket = Ticket(self._ticket, set(parts), parts)
            self._tickets = [t for t in self._tickets if t.left] + [ticket]
            return ticket

    # -- sending ---------------------------------------------------------------------------------------------

    def wait(self, now: float) -> float | None:
        """Returns the seconds until ``next`` has something: 0 for at once, None when only an event can tell."""
        with self._lock:
            if not self.connected:
                return None
            return 0.0 if self._rounds.has(self.peer) else self._queues.wait(now)

    def pause(self, now: float) -> float:
        """Returns the seconds that the peer's next frame should wait: 0 where somebody waits for it."""
        with self._lock:
            waited_for = self._queues.someone_waits or self._serving_urgent or self._rounds
            return 0.0 if waited_for else self._pace.wait(now)

    @property
    def has_words(self) -> bool:
        """Whether something is to be sent that is no chunk."""
        return bool(self._queues.words)

    def next(self, now: float, most: int = LONGEST_BODY, most_new: int = LONGEST_BODY) -> Outgoing | None:
        """Returns the next frame to send. Call :meth:`sent` afterwards, whatever came of it.

        Args:
            now: the time.
            most: bytes of its body, where it is there already; a longer one is left for another call.
            most_new: of one that is made at this moment, from a chunk's values.
        """
        while True:
            with self._lock:
                if not self.connected:
                    return None
                if self._queues.made:
                    made = self._queues.take_made(most)
                    return None if made is None else self._count(made)
                step = self._rounds.next(self.peer, most)
                if step is not None:
                    return self._count(step)
                found = self._queues.choose(now, most_new)
                if found is None:
                    return None
                table, part = found
                header = self._head(table, part)
                ticket = self._ticket
            frame: UnderWay | None
            try:
                frame = make_push(table, part, header, ticket, self._pool)
            except ClosedError:
                frame = None
            except MemoryError:  # nothing has changed
                with self._lock:
                    self._give_up(table, part, header)
                raise
            with self._lock:
                if frame is None or table.closed or self._tables.get(table.number) is not table:
                    self._queues.came_back(part)
                    continue
                part.frame = frame
                self.traffic.pushes += 1
                self.traffic.empty += not frame.some
                return self._count(Outgoing(frame.header, frame.body))

    def sent(self, outgoing: Outgoing) -> None:
        """The frame is sent, or will not be: its memory is free again."""
        if outgoing.buffer is not None:
            with self._lock:
                self._answering -= 1
                self._pool.give(outgoing.buffer)

    def _head(self, table: LinkTable, part: Away) -> Header:
        part.number += 1
        urgent = part.goal > part.done
        flags = (frames.FRESH if part.number == 1 else 0) | (frames.URGENT if urgent else 0)
        flags |= frames.RULED if table.ruling else 0
        flags |= frames.REST if (part.tries > 0 if urgent else part.rest) else 0
        if table.first:
            flags |= frames.FIRST
            table.first = False
        wire = wires.NATIVE if urgent else table.wire.number
        return Header(frames.PUSH, wire, flags, table.number, part.chunk.number, 0, part.number)

    def _give_up(self, table: LinkTable, part: Away, header: Header) -> None:
        """A push could not be made: as if it had not been begun, so that another one is."""
        self._queues.came_back(part)
        part.number -= 1
        table.first |= bool(header.flags & frames.FIRST)
        if self._tables.get(table.number) is table:
            if part.goal > part.done:
                self._queues.ask(table, part)
            self._queues.passed(table, part, again=True)

    def _count(self, outgoing: Outgoing) -> Outgoing:
        self.traffic.bytes_sent += frames.HEADER_BYTES + len(outgoing.body)
        return outgoing

    # -- receiving -------------------------------------------------------------------------------------------

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that nobody wants any more.

        Raises:
            ProtocolError: no node sends this.
        """
        if header.kind in frames.OF_ROUNDS:
            self.traffic.bytes_received += frames.HEADER_BYTES + header.length
            return self._rounds.accept(self.peer, RoundHeader(*header))
        with self._lock:
            table = self._tables.get(header.table)
            self.traffic.bytes_received += frames.HEADER_BYTES + header.length
            if header.kind not in (frames.PUSH, frames.ANSWER, frames.VALUE):
                check_word(header)
                return memoryview(bytearray(header.length))
            if table is None:
                if header.table in self._closed:
                    return None
                raise ProtocolError(f"a frame of table {header.table}, which this side has not opened")
            if not table.ready:
                return None
            if header.kind == frames.PUSH:
                chunk = check_push(table, header, self._answering).chunk
                self._answering += 1
            else:
                chunk = check_answer(table, header).chunk
            native = chunk.size * table.copy.dtype.itemsize
            return view(self._pool.take(max(native, header.length)), header.length)

    def arrived(self, header: Header, body: memoryview | None, now: float) -> None:
        """A frame is whole.

        Raises:
            ProtocolError: its body is no coded difference, or it opens a table of another size.
        """
        if body is None:
            return
        if header.kind in frames.OF_ROUNDS:
            self._rounds.arrived(self.peer, RoundHeader(*header), body)
        elif header.kind == frames.PUSH:
            self._pushed(header, body)
        elif header.kind in (frames.ANSWER, frames.VALUE):
            self._answered(header, body, now)
        else:
            with self._lock:
                self._told(header, body)

    def _told(self, header: Header, body: memoryview) -> None:
        table = self._tables.get(header.table)
        if header.kind == frames.BYE:
            self.peer_left = True
        elif table is None:
            return  # opened there before it is here: it is said again when it is
        elif header.kind == frames.NEWS:
            table.news = True
        elif header.kind == frames.CLOSE:
            table.theirs, table.closed = None, True
            self._queues.forget(table)
        else:
            theirs, mine = Opened.unpack(body), table.opened
            if (theirs.elements, theirs.dtype, theirs.chunk) != (mine.elements, mine.dtype, mine.chunk):
                raise ProtocolError(f"table {header.table} is {theirs} on host {self.peer} and {mine} here")
            if table.theirs is not None and theirs.epoch < table.theirs.epoch:
                raise ProtocolError(f"an OPEN of epoch {theirs.epoch} after one of {table.theirs.epoch}")
            if table.theirs is None:  # when we said that we have it, it may not have had it
                self._say_open(table)
            was_ready, table.theirs = table.ready, theirs
            if table.ready and not was_ready:
                self._queues.send_again(table)

    def _pushed(self, header: Header, body: memoryview) -> None:
        buffer = owner(body)
        with self._lock:
            table = self._tables.get(header.table)
            if table is None or not table.ready:  # closed while the body came
                self._answering -= 1
                return
            part, changes = table.here[header.chunk], table.home_changes
            self._serving_urgent = bool(header.flags & frames.URGENT)
            if header.flags & frames.FIRST:
                table.marked, table.told = changes.for_peer(self.peer), False
        try:
            if header.number == part.applied:
                self.traffic.repeated += 1
                answer, buffer = repeat_answer(table, part, header, buffer)
            else:
                try:
                    answer, buffer = take_push(table, part, header, buffer, self._pool, self.peer)
                finally:
                    if header.length and part.applied == header.number:
                        changes.arrived(self.peer)
        except ClosedError:
            with self._lock:
                self._answering -= 1
            return
        with self._lock:
            self.traffic.answers += 1
            self._queues.answers.append(Outgoing(answer, view(buffer, answer.length), buffer))

    def _answered(self, header: Header, body: memoryview, now: float) -> None:
        with self._lock:
            table = self._tables.get(header.table)
            part = table.away[header.chunk] if table is not None else None
            if table is None or part is None or part.frame is None or not table.ready:
                return
        try:
            take_answer(table, part, header, owner(body), self._pool)
        except ClosedError:
            return
        with self._lock:
            if part.frame is not None:
                self._close_frame(table, part, part.frame, header, now)

    def _close_frame(
        self, table: LinkTable, part: Away, pushed: UnderWay, header: Header, now: float
    ) -> None:
        self._queues.came_back(part)
        self._pool.give(pushed.buffer)
        some = pushed.some or header.length > 0
        if part.goal > part.done:
            if pushed.ticket >= part.goal:
                part.tries += 1
                left = pushed.rest or (part.take and not header.flags & frames.WHOLE)
                if not left or part.tries >= _ENOUGH:
                    part.done = part.goal
                    for ticket in self._tickets:
                        if ticket.number <= part.goal and ticket.left:
                            ticket.left.discard(id(part))
                            if ticket.done:
                                self._settled()
            if part.goal > part.done:
                self._queues.ask(table, part)
        if self._queues.passed(table, part, again=some):
            self._look_at(table, now)  # the next pass does not wait until somebody looks


def _agreed(copy: Copy, homes: list[int], home: int) -> Iterator[tuple[Chunk, Array]]:
    """Gives each chunk that lives at a host, with memory for S, zeroed."""
    chunks = [chunk for chunk in copy.chunks if homes[chunk.number] == home]
    memory = np.zeros(sum(chunk.size for chunk in chunks), copy.dtype)
    low = 0
    for chunk in chunks:
        yield chunk, memory[low : low + chunk.size]
        low += chunk.size
