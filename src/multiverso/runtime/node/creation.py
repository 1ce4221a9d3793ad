"""Creates tables, by order (collective) or by name (create or attach), has them initialised, and frees them.

Where reads wait for others (rounds, clocks) a table that has a name is made by order, too, or whoever opens it late
would be in fewer rounds, unseen. Its name attaches a worker that has it to it once more, and one in a dead one's place.

A creation goes through the steps of `hosts.control.table_steps`. This host *asks* once its workers have: by order,
every live one; by name the first is enough. It *makes* the memory when all hosts have asked, and lets its own of the
workers whose initial value counts write it, one after another, so that a sum has one order. On several hosts it then
*joins* the exchange between them, and *pushes* what was written. Everyone is answered when all hosts have done so and
the rest was taken.

A worker whose call is interrupted is as one that has not asked. By order the others then wait for it to ask
again, as they would have before; by name the next one's value counts. What had been written is cleared.

What all have closed goes in two steps, as no host may wait for the answer of one that has released it: when no worker
of any host has it, all are told to *part* with it (its name is free, and nothing waits for its values any more), and
when all have, to *free* it.

Who says what comes next? The coordinator; and this host itself of what nobody else has: plain memory, and everything of
a job on one.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from multiverso.errors import MultiversoError, NotInThisJobError, OutOfMemoryError, TableMismatchError
from multiverso.hosts.control import messages
from multiverso.hosts.control.messages import Begin, Done, Drop, Free, Make, Part, Unused, Used, Withdraw
from multiverso.hosts.control.table_steps import writers_of
from multiverso.layout import words as at
from multiverso.runtime.job.control import Control
from multiverso.runtime.node.catalogue import Catalogue, Key, Piece, Spec, words
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.exchange import Exchange
from multiverso.runtime.node.refusals import another, check_equal, differ, error_of, lost_error, nobody_has
from multiverso.spec.table import MemorySpec, TableSpec
from multiverso.wire.requests import Create, MemoryRequest


@dataclass(frozen=True)
class Asked:
    """A worker's request for a table or plain memory."""

    connection: Connection
    request: MemoryRequest
    spec: Spec
    mode: str

    @property
    def is_master(self) -> bool:
        """Whether this worker's initial value is the one that counts."""
        return isinstance(self.request, Create) and self.request.master


@dataclass
class Creation:
    """A table or plain memory that is being made. Owner: the node's thread.

    Attributes:
        waiting: the workers of this host that have asked, and what for.
        piece: the memory, once it is there.
        writers: the workers whose initial value counts, of all hosts, in the order of their turns.
        interrupted: by name, those of this host that were such: they may ask again.
        step: what is being done: ``"ask"`` (the other hosts), ``"write"``, or ``"join"`` (what follows between hosts);
            None: workers of this host still ask.
        turns: the workers that still have to write; None before the first has been let in.
        turn_of: the worker that writes now.
        written: whether a worker has written, so that the next first one has to clear the memory.
    """

    key: Key
    waiting: dict[int, Asked] = field(default_factory=dict)
    piece: Piece | None = None
    writers: list[int] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    step: str | None = None
    turns: deque[int] | None = None
    turn_of: int | None = None
    written: bool = False

    @property
    def by_order(self) -> bool:
        """Whether all workers have to ask."""
        return self.key[0] == "order"


_NOTHING_TO_MOVE = Exchange()


