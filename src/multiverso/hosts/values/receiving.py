"""A link's state, and the half that receives: pushes for chunks that live here, answers to ours, and words."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from multiverso.errors import ClosedError
from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import NOTHING, Header, Numbered, Outgoing, ProtocolError, memory_for, unknown
from multiverso.hosts.peer.resources import Buffers, Pace, owner, view
from multiverso.hosts.values import frames
from multiverso.hosts.values.coding import take_answer, take_push
from multiverso.hosts.values.frames import Opened
from multiverso.hosts.values.state import Away, Here, LinkTable, Queues, Ticket, UnderWay

_ENOUGH = 8  # frames of a chunk that a settle waits for while workers keep adding
_WORDS = frozenset((frames.OPEN, frames.CLOSE, frames.NEWS))


class Receiving(Numbered):
    """A link's state, and what becomes of frames that arrive. One thread at a time; another may send meanwhile.

    Args:
        peer: the other host's number.
        window: chunks that are under way at a time, at most.
        pace: the node's budget.
        settled: called by `wake` when a settle is over.
    """

    def __init__(self, peer: int, window: int, pace: Pace, settled: Callable[[], None]) -> None:
        super().__init__(Buffers(2 * window))
        self.peer = peer
        self._queues = Queues(window, pace)
        self._tables: dict[int, LinkTable] = {}  # by number
        self._closed: set[int] = set()  # tables that were released, of which frames may still come
        self._tickets: list[Ticket] = []  # settles that are not over
        self._serving_urgent = False  # a worker at the peer waits for what it pushes
        self._settled = settled
        self._some_settled = False

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that is no longer wanted.

        Raises:
            ProtocolError: no node sends this.
        """
        kind, length = header.kind, header.length
        if kind not in frames.KINDS:
            raise unknown(header)
        with self._lock:
            if not self.is_new(header):
                return None
            if kind in _WORDS:
                return memory_for(header, frames.OPENED.size if kind == frames.OPEN else 0)
            table = self._tables.get(header.table)
            if table is None:
                if header.table in self._closed:
                    return None
                raise ProtocolError(f"a frame of table {header.table}, which this side has not opened")
            if table.theirs is None:
                return None
            if kind == frames.PUSH:
                native = check_push(table, header, self._lent).agreed.nbytes
            else:
                native = check_answer(table, header).agreed.nbytes
                if not length and kind == frames.ANSWER:  # nothing has changed there
                    return NOTHING
            return view(self._pool.take(max(native, length)), length)

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """A frame is whole; returns whether there may be something to send. Then `wake` has to follow.

        Raises:
            ProtocolError: its body is no coded difference, or it opens a table of another size.
        """
        kind = header.kind
        if body is None:
            pass  # nobody wants it, or it had come before
        elif kind == frames.PUSH:
            self._pushed(header, body)
        elif kind == frames.ANSWER or kind == frames.VALUE:
            self._answered(header, body, now)
        else:
            with self._lock:
                self._take_word(header, body, now)
        if header.number > self._received:
            self.note(header)
        return self.has_something

    def wake(self) -> None:
        """Wakes threads whose settle is over: late, since they then wait for this thread's interpreter."""
        if self._some_settled:
            self._some_settled = False
            self._settled()

    def _take_word(self, header: Header, body: memoryview, now: float) -> None:
        table = self._tables.get(header.table)
        if table is None:
            return  # opened there before it is here: it is said again when it is
        if header.kind == frames.NEWS:
            table.news = True
            if table.ready:
                self._begin_what_is_due(table, now)
        elif header.kind == frames.CLOSE:
            table.theirs, table.closed = None, True
            self._queues.forget(table)
        else:
            theirs, mine = Opened(*frames.OPENED.unpack(body)), table.opened
            if (theirs.elements, theirs.dtype, theirs.chunk) != (mine.elements, mine.dtype, mine.chunk):
                raise ProtocolError(f"table {header.table} is {theirs} on host {self.peer} and {mine} here")
            if table.theirs is not None and theirs.epoch < table.theirs.epoch:
                raise ProtocolError(f"an OPEN of epoch {theirs.epoch} after one of {table.theirs.epoch}")
            if table.theirs is None:  # when we said that we have it, it may not have had it
                self._say_open(table)
            table.theirs = theirs
            if table.ready and table.alike_at is None:
                table.alike_at = now

    def _pushed(self, header: Header, body: memoryview) -> None:
        flags = header.flags
        with self._lock:
            table = self._tables.get(header.table)
            if table is None:  # closed while the body came
                return
            part, changes = table.here[header.chunk], table.held.home_changes
            self._serving_urgent = flags & frames.URGENT != 0
            if flags & frames.FIRST:
                table.marked, table.announced = changes.for_peer(self.peer), False
        try:
            answer, buffer = take_push(table, part, header, owner(body), self._pool, self.peer)
        except ClosedError:
            return
        if header.length:
            changes.arrived(self.peer)
        with self._lock:
            part.fresh = False
            self._post(Outgoing(answer, view(buffer, answer.length), buffer))

    def _answered(self, header: Header, body: memoryview, now: float) -> None:
        with self._lock:
            table = self._tables.get(header.table)
            part = table.away[header.chunk] if table is not None else None
            if table is None or part is None or part.frame is None:
                return
        if header.length or header.kind == frames.VALUE:
            try:
                take_answer(table, part, header, owner(body), self._pool)
            except ClosedError:
                return
        with self._lock:
            if part.frame is not None:
                self._close_frame(table, part, part.frame, header, now)

    def _close_frame(self, table: LinkTable, part: Away, pushed: UnderWay, header: Header, now: float) -> None:
        self._queues.came_back(part)
        self._pool.give(pushed.buffer)
        some = pushed.header.length > 0 or header.length > 0
        if part.goal > part.done:
            if pushed.ticket >= part.goal:
                part.tries += 1
                left = pushed.rest or (part.take and not header.flags & frames.WHOLE)
                if not left or part.tries >= _ENOUGH:
                    part.done = part.goal
                    for ticket in self._tickets:
                        if ticket.number <= part.goal and ticket.left:
                            ticket.left.discard(part)
                            self._some_settled |= ticket.done
            if part.goal > part.done:
                self._queues.ask(table, part)
        if self._queues.passed(table, part, again=some):
            if table.whole:
                table.alike_at = table.began
            table.held.changes.look()
            self._begin_what_is_due(table, now)  # the next pass does not wait for the next look

    # -- of both halves --------------------------------------------------------------------------------------

    def _say_open(self, table: LinkTable) -> None:
        """Tells the peer that this side has a table."""
        body = memoryview(frames.OPENED.pack(*table.opened))
        self.post(Outgoing(Header(frames.OPEN, table=table.number, length=len(body)), body))

    def _begin_what_is_due(self, table: LinkTable, now: float) -> None:
        """Tells the peer news of what lives here, and begins a pass over what lives there, if it is time."""
        changes = table.held.changes
        if table.here and not table.announced and table.held.home_changes.for_peer(self.peer) != table.marked:
            table.announced = True
            self.post(Outgoing(Header(frames.NEWS, table=table.number)))
        if table.passing or not table.away or now - table.began < table.held.every.seconds:
            return
        moved, least = changes.version - table.seen, table.held.every.changes
        whole = moved >= least if least else moved != 0 or table.news
        if whole:
            table.seen, table.news, table.first = changes.version, False, True
            parts: Iterable[Away] = table.away.values()
        elif table.again and not least:
            parts = [table.away[number] for number in sorted(table.again)]
        else:
            return
        table.again = set()
        table.began, table.whole = now, whole
        self._queues.begin_pass(table, parts, rest=not whole)


