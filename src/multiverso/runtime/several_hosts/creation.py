"""How tables come to be in a job on several hosts: each host gathers its own workers, the coordinator decides.

To the states of `creation` come the steps of `hosts.control.table_steps`: this host *asks* once its workers have,
*makes* the table when all hosts have asked and lets its own of the workers whose initial value counts write, *joins*
the exchange between hosts, *pushes* what they wrote, and lets everyone go when all hosts have pushed and the rest was
taken. Plain memory is each host's own, as before.

A table that all have closed goes in two steps, as no host may wait for the answer of one that has released it: when no
worker of any host has it, all are told to *part* with it (its name is free, and nothing waits for its values any more),
and when all have, to *free* it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from multiverso import errors
from multiverso.errors import MultiversoError, NotInThisJobError
from multiverso.hosts.control.messages import (
    Create,
    Done,
    Drop,
    Free,
    Make,
    Part,
    Parted,
    Report,
    Step,
    TableOrder,
    Unused,
    Used,
    Welcome,
    Withdraw,
)
from multiverso.layout import words as at
from multiverso.runtime.node.catalogue import Key, Piece, words
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.creation import Asked, Creation, Creations, differs
from multiverso.spec.table import TableSpec

if TYPE_CHECKING:
    from multiverso.runtime.several_hosts.exchanged_tables import ExchangedTables
    from multiverso.runtime.several_hosts.this_host import ThisHost


class HostCreations(Creations):
    """Everything that is being made, on this host of several. Owner: the node's thread.

    Args:
        here: this host.
        copies: the way to the others.
        report: reports to the coordinator, after what this host's workers have done so far.
    """

    def __init__(self, here: ThisHost, copies: ExchangedTables, report: Callable[[Report], None]) -> None:
        super().__init__(here.catalogue, here.control, fixed=True, local=here.roster.local)
        self._here, self._copies, self._report = here, copies, report
        self._writers_of: dict[Key, list[int]] = {}  # whose initial value counts
        # tables that no worker here has any more, and requests for them that have come since
        self._unused: dict[int, list[Asked]] = {}
        self._parting: dict[int, Piece] = {}
        here.catalogue.unused = self._tell_unused

    def obey(self, order: TableOrder) -> None:
        """Does what the coordinator says of a table."""
        key = order.key
        if isinstance(order, Used | Part | Free):
            self._end_or_keep(order)
            return
        creation = self._creations.get(key)
        if isinstance(order, Make):
            self._writers_of[key] = order.writers
            creation = creation or self._creations.setdefault(key, Creation(key))
            self._make(creation, TableSpec.from_message(order.spec), order.mode, order.number, order.workers)
        elif creation is None:
            return  # it was refused here, as a worker is lost
        elif isinstance(order, Drop):
            self._refuse(creation, self._error_of(order))
        elif creation.piece is not None:
            number = creation.piece.number
            if order.step == "join":
                shard = self._catalogue.whole(creation.piece)
                self._copies.attach(number, shard, lambda: self._done_between(key, "join"))
            elif order.step == "push":
                self._copies.push(number, lambda: self._done_between(key, "push"))
            else:
                self._copies.take(number, lambda: self._finish(key))

    def _error_of(self, order: Drop) -> MultiversoError:
        kind, message = order.error
        if order.specs:
            each = "; ".join(f"{host}: {TableSpec.from_message(spec)}" for host, spec in order.specs.items())
            message = (
                f"{words(order.key)} differs between hosts ({each}). All workers must create the same tables in the "
                "same order; nothing was created, and the call can be repeated"
            )
        error: MultiversoError = getattr(errors, kind, MultiversoError)(message)
        return error

    # -- the steps -------------------------------------------------------------------------------------------

    def _ask(self, creation: Creation) -> None:
        if creation.key[0] == "memory":
            super()._ask(creation)
            return
        creation.step = "ask"
        waiting = sorted(creation.waiting)
        first = creation.waiting[waiting[0]]
        assert isinstance(first.spec, TableSpec)
        if first.spec.initial == "mean" and first.spec.dtype.startswith("int"):
            refusal = (
                f"{words(creation.key)}: initial='mean' of whole numbers works on one host only yet, as each host "
                "would round its own part: use 'sum' or 'master', or a float table"
            )
            self._refuse(creation, NotInThisJobError(refusal))
            return
        masters = [i for i in waiting if creation.waiting[i].is_master]
        self._report(Create(creation.key, first.spec.as_message(), first.mode, waiting, masters))

    def _writers(self, creation: Creation) -> list[int]:
        if creation.key[0] == "memory":
            return super()._writers(creation)
        return self._writers_of[creation.key]

    def _done(self, creation: Creation, error: MultiversoError | None = None) -> None:
        """Tells the coordinator, which says what comes next, once the table is made and written."""
        if creation.key[0] == "memory" or (creation.step == "make" and error is None):
            super()._done(creation, error)
            return
        creation.step = "join"
        failed = None
        if error is not None:
            failed = type(error).__name__, f"{self._here.name}: {error}"
        self._report(Done(creation.key, "make", failed))

    def _done_between(self, key: Key, step: Step) -> None:
        self._report(Done(key, step))

    def _finish(self, key: Key) -> None:
        creation = self._creations.get(key)
        if creation is not None:
            self._writers_of.pop(key, None)
            self._conclude(creation)
            if creation.piece is not None and not creation.piece.holders:
                self._tell_unused(creation.piece)

    def take_over(self, order: Welcome, then: Callable[[], None]) -> None:
        """In a host that takes a lost one's place: makes what there is, takes its values, then calls ``then``.

        Args:
            order: what there is.
            then: called from the node's thread.

        Raises:
            OutOfMemoryError: there is no room for one.
        """
        remote = [worker for worker in self._control.live() if worker not in self._local]
        for table in sorted(order.tables, key=lambda table: table.number):
            spec, number = TableSpec.from_message(table.spec), table.number
            piece = self._catalogue.make(table.key, spec, table.mode, number)
            if piece.shard is not None and piece.shard.mode != at.ASYNCHRONOUS:
                for worker in remote:
                    piece.shard.enrol(worker)
            turns = order.overwritten.get(number, {})
            self._copies.attach(number, self._catalogue.whole(piece), lambda: None, turns)
            self._copies.take(number, functools.partial(self._tell_unused, piece))
        self._catalogue.ordered = order.ordered
        self._here.do(lambda: None, then)  # once all that was asked for before is done

    # -- the end ---------------------------------------------------------------------------------------------

    def _tell_unused(self, piece: Piece) -> None:
        """No worker of this host has a table any more, or none ever had."""
        if piece.shard is None or piece.key in self._creations or piece.number in self._unused:
            return
        self._unused[piece.number] = []
        self._report(Unused(piece.key, piece.number, piece.closing))

    def ask(self, asked: Asked) -> None:
        """As on one host; but what the others may be about to free is handed out only when the coordinator says so."""
        key = self._key_of(asked)
        piece = None if key in self._creations else self._catalogue.find(key)
        if piece is None or piece.number not in self._unused:
            super().ask(asked)
            return
        self._forget_late(asked.connection)  # its first call was interrupted, and did not say so
        late = self._unused[piece.number]
        late.append(asked)
        if len(late) == 1:
            self._report(Used(key, piece.number))

    def _end_or_keep(self, order: Used | Part | Free) -> None:
        key, number = order.key, order.number
        if isinstance(order, Free):
            parted = self._parting.pop(number, None)  # none where this host came after all had parted with it
            if parted is not None:
                self._copies.detach(number, functools.partial(self._catalogue.release, parted))
            return
        kept = self._catalogue.piece(number)
        is_used, shard = isinstance(order, Used), kept.shard if kept is not None else None
        if is_used and shard is not None and shard.consistency.in_rounds:
            self._copies.refill(number, lambda here: self._enter_rounds(number, here))
            return
        late = self._unused.pop(number, [])
        if not is_used and kept is not None:
            self._catalogue.remove(kept)
            self._parting[number] = kept
            self._copies.part(number, lambda: self._report(Parted(key, number)))
        for asked in late:
            if asked.connection.worker_id is None:
                continue  # it is gone
            try:
                self.ask(asked)
            except MultiversoError as error:
                asked.connection.refuse(asked.request.id, error)
        if is_used and kept is not None and not kept.holders:
            self._tell_unused(kept)

    def _enter_rounds(self, number: int, here: bool) -> None:
        """A synchronous table that no worker of this host had: its rounds wait, and those who ask for it join them."""
        late, kept = self._unused.pop(number, []), self._catalogue.piece(number)
        for asked in late:
            connection, request = asked.connection, asked.request
            if connection.worker_id is None or kept is None:
                continue  # it is gone
            if not here:
                connection.refuse(request.id, _nobody_has(kept.key))
            elif kept.spec != asked.spec:
                connection.refuse(request.id, differs(kept, asked.spec))
            else:
                # with an updater the values after a round are made by workers: there has to be one for the next
                self._hand_over(asked, kept, late=kept.shard is None or kept.shard.spec.updater == "add")
                connection.reply(request.id, {"turn": False})
        self._here.fabric.rounds.release(number)  # now: what moves may wait for it
        if kept is not None and not kept.holders:
            self._tell_unused(kept)

    def _forget_late(self, connection: Connection) -> None:
        for late in self._unused.values():
            late[:] = [asked for asked in late if asked.connection is not connection]

    def cancel(self, connection: Connection, why: str | None) -> None:
        """A worker no longer waits."""
        self._forget_late(connection)
        super().cancel(connection, why)

    # -- what goes wrong --------------------------------------------------------------------------------------

    def _void(self, creation: Creation, worker_id: int) -> None:
        if creation.step == "ask":
            creation.step = None
            self._report(Withdraw(creation.key))
        super()._void(creation, worker_id)

    def _forget(self, creation: Creation) -> None:
        self._writers_of.pop(creation.key, None)
        if creation.key[0] == "memory" or creation.piece is None:
            super()._forget(creation)
            return
        self._creations.pop(creation.key, None)
        piece, creation.piece = creation.piece, None
        self._catalogue.unlist(piece)
        writes = creation.turn_of
        self._copies.detach(piece.number, lambda: self._free(piece, writes))

    def _free(self, piece: Piece, writes: int | None) -> None:
        if writes is not None and self._control.liveness(writes) == at.ALIVE:
            self._doomed[writes] = piece
        else:
            self._catalogue.release(piece)


def _nobody_has(key: Key) -> MultiversoError:
    return MultiversoError(
        f"{words(key)} has an updater, and no host is left that has gone through all of its rounds: those that had its "
        "values are lost, or their workers' reads have raised in the middle of a round. Start again, from the newest "
        "checkpoint"
    )
