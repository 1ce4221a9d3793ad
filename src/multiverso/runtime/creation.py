"""How tables come to be: by order (collective) or by name (create or attach), and whose initial value counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiverso import layout as at
from multiverso.consistency.waiting import Picture, names
from multiverso.errors import MultiversoError, TableMismatchError, WorkerLostError
from multiverso.runtime.arenas import Arena, Arenas
from multiverso.shards.shard import Shard, initialise
from multiverso.spec import MODES, Places, TableSpec
from multiverso.wire.messages import Message

if TYPE_CHECKING:
    from multiverso.runtime.connection import Connection
    from multiverso.runtime.control import Control


@dataclass
class Creation:
    """A table that is being made. Owner: the node's thread."""

    key: int | str
    waiting: dict[int, tuple[Connection, Message]] = field(default_factory=dict)
    table: int | None = None
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
        self._arena_of: dict[int, Arena] = {}
        self._table_of: dict[int | str, int] = {}
        self._creations: dict[int | str, Creation] = {}
        self._control = control
        self._fixed = fixed
        self._made = 0

    def picture(self) -> Picture:
        """Who is there, and how far in which table."""
        workers = {w.worker_id: w for w in self._control.workers()}
        return Picture(workers, {i: shard.membership() for i, shard in list(self.shards.items())})

    def create(self, connection: Connection, request: Message, mode: str) -> None:
        """A worker asks for a table; it is answered when everybody whom that concerns has asked."""
        spec = TableSpec.from_message(request["spec"])
        assert connection.worker_id is not None
        connection.enrolled_in = None
        key: int | str = spec.name if spec.name is not None else int(request["order"])
        table = self._table_of.get(key)
        if table is not None and key not in self._creations:
            self._join(connection, request, spec, table)
            return
        creation = self._creations.setdefault(key, Creation(key))
        if creation.table is not None:
            # being initialised by its first workers: they decide, latecomers by name wait with them
            self._check_equal(key, self.shards[creation.table].spec, spec)
            self._hand_over(connection, request, creation.table)
        creation.waiting[connection.worker_id] = (connection, request)
        if spec.name is not None and creation.table is None:
            self._make(creation, mode)
        elif creation.table is None:
            self._advance(creation, mode)

    def _join(self, connection: Connection, request: Message, spec: TableSpec, table: int) -> None:
        key: int | str = spec.name if spec.name is not None else int(request["order"])
        self._check_equal(key, self.shards[table].spec, spec)
        self._hand_over(connection, request, table, late=True)
        connection.reply(request, {"turn": False})

    @staticmethod
    def _check_equal(key: int | str, made: TableSpec, asked: TableSpec) -> None:
        if made != asked:
            what = f"table {key!r}" if isinstance(key, str) else f"table number {key}"
            raise TableMismatchError(
                f"{what} is {made}; this worker asked for {asked}. All workers must create the same tables in "
                "the same order, or by the same names"
            )

    def _concerned(self) -> list[int]:
        return [w.worker_id for w in self._control.workers() if w.counts]

    def _advance(self, creation: Creation, mode: str = "async") -> None:
        """By order: make the table when every live worker has asked for it."""
        waiting = creation.waiting
        lost = self._lost()
        if lost and self._fixed and not self._control.continues:
            self._refuse(creation, self.lost_error(lost, f"before table {creation.key} was created"))
            return
        if not waiting or any(i not in waiting for i in self._concerned()):
            return
        specs = {i: TableSpec.from_message(request["spec"]) for i, (_, request) in waiting.items()}
        if len(set(specs.values())) > 1:
            asked = "; ".join(f"worker {i}: {spec}" for i, spec in sorted(specs.items()))
            self._refuse(
                creation,
                TableMismatchError(
                    f"table number {creation.key} differs between workers ({asked}). All workers must create "
                    "the same tables in the same order; nothing was created, and the call can be repeated"
                ),
            )
            return
        self._make(creation, str(next(iter(waiting.values()))[1].get("mode", mode)))

    def _make(self, creation: Creation, mode: str) -> None:
        _, first = next(iter(creation.waiting.values()))
        spec = TableSpec.from_message(first["spec"])
        workers = self._control.capacity
        size = Places.of(spec, workers, mode == "sync").size
        try:
            arena, offset = self.arenas.place(size)
        except MultiversoError as error:
            self._refuse(creation, error)
            return
        self._made += 1
        table = self._made
        initialise(arena.mapped.address + offset, spec, table, workers, MODES[mode])
        self.shards[table] = Shard(arena.mapped, offset, spec, workers, MODES[mode])
        self._arena_of[table] = arena
        self._table_of[creation.key] = table
        creation.table = table
        for worker_id in sorted(creation.waiting):
            self._hand_over(*creation.waiting[worker_id], table)
        masters = [i for i, (_, request) in sorted(creation.waiting.items()) if request.get("master")]
        if spec.name is None and spec.initial == "master":
            creation.contributors = (masters or sorted(creation.waiting))[:1]
        else:
            creation.contributors = sorted(creation.waiting)
        creation.turns = deque(creation.contributors)
        self._next_turn(creation)

    def _hand_over(self, connection: Connection, request: Message, table: int, late: bool = False) -> None:
        """Sends where the table is, with its segment unless this worker has it.

        The worker takes part from here on, before anyone is let go: a round or a clock must not go ahead without
        one that has created the table with the others, but is slow to read this. A late one enrols itself once
        it has mapped the memory, which can take long: nobody has to wait for that.
        """
        arena, shard = self._arena_of[table], self.shards[table]
        assert connection.worker_id is not None
        enrol = not shard.enrolled(connection.worker_id)  # it may open a named table twice
        if enrol:
            connection.enrolled_in = table
        if enrol and not late:
            shard.enrol(connection.worker_id)
        descriptors = () if arena.number in connection.sent_arenas else (arena.descriptor,)
        connection.sent_arenas.add(arena.number)
        connection.reply(
            request,
            {
                "table": table,
                "arena": arena.number,
                "offset": shard.offset,
                "workers": shard.workers,
                "mode": shard.mode,
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
        assert creation.table is not None
        self.shards[creation.table].values()[:] = 0
        creation.again, creation.turn_of = False, None
        creation.turns = deque(creation.contributors)
        self._next_turn(creation)

    # -- workers that go --------------------------------------------------------------------------------------

    def _lost(self) -> list[int]:
        return [w.worker_id for w in self._control.workers() if w.fate == at.LOST]

    def _without(self, creation: Creation, worker_id: int) -> None:
        """A worker no longer takes part in a creation: go on without it."""
        if creation.waiting.pop(worker_id, None) is None:
            if creation.table is None:
                self._advance(creation)  # it may be the one that the others waited for
            return
        if not creation.waiting:
            self._refuse(creation, self.lost_error([worker_id], "while it was creating a table"))
        elif creation.table is None:
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
        if creation.table is not None:
            self._table_of.pop(creation.key, None)
            self.shards.pop(creation.table, None)
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
                self._refuse(creation, self.lost_error(lost, f"while table {creation.key} was being created"))
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