MOST_ANSWERS = 64  # of a peer whose window we do not know; a peer that sends more is not one of our nodes


def check_push(table: LinkTable, header: Header, answering: int) -> Here:
    """Returns whose push it is; ``answering``: how many answers have not arrived at the peer.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.here.get(header.chunk)
    if part is None:
        raise ProtocolError(f"chunk {header.chunk} of table {header.table} has its home elsewhere")
    if bool(header.flags & frames.FRESH) != part.fresh:
        raise ProtocolError("the first push of a chunk is fresh, and no other")
    if answering >= MOST_ANSWERS:
        raise ProtocolError(f"more than {MOST_ANSWERS} answers are not taken")
    _check_size(part, header)
    return part


def check_answer(table: LinkTable, header: Header) -> Away:
    """Returns what it is an answer to.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.away.get(header.chunk)
    if part is None or part.frame is None:
        raise ProtocolError(f"an answer to a push of chunk {header.chunk}, which is not under way")
    if header.kind == frames.VALUE and header.wire != codecs.NATIVE:
        raise ProtocolError("the agreed value itself travels as it is")
    _check_size(part, header)
    return part


def _check_size(part: Here | Away, header: Header) -> None:
    agreed, length = part.agreed, header.length
    if header.wire == codecs.NATIVE and (length == 0 or length == agreed.nbytes):
        return
    if not codecs.fits(header.wire, length, agreed.size, agreed.itemsize):
        raise ProtocolError(f"{length} bytes in wire format {header.wire} are no difference of {agreed.size} numbers")
