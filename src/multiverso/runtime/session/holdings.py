"""Opens and closes a session's parts of the job's memory, and lists the program's handles of tables."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Protocol, TypeVar

import numpy as np

from multiverso.deadline import Deadline
from multiverso.errors import OutOfMemoryError
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.memory.segment import Segment, SharedMemory
from multiverso.runtime.session.node_link import NodeLink
from multiverso.runtime.session.replacing import await_the_others
from multiverso.runtime.session.view import SessionView
from multiverso.runtime.session.waiting import Patience
from multiverso.shards.shard import Shard
from multiverso.spec.table import MemorySpec, TableSpec
from multiverso.wire.messages import Message
from multiverso.wire.requests import Close, Create, Initialised, MemoryRequest, Share


class Handle(Protocol):
    """A program's handle of a table, as its session uses it."""

    def _flush_until(self, deadline: Deadline) -> None: ...
    def _raise_if_unsent(self) -> None: ...
    def _leave(self) -> None: ...


class Handles:
    """A session's handles. Any thread may look; a signal's handler may come between any two steps.

    Attributes:
        making: held while an object is made or closed: threads that open one table at once share its calls, and its
            hand.
    """

    def __init__(self) -> None:
        self.making = threading.RLock()
        self._of: dict[str, list[Handle]] = {}

    def __iter__(self) -> Iterator[Handle]:
        """Yields all that are open, in the order in which their tables were made."""
        return iter([handle for handles in list(self._of.values()) for handle in list(handles)])

    def of(self, table: str) -> list[Handle]:
        """Returns those that are open of a table, by what the session calls it."""
        return list(self._of.get(table, ()))

    def known(self) -> list[str]:
        """Returns what tables are called, those whose objects were all closed too, until they are forgotten."""
        return list(self._of)

    def list_of(self, table: str) -> list[Handle]:
        """Returns the list itself of a table's objects, which takes one in in one step."""
        return self._of.setdefault(table, [])

    def remove(self, table: str, handle: Handle) -> None:
        """Takes one out, which may be gone already."""
        with contextlib.suppress(KeyError, ValueError):
            self._of[table].remove(handle)

    def forget(self, table: str) -> None:
        """Drops the name of a table that will not be opened again under it, if no object of it is open."""
        if not self._of.get(table, True):
            self._of.pop(table, None)

    def clear(self) -> None:
        """At the session's end."""
        self._of.clear()


Fill = Callable[[Shard, bool, int], None]
_Made = TypeVar("_Made")


