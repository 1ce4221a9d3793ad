"""How tables come to be: by order (collective) or by name (create or attach), and whose initial value counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiverso import layout as at
from multiverso.consistency.waiting import Picture, names
from multiverso.errors import MultiversoError, TableMismatchError, WorkerLostError
from multiverso.runtime.arenas import Arena, Arenas
from multiverso.runtime.waiting import read_picture
from multiverso.shards.shard import Shard, initialise
from multiverso.spec import MODES, MemorySpec, Places, TableSpec, checked_count
from multiverso.wire.messages import Message

if TYPE_CHECKING:
    from multiverso.runtime.connection import Connection
    from multiverso.runtime.control import Control


Key = tuple[str, int | str]  # ("order", 3), ("name", "weights"), or ("memory", "lines")


@dataclass(frozen=True)
class Piece:
    """A table or plain memory, and where it lies."""

    spec: TableSpec | MemorySpec
    arena: Arena
    offset: int

    @property
    def addresses(self) -> range:
        """Where plain memory lies in this process."""
        assert isinstance(self.spec, MemorySpec)
        start = self.arena.mapped.address + self.offset
        return range(start, start + self.spec.nbytes)


@dataclass
class Creation:
    """A table or plain memory that is being made. Owner: the node's thread."""

    key: Key
    waiting: dict[int, tuple[Connection, Message]] = field(default_factory=dict)
    number: int | None = None
    contributors: list[int] = field(default_factory=list)
    turns: deque[int] = field(default_factory=deque)
    turn_of: int | None = None
    again: bool = False  # a contributor is gone: start over once the one whose turn it is has done


