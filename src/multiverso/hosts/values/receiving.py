"""The half of a link that receives: pushes of the peer for chunks that live here, answers to ours, and its words."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.errors import ClosedError
from multiverso.hosts.peer.frames import NOTHING, Carried, Header, Outgoing, ProtocolError, memory_for, unknown
from multiverso.hosts.peer.resources import owner, view
from multiverso.hosts.values import codecs, frames
from multiverso.hosts.values.coding import repeat_answer, take_answer, take_push
from multiverso.hosts.values.frames import Opened
from multiverso.hosts.values.state import Away, Here, LinkState, LinkTable, UnderWay

_ENOUGH = 8  # frames of a chunk that a settle waits for while workers keep adding
_WORDS = frozenset((frames.OPEN, frames.CLOSE, frames.NEWS))


class Receiving(Carried):
    """What becomes of frames that arrive. One thread at a time; another may send meanwhile.

    Args:
        state: of the link.
        settled: called by `wake` when a settle is over.
    """

    def __init__(self, state: LinkState, settled: Callable[[], None]) -> None:
        self._state = state
        self._settled = settled
        self._some_settled = False

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header; returns memory for its body, or None for one that is no longer wanted.

        Raises:
            ProtocolError: no node sends this.
        """
        state, kind, length = self._state, header.kind, header.length
        with state.lock:
            if kind not in frames.KINDS:
                raise unknown(header)
            if kind in _WORDS:
                return memory_for(header, frames.OPENED_BYTES if kind == frames.OPEN else 0)
            table = state.tables.get(header.table)
            if table is None:
                if header.table in state.closed:
                    return None
                raise ProtocolError(f"a frame of table {header.table}, which this side has not opened")
            if not table.ready:
                return None
            if kind == frames.PUSH:
                native = check_push(table, header, state.answering).agreed.nbytes
                state.answering += 1
            else:
                native = check_answer(table, header).agreed.nbytes
                if not length and kind == frames.ANSWER:  # nothing has changed there
                    return NOTHING
            return view(state.pool.take(max(native, length)), length)

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """A frame is whole; returns whether there may be something to send. Then `wake` has to follow.

        Raises:
            ProtocolError: its body is no coded difference, or it opens a table of another size.
        """
        kind = header.kind
        if body is None:
            return False
        if kind == frames.PUSH:
            self._pushed(header, body)
        elif kind == frames.ANSWER or kind == frames.VALUE:
            self._answered(header, body, now)
        else:
            with self._state.lock:
                self._take_word(header, body, now)
        return self._state.queues.has_something

    def wake(self) -> None:
        """Wakes threads whose settle is over: late, since they then wait for this thread's interpreter."""
        if self._some_settled:
            self._some_settled = False
            self._settled()

    def _take_word(self, header: Header, body: memoryview, now: float) -> None:
        state = self._state
        table = state.tables.get(header.table)
        if table is None:
            return  # opened there before it is here: it is said again when it is
        if header.kind == frames.NEWS:
            table.news = True
            if table.ready:
                state.begin_what_is_due(table, now)
        elif header.kind == frames.CLOSE:
            table.theirs, table.closed = None, True
            state.queues.forget(table)
        else:
            theirs, mine = Opened.unpack(body), table.opened
            if (theirs.elements, theirs.dtype, theirs.chunk) != (mine.elements, mine.dtype, mine.chunk):
                raise ProtocolError(f"table {header.table} is {theirs} on host {state.peer} and {mine} here")
            if table.theirs is not None and theirs.epoch < table.theirs.epoch:
                raise ProtocolError(f"an OPEN of epoch {theirs.epoch} after one of {table.theirs.epoch}")
            if table.theirs is None:  # when we said that we have it, it may not have had it
                state.say_open(table)
            was_ready, table.theirs = table.ready, theirs
            if table.ready and not was_ready:
                state.queues.send_again(table)

    def _pushed(self, header: Header, body: memoryview) -> None:
        state, buffer, flags, number = self._state, owner(body), header.flags, header.number
        with state.lock:
            table = state.tables.get(header.table)
            if table is None or not table.ready:  # closed while the body came
                state.answering -= 1
                return
            part, changes = table.here[header.chunk], table.held.home_changes
            state.serving_urgent = flags & frames.URGENT != 0
            if flags & frames.FIRST:
                table.marked, table.announced = changes.for_peer(state.peer), False
        try:
            if number == part.applied:
                answer, buffer = repeat_answer(table, part, header, buffer)
            else:
                try:
                    answer, buffer = take_push(table, part, header, buffer, state.pool, state.peer)
                finally:
                    if header.length and part.applied == number:
                        changes.arrived(state.peer)
        except ClosedError:
            with state.lock:
                state.answering -= 1
            return
        with state.lock:
            state.queues.answers.append(Outgoing(answer, view(buffer, answer.length), buffer))

    def _answered(self, header: Header, body: memoryview, now: float) -> None:
        state = self._state
        with state.lock:
            table = state.tables.get(header.table)
            part = table.away[header.chunk] if table is not None else None
            if table is None or part is None or part.frame is None or not table.ready:
                return
        if header.length or header.kind == frames.VALUE:
            try:
                take_answer(table, part, header, owner(body), state.pool)
            except ClosedError:
                return
        with state.lock:
            if part.frame is not None:
                self._close_frame(table, part, part.frame, header, now)

    def _close_frame(self, table: LinkTable, part: Away, pushed: UnderWay, header: Header, now: float) -> None:
        state = self._state
        state.queues.came_back(part)
        state.pool.give(pushed.buffer)
        some = pushed.some or header.length > 0
        if part.goal > part.done:
            if pushed.ticket >= part.goal:
                part.tries += 1
                left = pushed.rest or (part.take and not header.flags & frames.WHOLE)
                if not left or part.tries >= _ENOUGH:
                    part.done = part.goal
                    for ticket in state.tickets:
                        if ticket.number <= part.goal and ticket.left:
                            ticket.left.discard(part)
                            self._some_settled |= ticket.done
            if part.goal > part.done:
                state.queues.ask(table, part)
        if state.queues.passed(table, part, again=some):
            table.held.changes.look()
            state.begin_what_is_due(table, now)  # the next pass does not wait for the next look


MOST_ANSWERS = 64  # of a peer whose window we do not know; a peer that sends more is not one of our nodes


def check_push(table: LinkTable, header: Header, answering: int) -> Here:
    """Returns whose push it is; ``answering``: how many of this peer's wait for an answer.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.here.get(header.chunk)
    if part is None:
        raise ProtocolError(f"chunk {header.chunk} of table {header.table} has its home elsewhere")
    if header.number not in (part.applied, part.applied + 1) or header.number == 0:
        raise ProtocolError(f"push {header.number} of a chunk of which {part.applied} was the last")
    if bool(header.flags & frames.FRESH) != (header.number == 1):
        raise ProtocolError("the first push of a chunk is fresh, and no other")
    if answering >= MOST_ANSWERS:
        raise ProtocolError(f"more than {MOST_ANSWERS} pushes wait for an answer")
    _check_size(part, header)
    return part


def check_answer(table: LinkTable, header: Header) -> Away:
    """Returns what it is an answer to.

    Raises:
        ProtocolError: no node sends this.
    """
    part = table.away.get(header.chunk)
    if part is None or part.frame is None or part.frame.header.number != header.number:
        raise ProtocolError(f"an answer to push {header.number} of chunk {header.chunk}, which is not under way")
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
