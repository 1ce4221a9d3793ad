"""The node's part in tables whose rows live on one host each: `hosts.spread` decides, this connects it.

Workers of this host ask at their desks (``layout/desk.py``), other nodes by messages; whichever thread brings a
question or an answer does what it asks for. A thread listens for workers' questions. It also looks which copies workers
have added to, and which go: now and then while they add, and woken by them when they begin to.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.compiling.on_demand import compile_update
from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, NotInThisJobError, StartupError, WaitTimeoutError
from multiverso.hosts.control.messages import Filled, Returned, Returns
from multiverso.hosts.peer.frames import Body
from multiverso.hosts.peer.messages import Messages
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import NO_BYTES, Frame, head_of
from multiverso.hosts.spread.places import Homes
from multiverso.hosts.spread.table import SpreadTable
from multiverso.hosts.transport.handshake import ROWS
from multiverso.layout import desk
from multiverso.layout.keyed import GROUPS
from multiverso.layout.words import MAX_WORKERS
from multiverso.memory.segment import Segment
from multiverso.memory.words import bump_and_wake, load32, load64, store32, store64, wait_for_change
from multiverso.node_log import log
from multiverso.runtime.several_hosts.this_host import ThisHost
from multiverso.shards.keyed_rows import KeyedRows, Keys
from multiverso.updaters import BY_NAME
from multiverso.updaters.cached import copy_loops
from multiverso.wire.requests import Spread

_SOON_SECONDS = 0.002  # between looks while there is something
_RETRY_SECONDS, _AGE_SECONDS, _LATER_SECONDS = 0.02, 0.1, 0.5  # while a home refuses, while copies grow old, at rest
_BUSY_SECONDS = 0.2  # so long after the last change it looks soon
_ALWAYS_SECONDS = 0.5  # between looks also where no add has ended
_SETTLE_SECONDS, _SETTLE_AT_LATEST_SECONDS = 0.001, 0.05


@dataclass(eq=False)
class _Open:
    """A table that this host's workers have made, and their desks."""

    table: SpreadTable
    desks: Segment
    asked: npt.NDArray[np.int64]  # the words ASKED of all lanes themselves
    seen: npt.NDArray[np.int64]  # as they were when their questions were taken
    shown: tuple[int, int] = (desk.DONE_WELL, 0)  # of its trouble
    reported: set[tuple[int, int]] = field(default_factory=set)  # hosts that may return, and in which view


