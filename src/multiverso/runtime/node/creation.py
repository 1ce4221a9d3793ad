"""How tables come to be: by order (collective) or by name (create or attach), and whose initial value counts.

Where reads wait for others (rounds, clocks) a table that has a name is made by order, too, or whoever opens it late
would be in fewer rounds, unseen. Its name attaches a worker that has it to it once more, and one in a dead one's place.

A creation goes through three states. *Gathering*: by order, until every live worker has asked; by name the first
is enough. *Writing*: the memory is there, and the workers whose initial value counts write it, one after another,
so that a sum has one order. *Ready*: everybody is answered, and the creation is over.

A worker whose call is interrupted is as one that has not asked. By order the others then wait for it to ask
again, as they would have before; by name the next one's value counts. What had been written is cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from multiverso.errors import MultiversoError, OutOfMemoryError, TableMismatchError, WorkerLostError
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.node.catalogue import Catalogue, Key, Piece, Spec, words
from multiverso.runtime.node.connection import Connection
from multiverso.spec.table import TableSpec
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
        waiting: the workers that have asked, and what for.
        piece: the memory, once it is there.
        creators: by name, the workers whose value counts: they were there when it was made.
        step: what is being done: ``"ask"`` (the other hosts), ``"make"``, ``"write"``, or ``"join"`` (what follows
            between hosts); None: workers of this host still ask.
        turns: the workers that still have to write; None before the first has been let in.
        turn_of: the worker that writes now.
        written: whether a worker has written, so that the next first one has to clear the memory.
    """

    key: Key
    waiting: dict[int, Asked] = field(default_factory=dict)
    piece: Piece | None = None
    creators: list[int] = field(default_factory=list)
    step: str | None = None
    turns: deque[int] | None = None
    turn_of: int | None = None
    written: bool = False

    @property
    def by_order(self) -> bool:
        """Whether all workers have to ask."""
        return self.key[0] == "order"