class Holdings:
    """Owner: the session, whose lock its callers hold; `leave` ends it.

    Args:
        session: whose they are.
        link: its connection to the node.
    """

    def __init__(self, session: SessionView, link: NodeLink) -> None:
        self.tables: dict[int, Shard] = {}
        self._memories: dict[int, SharedMemory] = {}
        self._mapped: dict[int, list[Segment]] = {}  # of plain memory
        self._session: SessionView = weakref.proxy(session)  # no cycle: its memory goes when it goes
        self._link = link
        # closing it twice is harmless, as it is not with a bare descriptor
        self._memory: FileIO | None = None
        self._closing: dict[int, weakref.ref[Segment]] = {}
        self._created = 0  # tables made by order and taken over
        self._orders: dict[int, int] = {}  # a table's place in the order, by its number; 0: it has none
        self._is_among_others = False  # a replacement: it has come to their place of the loop

    def begin(self, descriptors: list[int]) -> None:
        """Takes over the descriptor of the job's memory."""
        # one step of the interpreter: an interruption between the two calls would leave the descriptor behind
        (self._memory,) = map(FileIO, map(list.pop, [descriptors]))

    def map(self, offset: int, size: int, sparse: bool = False) -> Segment:
        """Maps a part of the job's memory."""
        assert self._memory is not None
        return Segment(self._memory.fileno(), offset, size, sparse=sparse)

    # -- opening ---------------------------------------------------------------------------------------------

    def open_table(self, spec: TableSpec, fill: Fill, master: bool, deadline: Deadline) -> tuple[int, Shard]:
        """Returns a table's number and memory; see ``Session.open_table``.

        A table by order is this worker's once `keep` is called: until then the next call asks for the same
        one again, so that nothing is lost when this one is interrupted.
        """
        order = self._created + 1
        by_order = self._session.makes_together(spec.name)
        what = f"table number {order}" if spec.name is None else f"table {spec.name!r}"
        request = Create(spec.as_message(), order if by_order else None, master)

        def place(segment: Segment, answer: Message) -> Shard:
            shard = Shard(segment, spec, self._session.control.index, int(answer["mode"]))
            if answer["enrol"]:
                shard.enrol(self._session.worker_id, self._others())
            return shard

        def write(shard: Shard, turn: Message) -> None:
            if turn["clear"]:
                shard.values()[:] = 0
            fill(shard, bool(turn["last"]), int(turn["of"]))

        if not self._is_among_others:
            patience = Patience(self._session, deadline, what, self._link)
            self._is_among_others = await_the_others(self._session, self.tables, patience)
        created = self._session.control.block(self._session.worker_id) + at.CREATED
        if by_order:
            waits.set_long.compiled()(created, order)
        try:
            answer, shard = self._open(request, place, write, what, deadline, order if by_order else 0)
        except BaseException:
            if by_order:  # the others wait for this worker again, and can say so
                waits.set_long.compiled()(created, order - 1)
                self._session.control.notify()
            raise
        number, place_in_order = int(answer["number"]), int(answer["order"])
        self._orders[number] = place_in_order
        if by_order:
            waits.set_long.compiled()(created, max(order - 1, place_in_order))  # it may have been there already
        return number, shard

    def _others(self) -> list[int] | None:
        """Returns the workers with whose clocks a replacement begins; None for any other worker."""
        session = self._session
        if not session.incarnation:
            return None
        return [worker for worker in session.live_workers() if worker != session.worker_id]

    def keep(self, number: int, shard: Shard, handles: list[Handle], new: Handle) -> None:
        """Notes that a table has been taken over, and by which of its handlers.

        All of it or nothing: no call stands between the first step and the last, so no signal's handler runs there.
        """
        order = self._orders[number]
        created = order if order > self._created else self._created
        handles += (new,)
        if number not in self.tables:
            self.tables[number] = shard
            self._created = created

    def share(
        self, spec: MemorySpec, initialise: Callable[[SharedMemory], None] | None, deadline: Deadline
    ) -> SharedMemory:
        """Returns plain memory; see ``Session.shared_memory``."""

        def place(segment: Segment, answer: Message) -> tuple[Segment, SharedMemory]:
            array = segment.array(0, spec.nbytes, np.uint8)
            return segment, SharedMemory(spec.name, int(answer["number"]), array)

        def write(made: tuple[Segment, SharedMemory], turn: Message) -> None:
            if turn["clear"]:
                made[0].clear()
            if initialise is not None:
                initialise(made[1])

        what = f"the shared memory {spec.name!r}"
        _, (segment, memory) = self._open(Share(spec.as_message()), place, write, what, deadline, 0, spec.sparse)
        self._mapped.setdefault(memory.number, []).append(segment)
        self._memories[memory.number] = memory
        return memory

    def memories(self) -> dict[int, range]:
        """Returns the addresses of plain memory, by number."""
        return {number: memory.addresses for number, memory in list(self._memories.items())}

    def _open(
        self,
        request: MemoryRequest,
        place: Callable[[Segment, Message], _Made],
        write: Callable[[_Made, Message], None],
        what: str,
        deadline: Deadline,
        target: int,
        sparse: bool = False,
    ) -> tuple[Message, _Made]:
        """Asks for memory, maps it, and writes this worker's part of the initial value when its turn comes."""
        session = self._session
        patience = Patience(session, deadline, what, self._link)
        waits.begin_wait.compiled()(session.control.address, session.index, at.FOR_TABLE, 0, 0, target)
        try:
            answer = patience.ask(self._link, request)
            made = place(self.map(int(answer["offset"]), int(answer["size"]), sparse), answer)
            while (turn := patience.more(self._link))["turn"]:
                write(made, turn)
                self._link.tell(Initialised())
            return answer, made
        except BaseException as error:
            # or the others would wait for this worker's turn
            self._link.give_up(str(error) if isinstance(error, OutOfMemoryError) else None)
            raise
        finally:
            waits.finish_wait.compiled()(session.control.address, session.index)

    # -- closing ---------------------------------------------------------------------------------------------

    def close_table(self, number: int, may_ask: bool = True) -> None:
        """Unmaps a table and has the node note it; no user of its shard may be left.

        Arrays in it that are still in use keep what they show now. Once it returns, a worker that asks for a table gets
        another one, if no other worker has this one: the node hears of both on different connections, in any order. An
        interrupted call can be repeated.

        Args:
            number: the table's.
            may_ask: False: an answer of the node is being waited for already, and this one's is not.
        """
        shard = self.tables.get(number)
        if shard is not None:
            self._closing[number] = weakref.ref(shard.segment)
            shard.segment.cut()
            del self.tables[number], shard
        if number not in self._closing:
            return
        segment = self._closing[number]()
        if segment is not None:  # a thread in the middle of a call refers to it, or an array
            segment.detach()
            del segment
        self._tell_closed(number, f"table {number} to be closed", may_ask)
        self._closing.pop(number, None)  # a signal's handler may have closed it, too

    def close_memory(self, number: int, may_ask: bool = True) -> None:
        """Ends this worker's part in plain memory, as `close_table` does; arrays in it show nothing any more."""
        memory = self._memories.get(number)
        if memory is None:
            return
        for segment in self._mapped.get(number, []):
            segment.abandon()
        self._tell_closed(number, f"the shared memory {memory.name!r} to be closed", may_ask)
        self._memories.pop(number, None)  # until here a repeated call does it all again
        self._mapped.pop(number, None)

    def _tell_closed(self, number: int, what: str, may_ask: bool) -> None:
        request = Close(number)
        if may_ask:
            patience = Patience(self._session, self._session.start_deadline(), what, self._link)
            patience.ask(self._link, request)
        else:
            self._link.tell(request, aside=True)

    def leave(self) -> None:
        """Leaves all memory to the others; windows on it keep what they show now. May be called again."""
        for shard in list(self.tables.values()):
            shard.segment.cut()
        self.tables.clear()
        self._memories.clear()
        self._mapped.clear()
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: closes the descriptor."""
        if self._memory is not None:
            self._memory.close()