class SpreadTables:
    """Any thread may call it. Owner: `OtherHosts`."""

    def __init__(self, here: ThisHost) -> None:
        self._here, self._roster = here, here.roster
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._messages = Messages(here.fabric.peers, self._arrived, ROWS)
        self._tables: dict[int, _Open] = {}  # by number
        self._opened: set[int] = set()  # numbers of their desks
        self._early: dict[int, list[tuple[int, bytes]]] = {}  # questions about tables that are not here yet
        self._later: list[tuple[int, bytes]] = []  # what is early, see `SpreadTable.is_early`
        self._nobody_comes = False  # who would make them
        self._lost: set[int] = set()
        self._ended: set[int] = set()  # of those: what still comes is of a node that was started in their place
        self._gone: set[int] = set()  # that were ever lost
        self._losses = 0
        self._returns: dict[int, Returns] = {}  # by table: which of those are homes again
        self._bell: Segment | None = None  # once there is a table

    def ring(self) -> None:
        """Has workers' questions and tables looked at, or the thread that does so end."""
        if self._bell is not None:
            store32(self._bell.address + desk.RESTS, 0)
            bump_and_wake(self._bell.address + desk.RUNG)

    # -- what this host's workers ask ------------------------------------------------------------------------

    def open(self, request: Spread) -> None:
        """A worker of this host has a table.

        Raises:
            NotInThisJobError: this host has taken a lost one's place, whose rows nobody has.
            StartupError: it has no such memory, or names an updater that there is none of.
        """
        if self._roster.times_replaced and request.kept is None:
            raise NotInThisJobError(
                f"{self._here.name} was started again in place of one that was lost, and with it "
                "the rows of keyed tables that lived there: load what was saved last in a new job (--max-restarts), or "
                "give tables copies=2"
            )
        with self._lock:
            if request.desks in self._opened:
                return
            self._messages.open()
            made = self._open(request)
            number = made.table.number
            self._tables[number] = made
            self._opened.add(request.desks)
            if self._bell is None:
                self._bell = bell = self._memory(request.bell)
                self._here.thread("desks", lambda: self._serve(bell.address))
            self._receive_kept(self._early.pop(number, []))
        self.ring()  # what was asked before is seen now

    def _receive_kept(self, kept: list[tuple[int, bytes]]) -> None:
        for host, message in kept:
            if (answer := self._take_in(host, message)) is not None:
                self._messages.send(host, *answer.parts())

    def _open(self, request: Spread) -> _Open:
        desks = self._memory(request.desks)
        words = desks.array(0, desk.BYTES, np.uint8)[desk.lane_at(0, 0) + desk.ASKED :]
        asked: npt.NDArray[np.int64] = np.ndarray(
            (MAX_WORKERS * desk.LANES,), np.int64, words.data, 0, (desk.LANE_BYTES,)
        )
        return _Open(self._table(request, desks), desks, asked, np.zeros_like(asked))

    def _table(self, request: Spread, desks: Segment) -> SpreadTable:
        name, dtype = request.spec.get("updater"), request.spec.get("dtype")
        if name not in BY_NAME:
            raise StartupError(f"a table whose rows live on several hosts has one of our updaters, not {name!r}")
        dtype = str(dtype)
        own = self._rows(request.rows)
        loops = copy_loops(name)
        take, land = (compile_update(loop, dtype) for loop in (loops.take, loops.land))
        copies = self._rows(request.copies)
        homes, here = desks.array(desk.HOMES, GROUPS, np.int16), desks.array(desk.HERE, GROUPS, np.int64)

        def show(new: Homes) -> None:
            homes[:] = new
            here[:] = new == self._roster.host
            store64(desks.address + desk.VIEW, load64(desks.address + desk.VIEW) + 1)
            self._here.control.notify()

        number = _hash(request.called.encode())
        returns = self._returns.get(number, Returns())
        apart = self._gone if request.kept is None else self._gone - set(returns.hosts)
        return SpreadTable(
            number,
            _hash(msgspec.json.encode(request.spec, order="deterministic")) >> 1,
            self._roster.host,
            self._roster.hosts,
            own,
            Copies(copies, take, land, request.most_copies, request.seconds),
            compile_update(BY_NAME[name]().apply, dtype),
            int(request.spec["admission"]),
            self._messages.send,
            show,
            None if request.kept is None else self._rows(request.kept),
            apart,
            apart if request.kept is None else apart & self._lost,
            self._losses + returns.times,
        )

    def _rows(self, number: int) -> KeyedRows:
        return KeyedRows(self._memory(number), self._here.control.address, self._here.closing.is_set)

    def _memory(self, number: int) -> Segment:
        """Returns memory of this host's workers, which is not freed from now on: other hosts may ask for rows."""
        memory = self._here.catalogue.keep(number)
        if memory is None:
            raise StartupError(f"there is no shared memory number {number}")
        return memory

    def _serve(self, bell: int) -> None:
        busy_until = always_at = look_at = 0.0
        rests = False
        while not self._here.closing.is_set():
            rung, now = load32(bell + desk.RUNG), time.monotonic()
            self._take_questions()
            if now >= look_at or (rests and not load32(bell + desk.RESTS)):
                rests = now >= busy_until
                store32(bell + desk.RESTS, int(rests))  # who adds after this rings, and what was added before is seen
                always = rests or now >= always_at
                always_at = now + _ALWAYS_SECONDS if always else always_at
                pause = self._look(always)
                if pause == _SOON_SECONDS:
                    busy_until, rests = now + _BUSY_SECONDS, False
                look_at = now + (pause if rests else _SOON_SECONDS)
            wait_for_change(bell + desk.RUNG, rung, max(0.0, look_at - time.monotonic()))

    def _look(self, always: bool) -> float:
        """Looks what workers have added to; returns the seconds until it is to look again, if nobody rings."""
        with self._lock:
            pause = min((self._look_at(found, always) for found in self._tables.values()), default=_LATER_SECONDS)
            try:
                self._receive_later()
            except MultiversoError as error:
                self._log(error)
        return pause

    def _log(self, error: MultiversoError) -> None:
        if not self._here.closing.is_set():
            log(f"rows at other hosts: {error}")

    def _look_at(self, found: _Open, always: bool) -> float:
        table = found.table
        try:
            is_busy = table.look(always)
        except MultiversoError as error:
            self._log(error)
            return _LATER_SECONDS
        self._report_filled(found)
        self._show_trouble(found)
        if is_busy:
            return _SOON_SECONDS
        if table.asks:
            return _RETRY_SECONDS
        return _AGE_SECONDS if table.copies.there else _LATER_SECONDS

    def _report_filled(self, found: _Open) -> None:
        """Reports which hosts may return as far as this one knows, once in each view."""
        table = found.table
        for host in table.filled:
            if (said := (host, table.places.view)) not in found.reported:
                found.reported.add(said)
                self._here.tell(Filled(table.number, *said))

    def _take_questions(self) -> None:
        with self._lock:
            for found in self._tables.values():
                asked = found.asked.copy()
                lanes = np.flatnonzero(asked != found.seen).tolist()
                found.seen = asked
                for lane in lanes:
                    self._take(found, lane)

    def _take(self, found: _Open, number: int) -> None:
        """Takes a question from a lane."""
        lane = desk.lane_at(*divmod(number, desk.LANES))
        begins, lane = lane + desk.LANE.size, lane + found.desks.address
        try:
            self._ask(found, lane, begins)
        except MultiversoError as error:
            log(f"a question about rows was refused: {error}")
            self._answer(lane, load64(lane + desk.ASKED), desk.REFUSED, self._roster.host)

    def _answer(self, lane: int, asked: int, code: int, result: int) -> None:
        store64(lane + desk.CODE, code)
        store64(lane + desk.RESULT, result)
        store64(lane + desk.DONE, asked)
        self._here.control.notify()

    def _ask(self, found: _Open, lane: int, begins: int) -> None:
        """Asks what stands in a lane.

        Raises:
            StartupError: that is no question.
        """
        kind, count, argument = (load64(lane + word) for word in (desk.WHAT, desk.COUNT, desk.ARGUMENT))
        each = 8 + (found.table.own.whole if kind in (desk.READ, desk.OVERWRITE) else 0)
        if not (desk.FETCH <= kind <= desk.OVERWRITE and 0 <= count * each <= desk.ROOM):
            raise StartupError("that is no question about rows")
        keys = found.desks.array(begins, count, np.int64)
        rows, host = NO_BYTES, None
        if kind == desk.OVERWRITE:
            rows = found.desks.array(begins + 8 * count, count * (each - 8), np.uint8).reshape(count, -1).copy()
        if kind in (desk.LIST, desk.READ):
            host, argument = divmod(argument, 1 << 48)
            if not 0 <= host < self._roster.hosts or host == self._roster.host:
                raise StartupError("there is no such other host")
        asked = load64(lane + desk.ASKED)

        def done(code: int, result: int, answer: Frame | None) -> None:
            if kind in (desk.LIST, desk.READ) and answer is not None:
                data = np.concatenate([part.reshape(-1).view(np.uint8) for part in (answer.keys, answer.rows)])
                found.desks.array(begins, min(data.size, desk.ROOM), np.uint8)[:] = data[: desk.ROOM]
                store64(lane + desk.FOUND, answer.keys.size)
            self._answer(lane, asked, code, result)

        def took(answer: Frame, places: Keys) -> None:
            keys[places] = answer.keys  # flags

        flags = kind in (desk.REMOVE, desk.CONTAINS)
        found.table.ask(kind, keys.copy(), done, took if flags else None, rows, argument, host)

    # -- messages of other nodes -----------------------------------------------------------------------------

    def _arrived(self, host: int, message: memoryview) -> None:
        with self._lock:
            answer = None if self._here.closing.is_set() else self._take_in(host, message)
        if answer is not None:  # not under the lock, which others wait for
            self._messages.send(host, *answer.parts())
        self._messages.free(message)

    def _take_in(self, host: int, message: Body) -> Frame | None:
        """Returns the answer to a message, unless that is none, or has to wait."""
        head = head_of(message)
        if host in self._lost:
            if host in self._ended:
                self._later.append((host, bytes(message)))
        elif head.table in self._tables or not head.is_question:
            return self._receive(host, message)
        elif self._nobody_comes:
            return head.refusal(desk.NO_TABLE)
        else:
            self._early.setdefault(head.table, []).append((host, bytes(message)))
        return None

    def _receive(self, host: int, message: Body) -> Frame | None:
        """Takes in an answer; returns that to a question."""
        found = self._tables.get(head_of(message).table)
        if found is None:
            return None
        table = found.table
        frame = Frame.of(memoryview(message), table.own.size)
        if table.is_early(frame):
            self._later.append((host, bytes(message)))
            return None
        if frame.is_question:
            return table.serve(host, frame)
        table.answered(host, frame)
        self._show_trouble(found)
        self._answered.notify_all()
        return None

    def lost(self, host: int) -> None:
        """A host is lost, and the rows that live there."""
        with self._lock:
            self._lost.add(host)
            self._gone.add(host)
            self._losses += 1
            for number, early in self._early.items():
                self._early[number] = [message for message in early if message[0] != host]
            for returns in self._returns.values():
                returns.hosts = [other for other in returns.hosts if other != host]
            for found in self._tables.values():
                found.table.lost(host)
                self._show_trouble(found)
            self._receive_later()
        self.ring()
        self._messages.end(host)  # not under the lock, which its thread may wait for
        with self._lock:
            self._ended.add(host)
        self._messages.renew(host)

    def joined(self, host: int) -> None:
        """A lost host was started again."""
        with self._lock:
            self._lost.discard(host)
            self._ended.discard(host)
            for found in self._tables.values():
                found.table.joined(host)
            self._receive_later()
        self.ring()

    def returned(self, order: Returned) -> None:
        """A host that was started again is a home of a table's rows again."""
        with self._lock:
            returns = self._returns.setdefault(order.table, Returns())
            returns.times += 1
            returns.hosts.append(order.host)
            if (found := self._tables.get(order.table)) is not None:
                found.table.returned(order.host)
                self._receive_later()
        self.ring()

    def begin_at(self, survivors: Sequence[Sequence[int]], lost: Iterable[int], returns: Mapping[int, Returns]) -> None:
        """In a host that was started again.

        Args:
            survivors: who was left after each loss so far.
            lost: hosts that are lost now.
            returns: which hosts are homes again, by table.
        """
        with self._lock:
            self._returns = dict(returns)
            self._losses = len(survivors)
            self._gone = {host for host in range(self._roster.hosts) if not all(host in left for left in survivors)}
            self._lost, self._ended = set(lost), set(lost)

    def _receive_later(self) -> None:
        later, self._later = self._later, []
        if not later:
            return
        try:
            while later:
                self._receive_kept([later.pop(0)])
        finally:
            self._later[:0] = later
        self._answered.notify_all()

    def used_elsewhere(self) -> None:
        """Another host has such a table: it has to reach this one, where perhaps nobody makes it."""
        self._messages.open()

    def nobody_comes(self) -> None:
        """No worker of this host is left: others that ask for rows of a table that none of them has made hear so."""
        with self._lock:
            self._nobody_comes = True
            early = [question for questions in self._early.values() for question in questions]
            self._early.clear()
        for host, message in early:
            self._messages.send(host, *head_of(message).refusal(desk.NO_TABLE).parts())

    def _show_trouble(self, found: _Open) -> None:
        code, host = found.table.trouble
        if (code, host) != found.shown:
            found.shown = code, host
            if code != desk.DONE_WELL:  # else who has just read the code reads the host that it was about
                store64(found.desks.address + desk.TROUBLE_HOST, host)
            store64(found.desks.address + desk.TROUBLE, code)
            if code != desk.DONE_WELL:
                log(f"{self._roster.names[host]} does not take what is added to rows that live there: it is kept here")

    # -- all that there is -----------------------------------------------------------------------------------

    def settle(self, deadline: Deadline) -> None:
        """Waits until the homes have all that this host's workers have added to copies so far.

        Raises:
            WaitTimeoutError: they have not in time.
        """
        self._until(deadline, lambda table, first: not table.look(first, True), "give rows to their homes")

    def drop(self, deadline: Deadline) -> None:
        """Waits until this host has no copies any more, so that whatever is read next is what the homes have then.

        Raises:
            WaitTimeoutError: a worker is in the middle of a change for too long.
        """
        self._until(deadline, lambda table, _: table.leave_all(), "renew its copies of rows")

    def _until(self, deadline: Deadline, is_so: Callable[[SpreadTable, bool], bool], what: str) -> None:
        pause, first = _SETTLE_SECONDS, True
        with self._lock:
            while sum(is_so(found.table, first) for found in self._tables.values()) < len(self._tables):
                if self._here.closing.is_set():
                    raise MultiversoError("the node is closing")
                if deadline.passed:
                    raise WaitTimeoutError(f"{self._here.name} could not {what} within {deadline}")
                self._answered.wait(pause)
                # longer and longer: of many hosts on one machine each would else keep the others from answering
                pause, first = min(2 * pause, _SETTLE_AT_LATEST_SECONDS), False


def _hash(of: bytes) -> int:
    return int.from_bytes(hashlib.sha256(of).digest()[:8], "little")