class Creations:
    """Everything of a job that is being made. Owner: the node's thread.

    Args:
        catalogue: what has been made.
        control: the job's control segment.
        fixed: whether the number of workers is fixed, so that creation by order can be collective.
        local: the workers of this host, in a job on several; None: all are.
    """

    def __init__(self, catalogue: Catalogue, control: Control, fixed: bool, local: Sequence[int] | None = None) -> None:
        self._catalogue = catalogue
        self._control = control
        self._fixed = fixed
        self._local: Sequence[int] = range(control.capacity) if local is None else local
        self._creations: dict[Key, Creation] = {}
        self._doomed: dict[int, Piece] = {}  # by the worker that still writes it

    def ask(self, asked: Asked) -> None:
        """A worker asks for a table or plain memory; it is answered when everybody whom that concerns has asked.

        Raises:
            TableMismatchError: it exists already, and is another.
        """
        key = self._key_of(asked)
        worker_id = asked.connection.attached_id
        asked.connection.enrolled_in = None
        self._writes_no_more(worker_id)
        creation = self._creations.get(key)
        if creation is None:
            piece = self._catalogue.find(key)
            if piece is not None:
                check_equal(piece, asked.spec)
                self._hand_over(asked, piece, late=True)
                asked.connection.reply(asked.request.id, {"turn": False})
                return
            if self._catalogue.is_over(key):
                raise TableMismatchError(
                    f"{words(key)} was closed by all workers that had it, before this one asked for it: let all of "
                    "them come, barrier(), before the first one closes it, or give it a name"
                )
            creation = self._creations[key] = Creation(key)
        elif worker_id in creation.waiting:
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
        made = None if name is None else self._catalogue.find(("name", name))
        is_new = self._control.worker(worker_id).incarnation > 0
        if made is not None and (is_new or worker_id in made.holders):
            return made.key
        if name is not None and is_new:
            begun = (
                one.key for one in self._creations.values() if any(a.spec.name == name for a in one.waiting.values())
            )
            return next(begun, ("order", max(order, self._catalogue.ordered + 1)))
        return "order", order

    def initialised(self, worker_id: int) -> None:
        """A worker has written its initial value."""
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if creation.turn_of == worker_id:
                creation.turn_of = None
                self._proceed(creation)
                return

    # -- the states -------------------------------------------------------------------------------------------

    def _proceed(self, creation: Creation) -> None:
        """Does what can be done now."""
        if creation.turn_of is not None:
            return  # no other may write meanwhile, nor clear what it writes
        if creation.step is None:
            if not creation.waiting:
                self._forget(creation)
            elif not creation.by_order or self._is_complete(creation):
                self._ask(creation)
        elif creation.step == "write" and (not creation.by_order or self._is_complete(creation)):
            self._next_turn(creation)

    def _ask(self, creation: Creation) -> None:
        """All whom it concerns on this host have asked. On one host that is all: it is made."""
        asked = next(iter(creation.waiting.values()))
        self._make(creation, asked.spec, asked.mode)

    def _make(
        self, creation: Creation, spec: Spec, mode: str, number: int | None = None, workers: Sequence[int] = ()
    ) -> None:
        """Makes the memory, and answers those that have asked.

        Args:
            creation: of what.
            spec, mode, number: see `Catalogue.make`.
            workers: those of all hosts that have asked.
        """
        creation.step = "make"
        try:
            creation.piece = piece = self._catalogue.make(creation.key, spec, mode, number)
        except (MultiversoError, OSError) as error:
            # one table that cannot be made must not end the job
            why = error if isinstance(error, MultiversoError) else OutOfMemoryError(f"no memory: {error}")
            self._done(creation, why)
            return
        if piece.shard is not None and piece.shard.consistency.reads_wait:
            for worker in workers:  # no round or clock may advance without one that another host reports later
                if worker not in self._local:
                    piece.shard.enrol(worker)
        for worker_id, asked in list(creation.waiting.items()):
            try:
                check_equal(piece, asked.spec)  # by name, another host's worker may have been first
            except TableMismatchError as error:
                asked.connection.refuse(asked.request.id, error)
                del creation.waiting[worker_id]
                continue
            self._hand_over(asked, piece)
        creation.creators = sorted(creation.waiting)
        self._done(creation)

    def _next_turn(self, creation: Creation) -> None:
        """Lets the next of this host's writers write."""
        first, writers = creation.turns is None, self._writers(creation)
        if creation.turns is None:
            here = [i for i in writers if i in self._local]
            creation.turns = deque(i for i in here if i in creation.waiting or self._control.worker(i).is_live)
        if not creation.turns:
            self._done(creation)
        elif creation.turns[0] in creation.waiting:
            creation.turn_of = creation.turns.popleft()
            # the first one on a host clears what an interrupted one has written there
            clear, last = first and creation.written, not creation.turns
            creation.written = True
            asked = creation.waiting[creation.turn_of]
            turn = {"turn": True, "clear": clear, "of": len(writers), "last": last}
            asked.connection.reply(asked.request.id, turn)
        else:
            creation.turns = None  # it was interrupted: everybody waits until it asks again

    def _done(self, creation: Creation, error: MultiversoError | None = None) -> None:
        """A step is done, or cannot be. On one host the next one begins."""
        if error is not None:
            self._refuse(creation, error)
        elif creation.step == "make":
            creation.step = "write"
            self._proceed(creation)
        elif creation.waiting:
            self._conclude(creation)
        else:
            self._forget(creation)

    def _conclude(self, creation: Creation) -> None:
        """It is ready."""
        del self._creations[creation.key]
        for asked in creation.waiting.values():
            if creation.by_order:  # from here on the others wait for it, also when it is interrupted
                asked.connection.enrolled_in = None
            asked.connection.reply(asked.request.id, {"turn": False})

    def _is_complete(self, creation: Creation) -> bool:
        """By order: whether every live worker has asked for the same; refuses when that cannot come to be."""
        lost = self._control.lost()
        if lost and self._fixed and not self._control.continues:
            self._refuse(creation, lost_error(lost, f"before {words(creation.key)} was created"))
            return False
        concerned = [i for i in self._control.live() if i in self._local]
        if any(i not in creation.waiting for i in concerned):
            return False
        if len({asked.spec for asked in creation.waiting.values()}) > 1:
            each = "; ".join(f"worker {i}: {asked.spec}" for i, asked in sorted(creation.waiting.items()))
            self._refuse(
                creation,
                TableMismatchError(
                    f"{words(creation.key)} differs between workers ({each}). All workers must create "
                    "the same tables in the same order; nothing was created, and the call can be repeated"
                ),
            )
            return False
        return True

    def _writers(self, creation: Creation) -> list[int]:
        """Returns the workers whose initial value counts, of all hosts, in the order of their turns."""
        waiting = sorted(creation.waiting)
        if not waiting or not creation.by_order:
            return [i for i in waiting if i in creation.creators] or waiting[:1]
        asked = creation.waiting[waiting[0]]
        if isinstance(asked.spec, TableSpec) and asked.spec.initial == "master":
            masters = [i for i in waiting if creation.waiting[i].is_master]
            return (masters or waiting)[:1]
        return waiting

    def _hand_over(self, asked: Asked, piece: Piece, late: bool = False) -> None:
        """Tells a worker where a piece is.

        The worker takes part from here on, before anyone continues: a round or a clock must not go ahead without
        one that has created the table with the others, but is slow to read this. A late one enrols itself once
        it has mapped the memory, which can take long: the others need not wait for that.
        """
        worker_id = asked.connection.attached_id
        enrol = self._catalogue.hold(piece, worker_id)
        shard = piece.shard
        if enrol:
            asked.connection.enrolled_in = piece.number
        if shard is not None and enrol and not late:
            shard.enrol(worker_id)
        where = {"number": piece.number, "offset": piece.offset, "size": piece.size}
        how = {"workers": shard.workers, "mode": shard.mode} if shard else {"workers": 0, "mode": 0}
        order = int(piece.key[1]) if piece.key[0] == "order" else 0
        asked.connection.reply(asked.request.id, {**where, **how, "order": order, "enrol": enrol and late})

    # -- what goes wrong --------------------------------------------------------------------------------------

    def cancel(self, connection: Connection, why: str | None) -> None:
        """A worker no longer waits; its number in the order stays free for its next call.

        Args:
            connection: the worker's.
            why: it has no room for the table: then no worker gets a table by order.
        """
        worker_id = connection.attached_id
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if worker_id not in creation.waiting:
                continue
            self._void(creation, worker_id)
            if why is not None and creation.by_order and creation.key in self._creations:
                error = OutOfMemoryError(f"worker {worker_id} has no room for {words(creation.key)}: {why}")
                self._refuse(creation, error)
            return
        piece = self._catalogue.piece(connection.enrolled_in)
        if piece is not None:
            self._catalogue.withdraw(piece, worker_id)

    def _void(self, creation: Creation, worker_id: int) -> None:
        """Continues as if a worker had not asked."""
        del creation.waiting[worker_id]
        if creation.piece is not None:
            contributed = worker_id in creation.creators or creation.by_order or creation.turn_of == worker_id
            self._catalogue.withdraw(creation.piece, worker_id)
            if contributed:
                creation.turns = None
            if worker_id in creation.creators:
                creation.creators.remove(worker_id)
        if creation.turn_of == worker_id:
            creation.turn_of = None
        self._proceed(creation)

    def dropped(self, worker_id: int) -> None:
        """A worker has left or is lost: creations that waited for it continue or fail."""
        lost = self._control.lost()
        self._writes_no_more(worker_id)
        for creation in list(self._creations.values()):
            if lost and not self._control.continues:
                creation.waiting.pop(worker_id, None)
                if creation.turn_of == worker_id:
                    creation.turn_of = None
                self._refuse(creation, lost_error(lost, f"while {words(creation.key)} was being created"))
            elif worker_id in creation.waiting:
                self._void(creation, worker_id)
            else:
                self._proceed(creation)  # it may be the one that the others waited for

    def _refuse(self, creation: Creation, error: MultiversoError) -> None:
        for asked in creation.waiting.values():
            asked.connection.enrolled_in = None
            asked.connection.refuse(asked.request.id, error)
        self._forget(creation)

    def _forget(self, creation: Creation) -> None:
        """Ends a creation that came to nothing; its memory is free once no worker writes in it."""
        self._creations.pop(creation.key, None)
        piece, creation.piece, creation.turns = creation.piece, None, None
        if piece is None:
            return
        self._catalogue.unlist(piece)
        if creation.turn_of is None:
            self._catalogue.release(piece)
        else:
            self._doomed[creation.turn_of] = piece

    def _writes_no_more(self, worker_id: int) -> None:
        piece = self._doomed.pop(worker_id, None)
        if piece is not None:
            self._catalogue.release(piece)


def lost_error(lost: list[int], when: str) -> WorkerLostError:
    """Returns the error for those that waited for a lost worker."""
    return WorkerLostError(f"{names(lost)} died, or exited without shutdown(), {when}", lost)


def check_equal(made: Piece, asked: Spec) -> None:
    """Raises TableMismatchError where a worker has asked for something else than what there is."""
    if made.spec != asked:
        raise differs(made, asked)


def differs(made: Piece, asked: Spec) -> TableMismatchError:
    """Returns the error for a worker that has asked for something else."""
    return TableMismatchError(
        f"{words(made.key)} is {made.spec}; this worker asked for {asked}. All workers must create the same "
        "tables in the same order, or by the same names"
    )