@dataclass(eq=False)
class Creations:
    """Everything of a job that is being made on this host. Owner: the node's thread.

    Attributes:
        catalogue: what has been made.
        control: the job's control segment.
        fixed: whether the number of workers is fixed, so that creation by order can be collective.
        exchange: the way to the other hosts.
    """

    catalogue: Catalogue
    control: Control
    fixed: bool
    exchange: Exchange = _NOTHING_TO_MOVE
    _creations: dict[Key, Creation] = field(default_factory=dict)
    _doomed: dict[int, Piece] = field(default_factory=dict)  # by the worker that still writes it
    # what no worker here has any more, and requests for it that have come since
    _unused: dict[int, list[Asked]] = field(default_factory=dict)
    _parting: dict[int, Piece] = field(default_factory=dict)
    # the last numbers that were given: of tables, and of plain memory below 0
    _tables: int = 0
    _memories: int = 0

    def ask(self, asked: Asked) -> None:
        """A worker asks for a table or plain memory; it is answered when everybody whom that concerns has asked.

        Raises:
            TableMismatchError: it exists already, and is another.
        """
        key = self._key_of(asked)
        worker_id = asked.connection.attached_id
        creation = self._creations.get(key)
        piece = None if creation is not None else self.catalogue.find(key)
        if piece is not None and piece.number in self._unused:
            # the others may be about to free it: it is handed out when the coordinator says so
            self._forget_late(asked.connection)  # its first call was interrupted, and did not say so
            late = self._unused[piece.number]
            late.append(asked)
            if len(late) == 1:
                self._report(Used(key, piece.number))
            return
        asked.connection.enrolled_in = None
        self._writes_no_more(worker_id)
        if piece is not None:
            check_equal(piece, asked.spec)
            self._hand_over(asked, piece, late=True)
            asked.connection.reply(asked.request.id, {"turn": False})
            return
        if creation is None and self.catalogue.is_over(key):
            raise TableMismatchError(
                f"{words(key)} was closed by all workers that had it, before this one asked for it: let all of "
                "them come, barrier(), before the first one closes it, or give it a name"
            )
        if creation is not None and worker_id in creation.waiting:
            self._void(creation, worker_id)  # its first call was interrupted, and did not say so
        creation = self._creations.setdefault(key, Creation(key))  # again where it came to nothing
        if creation.piece is not None and not creation.by_order:
            check_equal(creation.piece, asked.spec)
        creation.waiting[worker_id] = asked
        if creation.piece is not None:
            self._hand_over(asked, creation.piece)
        self._proceed(creation)

    def _key_of(self, asked: Asked) -> Key:
        """Returns what a worker asks for: by its name, or by its place in the order.

        One in a dead one's place need not have gone through the order from its beginning: by name it gets the table
        that is there, or that others ask for, or the next one.
        """
        name = asked.spec.name
        if not isinstance(asked.request, Create):
            return "memory", str(name)
        order, worker_id = asked.request.order, asked.connection.attached_id
        if order is None:
            return "name", str(name)
        made = None if name is None else self.catalogue.find(("name", name))
        is_new = self.control.worker(worker_id).incarnation > 0
        if made is not None and (is_new or worker_id in made.holders):
            return made.key
        if name is not None and is_new:
            begun = (
                one.key for one in self._creations.values() if any(a.spec.name == name for a in one.waiting.values())
            )
            return next(begun, ("order", max(order, self.catalogue.ordered + 1)))
        return "order", order

    def initialised(self, worker_id: int) -> None:
        """A worker has written its initial value."""
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if creation.turn_of == worker_id:
                creation.turn_of = None
                self._proceed(creation)
                return

    # -- who says what comes next ------------------------------------------------------------------------------

    def _is_ours(self, key: Key) -> bool:
        """Whether no other host has it, so that this one decides."""
        return key[0] == "memory" or not self.exchange.several

    def _move(self, step: str, piece: Piece, then: Callable[[], None]) -> None:
        (_NOTHING_TO_MOVE if self._is_ours(piece.key) else self.exchange).move(step, piece, then)

    def _report(self, report: messages.Create | Withdraw | Done | Unused | Used | Part) -> None:
        """Says what has been done; what comes next follows, at once where this host decides."""
        key = report.key
        if not self._is_ours(key):
            self.exchange.report(report)
            return
        match report:
            case messages.Create():
                number = self._memories - 1 if key[0] == "memory" else self._tables + 1
                writers = writers_of(key, report.spec, report.workers, report.masters)
                self.obey(Make(key, number, report.spec, report.mode, writers))
            case Done(error=None):
                self.obey(Begin(key, "finish"))
            case Done(error=(kind, message)):
                self.obey(Drop(key, (kind, message)))
            case Unused(closing=True):
                self.obey(Part(key, report.number))
            case Used():
                self.obey(report)
            case Part():
                self.obey(Free(key, report.number))

    def obey(self, order: messages.TableOrder) -> None:
        """Does what the coordinator says of a table."""
        key = order.key
        if isinstance(order, Used | Part | Free):
            self._end_or_keep(order)
            return
        creation = self._creations.get(key)
        if isinstance(order, Make):
            self._make(creation or self._creations.setdefault(key, Creation(key)), order)
        elif creation is None:
            return  # it was refused here, as a worker is lost
        elif isinstance(order, Drop):
            self._refuse(creation, error_of(order))
        elif creation.piece is not None:
            step = order.step
            then = (lambda: self._finish(key)) if step == "finish" else (lambda: self._report(Done(key, step)))
            self._move(step, creation.piece, then)

    # -- the steps -------------------------------------------------------------------------------------------

    def _proceed(self, creation: Creation) -> None:
        """Does what can be done now."""
        if creation.turn_of is not None or creation.step not in (None, "write"):
            return  # no other may write meanwhile, nor clear what it writes
        if not creation.waiting and (creation.step is None or self._is_ours(creation.key)):
            self._forget(creation)
        elif creation.by_order and not self._is_complete(creation):
            return
        elif creation.step is None:
            self._ask(creation)
        else:
            self._next_turn(creation)

    def _ask(self, creation: Creation) -> None:
        """Asks the other hosts, once all workers of this one that have to ask have asked."""
        creation.step = "ask"
        waiting = sorted(creation.waiting)
        first = creation.waiting[waiting[0]]
        spec = first.spec
        is_mean = isinstance(spec, TableSpec) and spec.initial == "mean" and spec.dtype.startswith("int")
        if is_mean and self.exchange.several:
            refusal = (
                f"{words(creation.key)}: initial='mean' of whole numbers works on one host only yet, as each host "
                "would round its own part: use 'sum' or 'master', or a float table"
            )
            self._refuse(creation, NotInThisJobError(refusal))
            return
        masters = [i for i in waiting if creation.waiting[i].is_master]
        self._report(messages.Create(creation.key, spec.as_message(), first.mode, waiting, masters))

    def _make(self, creation: Creation, order: Make) -> None:
        """Makes the memory, and answers those that have asked."""
        creation.writers = list(order.writers)
        kind = MemorySpec if creation.key[0] == "memory" else TableSpec
        try:
            creation.piece = piece = self.catalogue.make(
                creation.key, kind.from_message(order.spec), order.mode, order.number
            )
        except (MultiversoError, OSError) as error:
            # one table that cannot be made must not end the job
            why = error if isinstance(error, MultiversoError) else OutOfMemoryError(f"no memory: {error}")
            self._report_made(creation, why)
            return
        self._tables, self._memories = max(self._tables, piece.number), min(self._memories, piece.number)
        if piece.shard is not None and piece.shard.consistency.reads_wait:
            for worker in order.workers:  # no round or clock may advance without one that another host reports later
                if worker not in self.control.local:
                    piece.shard.enrol(worker)
        for worker_id, asked in list(creation.waiting.items()):
            try:
                check_equal(piece, asked.spec)  # by name, another host's worker may have been first
            except TableMismatchError as error:
                asked.connection.refuse(asked.request.id, error)
                del creation.waiting[worker_id]
                continue
            self._hand_over(asked, piece)
        creation.step = "write"
        self._proceed(creation)

    def _next_turn(self, creation: Creation) -> None:
        """Lets the next of this host's writers write."""
        first = creation.turns is None
        if creation.turns is None:
            here = [i for i in creation.writers if i in creation.waiting]
            if not here and (creation.written or all(i in self.control.local for i in creation.writers)):
                here = sorted(creation.waiting)[:1]  # those were interrupted, or are gone: the next one's value counts
                if not here and any(map(self.control.is_live, creation.interrupted)):
                    return  # other hosts' workers wait for it, too
                if not here:
                    writers = {*creation.writers, *creation.interrupted}
                    gone = sorted(i for i in writers if i in self.control.local and not self.control.is_live(i))
                    when = f"before the initial value of {words(creation.key)} was written; call again"
                    self._report_made(creation, lost_error(gone, when))
                    return
            creation.turns = deque(here)
        if not creation.turns:
            self._report_made(creation)
            return
        creation.turn_of = creation.turns.popleft()
        # the first one on a host clears what an interrupted one has written there
        clear, last = first and creation.written, not creation.turns
        creation.written = True
        asked = creation.waiting[creation.turn_of]
        count = sum(i in creation.waiting or i not in self.control.local for i in creation.writers)
        asked.connection.reply(asked.request.id, {"turn": True, "clear": clear, "of": max(1, count), "last": last})

    def _report_made(self, creation: Creation, error: MultiversoError | None = None) -> None:
        """Reports that it is made and written, or cannot be."""
        creation.step, failed = "join", None
        if error is not None:
            where = "" if self._is_ours(creation.key) else f"{self.exchange.name}: "
            failed = type(error).__name__, f"{where}{error}"
        self._report(Done(creation.key, "make", failed))

    def _finish(self, key: Key) -> None:
        """Answers the workers: it is ready."""
        creation = self._creations.pop(key, None)
        if creation is None:
            return
        for asked in creation.waiting.values():
            if creation.by_order:  # from here on the others wait for it, also when it is interrupted
                asked.connection.enrolled_in = None
            asked.connection.reply(asked.request.id, {"turn": False})
        if creation.piece is not None:
            self.note_unused(creation.piece)

    def _is_complete(self, creation: Creation) -> bool:
        """By order: whether every live worker has asked for the same; refuses when that cannot come to be."""
        if self.fixed and (lost := self.control.missed()):
            self._refuse(creation, lost_error(lost, f"before {words(creation.key)} was created"))
            return False
        concerned = [i for i in self.control.live() if i in self.control.local]
        if any(i not in creation.waiting for i in concerned):
            return False
        if len({asked.spec for asked in creation.waiting.values()}) > 1:
            each = "; ".join(f"worker {i}: {asked.spec}" for i, asked in sorted(creation.waiting.items()))
            self._refuse(creation, differ(creation.key, "workers", each))
            return False
        return True

    def _hand_over(self, asked: Asked, piece: Piece, late: bool = False) -> None:
        """Tells a worker where a piece is.

        The worker takes part from here on, before anyone continues: a round or a clock must not go ahead without
        one that has created the table with the others, but is slow to read this. A late one enrols itself once
        it has mapped the memory, which can take long: the others need not wait for that.
        """
        worker_id = asked.connection.attached_id
        enrol = self.catalogue.hold(piece, worker_id)
        shard = piece.shard
        if enrol:
            asked.connection.enrolled_in = piece.number
        if shard is not None and enrol and not late:
            shard.enrol(worker_id)
        where = {"number": piece.number, "offset": piece.offset, "size": piece.size}
        order = int(piece.key[1]) if piece.key[0] == "order" else 0
        asked.connection.reply(
            asked.request.id, {**where, "mode": shard.mode if shard else 0, "order": order, "enrol": enrol and late}
        )

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self, number: int, worker_id: int) -> None:
        """A worker has unmapped a piece for good. It may say so twice, when it was interrupted the first time."""
        piece = self.catalogue.piece(number)
        if piece is not None and worker_id in piece.holders:
            piece.closing = True
            self.catalogue.withdraw(piece, worker_id)
            self.note_unused(piece)

    def note_unused(self, piece: Piece) -> None:
        """A piece is ready, or a worker of this host has it no longer: reports whether none has it any more."""
        if not piece.holders and piece.key not in self._creations and piece.number not in self._unused:
            self._unused[piece.number] = []
            self._report(Unused(piece.key, piece.number, piece.closing))

    def _end_or_keep(self, order: Used | Part | Free) -> None:
        key, number = order.key, order.number
        if isinstance(order, Free):
            parted = self._parting.pop(number, None)  # none where this host came after all had parted with it
            if parted is not None:
                self._move("free", parted, functools.partial(self.catalogue.release, parted))
            return
        kept = self.catalogue.piece(number)
        is_used, shard = isinstance(order, Used), kept.shard if kept is not None else None
        if is_used and self.exchange.several and shard is not None and shard.consistency.in_rounds:
            self.exchange.refill(number, lambda here: self._enter_rounds(number, here))
            return
        late = self._unused.pop(number, [])
        if not is_used and kept is not None:
            self.catalogue.remove(kept)
            self._parting[number] = kept
            self._move("part", kept, lambda: self._report(Part(key, number)))
        for asked in late:
            if asked.connection.worker_id is None:
                continue  # it is gone
            try:
                self.ask(asked)
            except MultiversoError as error:
                asked.connection.refuse(asked.request.id, error)
        if is_used and kept is not None:
            self.note_unused(kept)

    def _enter_rounds(self, number: int, here: bool) -> None:
        """A synchronous table that no worker of this host had: its rounds wait, and those who ask for it join them."""
        late, kept = self._unused.pop(number, []), self.catalogue.piece(number)
        for asked in late:
            connection, request = asked.connection, asked.request
            if connection.worker_id is None or kept is None:
                continue  # it is gone
            if not here:
                connection.refuse(request.id, nobody_has(kept.key))
            elif kept.spec != asked.spec:
                connection.refuse(request.id, another(kept, asked.spec))
            else:
                # with an updater the values after a round are made by workers: there has to be one for the next
                self._hand_over(asked, kept, late=kept.shard is None or kept.shard.spec.updater == "add")
                connection.reply(request.id, {"turn": False})
        if kept is not None:
            self.note_unused(kept)

    def _forget_late(self, connection: Connection) -> None:
        for late in self._unused.values():
            late[:] = [asked for asked in late if asked.connection is not connection]

    # -- what goes wrong --------------------------------------------------------------------------------------

    def cancel(self, connection: Connection, why: str | None) -> None:
        """A worker no longer waits; its number in the order stays free for its next call.

        Args:
            connection: the worker's.
            why: it has no room for the table: then no worker gets a table by order.
        """
        worker_id = connection.attached_id
        self._forget_late(connection)
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if worker_id not in creation.waiting:
                continue
            self._void(creation, worker_id)
            if why is not None and creation.by_order and creation.key in self._creations:
                error = OutOfMemoryError(f"worker {worker_id} has no room for {words(creation.key)}: {why}")
                self._refuse(creation, error)
            return
        piece = self.catalogue.piece(connection.enrolled_in)
        if piece is not None:
            self.catalogue.withdraw(piece, worker_id)
            self.note_unused(piece)  # the others may have closed it meanwhile

    def _void(self, creation: Creation, worker_id: int) -> None:
        """Continues as if a worker had not asked."""
        del creation.waiting[worker_id]
        if creation.step == "ask":
            creation.step = None
            self._report(Withdraw(creation.key))
        if creation.piece is not None:
            self.catalogue.withdraw(creation.piece, worker_id)
            if creation.by_order or worker_id in creation.writers or creation.turn_of == worker_id:
                creation.turns = None
            if not creation.by_order and worker_id in creation.writers:
                creation.writers.remove(worker_id)
                creation.interrupted.append(worker_id)
        if creation.turn_of == worker_id:
            creation.turn_of = None
        self._proceed(creation)

    def dropped(self, worker_id: int) -> None:
        """A worker has left or is lost: creations that waited for it continue or fail, what others closed is freed."""
        lost = self.control.missed()
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if lost:
                creation.waiting.pop(worker_id, None)
                if creation.turn_of == worker_id:
                    creation.turn_of = None
                self._refuse(creation, lost_error(lost, f"while {words(creation.key)} was being created"))
            elif worker_id in creation.waiting:
                self._void(creation, worker_id)
            else:
                self._proceed(creation)  # it may be the one that the others waited for
        for piece in self.catalogue.dropped(worker_id):
            self.note_unused(piece)

    def _refuse(self, creation: Creation, error: MultiversoError) -> None:
        for asked in creation.waiting.values():
            asked.connection.enrolled_in = None
            asked.connection.refuse(asked.request.id, error)
        self._forget(creation)

    def _forget(self, creation: Creation) -> None:
        """Ends a creation that came to nothing; its memory is free once no worker writes in it."""
        self._creations.pop(creation.key, None)
        piece, creation.piece, creation.turns = creation.piece, None, None
        if piece is not None:
            writes = creation.turn_of
            self._tables -= piece.number == self._tables
            self.catalogue.unlist(piece)
            self._move("free", piece, lambda: self._free(piece, writes))

    def _free(self, piece: Piece, writes: int | None) -> None:
        if writes is not None and self.control.liveness(writes) == at.ALIVE:
            self._doomed[writes] = piece
        else:
            self.catalogue.release(piece)

    def _writes_no_more(self, worker_id: int) -> None:
        piece = self._doomed.pop(worker_id, None)
        if piece is not None:
            self.catalogue.release(piece)