class Catalogue:
    """A job's tables, made and being made. Owner: the node's thread.

    Args:
        control: the job's control segment.
        fixed: whether the number of workers is fixed, so that creation by order can be collective.
    """

    def __init__(self, control: Control, fixed: bool) -> None:
        self.arenas = Arenas()
        self.shards: dict[int, Shard] = {}
        self._pieces: dict[int, Piece] = {}
        self._number_of: dict[Key, int] = {}
        self._creations: dict[Key, Creation] = {}
        self._control = control
        self._fixed = fixed
        self._made = 0

    def picture(self) -> Picture:
        """Who is there, and how far in which table."""
        pieces = {number: piece for number, piece in list(self._pieces.items()) if number < 0}
        memories = {number: piece.addresses for number, piece in pieces.items()}
        return read_picture(self._control, self.shards, memories)

    def create(self, connection: Connection, request: Message, mode: str) -> None:
        """A worker asks for a table; it is answered when everybody whom that concerns has asked."""
        spec = TableSpec.from_message(request["spec"])
        key = ("name", spec.name) if spec.name is not None else ("order", int(request["order"]))
        self._ask(connection, request, key, spec, mode)

    def share(self, connection: Connection, request: Message) -> None:
        """A worker asks for plain memory: made for the first, handed to the others."""
        asked = request["spec"]
        spec = MemorySpec(asked["name"], checked_count(asked["nbytes"], "nbytes"))
        self._ask(connection, request, ("memory", spec.name), spec, "async")

    def _ask(
        self, connection: Connection, request: Message, key: Key, spec: TableSpec | MemorySpec, mode: str
    ) -> None:
        assert connection.worker_id is not None
        connection.enrolled_in = None
        number = self._number_of.get(key)
        if number is not None:
            self._check_equal(key, self._pieces[number].spec, spec)
            creation = self._creations.get(key)
            self._hand_over(connection, request, number, late=creation is None)
            if creation is None:
                connection.reply(request, {"turn": False})
            else:  # being initialised by its first workers: they decide, latecomers by name wait with them
                creation.waiting[connection.worker_id] = (connection, request)
            return
        creation = self._creations.setdefault(key, Creation(key))
        creation.waiting[connection.worker_id] = (connection, request)
        if key[0] == "order":
            self._advance(creation, mode)
        else:
            self._make(creation, spec, mode)

    @staticmethod
    def _check_equal(key: Key, made: TableSpec | MemorySpec, asked: TableSpec | MemorySpec) -> None:
        if made != asked:
            raise TableMismatchError(
                f"{_words(key)} is {made}; this worker asked for {asked}. All workers must create the same "
                "tables in the same order, or by the same names"
            )

    def _concerned(self) -> list[int]:
        return [w.worker_id for w in self._control.workers() if w.counts]

    def _advance(self, creation: Creation, mode: str = "async") -> None:
        """By order: make the table when every live worker has asked for it."""
        waiting = creation.waiting
        lost = self._lost()
        if lost and self._fixed and not self._control.continues:
            self._refuse(creation, self.lost_error(lost, f"before {_words(creation.key)} was created"))
            return
        if not waiting or any(i not in waiting for i in self._concerned()):
            return
        specs = {i: TableSpec.from_message(request["spec"]) for i, (_, request) in waiting.items()}
        if len(set(specs.values())) > 1:
            asked = "; ".join(f"worker {i}: {spec}" for i, spec in sorted(specs.items()))
            self._refuse(
                creation,
                TableMismatchError(
                    f"{_words(creation.key)} differs between workers ({asked}). All workers must create "
                    "the same tables in the same order; nothing was created, and the call can be repeated"
                ),
            )
            return
        self._make(
            creation,
            next(iter(specs.values())),
            str(next(iter(waiting.values()))[1].get("mode", mode)),
        )

    def _make(self, creation: Creation, spec: TableSpec | MemorySpec, mode: str) -> None:
        workers = self._control.capacity
        size = Places.of(spec, workers, mode == "sync").size if isinstance(spec, TableSpec) else spec.nbytes
        try:
            arena, offset = self.arenas.place(size)
        except MultiversoError as error:
            self._refuse(creation, error)
            return
        if isinstance(spec, TableSpec):
            self._made += 1
            number = self._made
            initialise(arena.mapped.address + offset, spec, number, workers, MODES[mode])
            self.shards[number] = Shard(arena.mapped, offset, spec, workers, MODES[mode])
        else:
            number = min((0, *self._pieces)) - 1  # below 0, so that tables count from 1
        self._pieces[number] = Piece(spec, arena, offset)
        self._number_of[creation.key] = number
        creation.number = number
        for worker_id in sorted(creation.waiting):
            self._hand_over(*creation.waiting[worker_id], number)
        masters = [i for i, (_, request) in sorted(creation.waiting.items()) if request.get("master")]
        if creation.key[0] == "order" and isinstance(spec, TableSpec) and spec.initial == "master":
            creation.contributors = (masters or sorted(creation.waiting))[:1]
        else:
            creation.contributors = sorted(creation.waiting)
        creation.turns = deque(creation.contributors)
        self._next_turn(creation)

    def _hand_over(self, connection: Connection, request: Message, number: int, late: bool = False) -> None:
        """Sends where the table is, with its segment unless this worker has it.

        The worker takes part from here on, before anyone is let go: a round or a clock must not go ahead without
        one that has created the table with the others, but is slow to read this. A late one enrols itself once
        it has mapped the memory, which can take long: nobody has to wait for that.
        """
        piece, shard = self._pieces[number], self.shards.get(number)
        assert connection.worker_id is not None
        enrol = shard is not None and not shard.enrolled(connection.worker_id)  # it may open one twice
        if enrol:
            connection.enrolled_in = number
        if shard is not None and enrol and not late:
            shard.enrol(connection.worker_id)
        descriptors = () if piece.arena.number in connection.sent_arenas else (piece.arena.descriptor,)
        connection.sent_arenas.add(piece.arena.number)
        connection.reply(
            request,
            {
                "table": number,
                "arena": piece.arena.number,
                "offset": piece.offset,
                "workers": shard.workers if shard else 0,
                "mode": shard.mode if shard else 0,
                "enrol": enrol and late,
            },
            descriptors,
        )

    # -- initial values, one worker after another, so that a sum has one order --------------------------------

    def _next_turn(self, creation: Creation) -> None:
        if creation.turns:
            creation.turn_of = creation.turns.popleft()
            connection, request = creation.waiting[creation.turn_of]
            last = not creation.turns
            connection.reply(request, {"turn": True, "of": len(creation.contributors), "last": last})
            return
        for connection, request in creation.waiting.values():
            connection.reply(request, {"turn": False})
        del self._creations[creation.key]

    def initialised(self, connection: Connection, request: Message) -> None:
        """A worker has done its turn."""
        for creation in list(self._creations.values()):
            if creation.turn_of is not None and creation.turn_of == connection.worker_id:
                creation.turn_of = None
                if creation.again:
                    self._start_over(creation)
                else:
                    self._next_turn(creation)
                return

    def _start_over(self, creation: Creation) -> None:
        """Without what a worker that is gone has written, or had begun to write."""
        assert creation.number is not None
        if creation.number in self.shards:  # plain memory is cleared by the worker whose turn it is
            self.shards[creation.number].values()[:] = 0
        creation.again, creation.turn_of = False, None
        creation.turns = deque(creation.contributors)
        self._next_turn(creation)

    # -- workers that go --------------------------------------------------------------------------------------

    def _lost(self) -> list[int]:
        return [w.worker_id for w in self._control.workers() if w.fate == at.LOST]

    def _without(self, creation: Creation, worker_id: int) -> None:
        """A worker no longer takes part in a creation: go on without it."""
        if creation.waiting.pop(worker_id, None) is None:
            if creation.number is None:
                self._advance(creation)  # it may be the one that the others waited for
            return
        if not creation.waiting:
            self._refuse(creation, self.lost_error([worker_id], "while it was creating a table"))
        elif creation.number is None:
            self._advance(creation)
        elif worker_id in creation.contributors:
            creation.contributors.remove(worker_id)
            if not creation.contributors:
                creation.contributors.append(min(creation.waiting))
            if creation.turn_of in (None, worker_id):
                self._start_over(creation)
            else:
                creation.again = True

    def _refuse(self, creation: Creation, error: MultiversoError) -> None:
        for connection, request in creation.waiting.values():
            connection.refuse(request, error)
        if creation.number is not None:
            self._number_of.pop(creation.key, None)
            self._pieces.pop(creation.number, None)
            self.shards.pop(creation.number, None)
        self._creations.pop(creation.key, None)

    def lost_error(self, lost: list[int], when: str) -> WorkerLostError:
        """Returns the error for whoever waited for a lost worker."""
        return WorkerLostError(f"{names(lost)} died, or exited without shutdown(), {when}", lost)

    def dropped(self, worker_id: int) -> None:
        """A worker has left or is lost: creations that waited for it go on or fail."""
        lost = self._lost()
        for creation in list(self._creations.values()):
            if lost and not self._control.continues:
                creation.waiting.pop(worker_id, None)
                self._refuse(
                    creation, self.lost_error(lost, f"while {_words(creation.key)} was being created")
                )
            else:
                self._without(creation, worker_id)

    def cancel(self, connection: Connection) -> None:
        """A worker no longer waits for its table; its number in the order stays free for the next call."""
        connection.sent_arenas.clear()  # it may not have taken what it was sent
        if connection.worker_id is not None and connection.enrolled_in in self.shards:
            self.shards[connection.enrolled_in].withdraw(connection.worker_id)
            self._control.notify()
        for creation in list(self._creations.values()):
            if connection.worker_id in creation.waiting:
                self._without(creation, connection.worker_id)

    def needs(self, worker_id: int) -> bool:
        """Whether the others may still need what a worker that is gone has staged for a round."""
        return any(shard.needs(worker_id) for shard in self.shards.values())

    def forget(self, worker_id: int) -> None:
        """A number is given to a new worker: the last one's part in the tables ends."""
        for shard in self.shards.values():
            shard.withdraw(worker_id)


def _words(key: Key) -> str:
    kind, which = key
    return {"order": f"table number {which}", "name": f"table {which!r}"}.get(
        kind, f"shared memory {which!r}"
    )
