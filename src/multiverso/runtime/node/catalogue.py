"""A job's tables and plain memory as its node knows them: where they lie, who has them, when they are freed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.layout import words as at
from multiverso.layout.keyed import COPIES, KEPT, KEYED_MEMORY
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.wait_graph import WaitGraph, read_wait_graph
from multiverso.runtime.node.connection import Connection
from multiverso.shards.keyed import HEAD_BYTES, keyed_status
from multiverso.shards.shard import Shard, initialise
from multiverso.spec.modes import MODES
from multiverso.spec.states import states_of
from multiverso.spec.table import MemorySpec, Places, TableSpec

_MEMORY_HEAD = 64 * 1024
_THE_NODE = -1  # among a piece's holders
Spec = TableSpec | MemorySpec
Key = tuple[str, int | str]  # ("order", 3), ("name", "weights"), or ("memory", "lines")


def words(key: Key) -> str:
    """Returns what an error calls a table or plain memory."""
    kind, which = key
    return {"order": f"table number {which}", "name": f"table {which!r}"}.get(kind, f"shared memory {which!r}")


def _known_by(key: Key, spec: Spec) -> set[Key]:
    """Returns what a piece is found by: a table that has a name by that, too, where it was made by order."""
    return {key, ("name", spec.name)} if isinstance(spec, TableSpec) and spec.name is not None else {key}


def _has_values(spec: TableSpec) -> bool:
    return any(state.initial for state in states_of(spec.states) if state.per == "element")


@dataclass
class Piece:
    """A table or plain memory.

    Attributes:
        number: of a table, from 1; of plain memory, below 0.
        head: its first bytes, which is all that the node maps: of a table, its header, locks and lines; of plain
            memory, what waits may point to.
        shard: a table in them.
        holders: the workers that have it mapped.
        closing: whether a worker has closed it: it is freed when no worker has it.
    """

    number: int
    key: Key
    spec: Spec
    offset: int
    size: int
    head: Segment
    shard: Shard | None
    holders: set[int] = field(default_factory=set)
    closing: bool = False


class Catalogue:
    """Owner: the node's thread; `wait_graph` and `shards` may be asked for by any.

    Args:
        control: the job's control segment.
        heap: the job's memory.

    Attributes:
        ordered: tables made by order, those that are closed included.
    """

    def __init__(self, control: Control, heap: Heap) -> None:
        self.ordered = 0
        self._control = control
        self._heap = heap
        self._pieces: dict[int, Piece] = {}
        self._readers: dict[int, list[Connection]] = {}  # processes outside the job, by what they look at
        self._number_of: dict[Key, int] = {}
        self._over: set[Key] = set()  # plain memory that is not made again

    @property
    def shards(self) -> dict[int, Shard]:
        """The tables by number."""
        return {number: p.shard for number, p in list(self._pieces.items()) if p.shard is not None}

    def wait_graph(self) -> WaitGraph:
        """Returns the members, and their progress in each table."""
        pieces = [piece for piece in list(self._pieces.values()) if piece.shard is None]
        memories = {p.number: range(p.head.address, p.head.address + p.head.size) for p in pieces}
        return read_wait_graph(self._control, self.shards, memories)

    def find(self, key: Key) -> Piece | None:
        """Returns what is known by a name or place in the order."""
        return self.piece(self._number_of.get(key))

    def memory(self, name: str) -> npt.NDArray[np.uint8] | None:
        """Returns the head of plain memory, or None where none was asked for."""
        piece = self.find(("memory", name))
        return None if piece is None else piece.head.array(0, piece.head.size, np.uint8)

    def keyed_tables(self) -> dict[str, dict[str, Any]]:
        """Returns what the heads of keyed tables say (`keyed_status`), of this host's workers, by each table's name.

        In a synchronous job with the rounds of the table beside it, and the waits in them.
        """
        heads: dict[str, Piece] = {}
        for piece in list(self._pieces.values()):
            called = str(piece.key[1])
            if called.startswith(KEYED_MEMORY) and piece.head.size >= HEAD_BYTES:
                heads[called.removeprefix(KEYED_MEMORY)] = piece
        rounds = {shard.spec.part_of: shard for shard in self.shards.values()}
        found, indexes = {}, {worker: self._control.index.of(worker) for worker in self._control.local}
        for called, piece in heads.items():
            if called.startswith((COPIES, KEPT)):
                continue
            by, _, name = called.partition(":")
            copies = heads.get(COPIES + called)
            status = keyed_status(piece.head.address, indexes, None if copies is None else copies.head.address)
            if status is not None:
                facts = {"id": piece.number, "name": name if by == "name" else None, "updater": "", "rounds": 0}
                if (beside := rounds.get(called)) is not None:
                    facts["rounds"] = beside.committed
                    for worker_id, line in status["workers"].items():
                        if worker_id < beside.workers:
                            line["wait_seconds"] += beside.statistics(worker_id)["wait_seconds"]
                found[called] = facts | status
        return found

    def whole_memory(self, name: str) -> Segment | None:
        """Returns all of plain memory, for the node's own use of it, or None where none was asked for."""
        piece = self.find(("memory", name))
        return None if piece is None else self._whole(piece)

    def keep(self, number: int) -> Segment | None:
        """Returns all of plain memory, which is not freed from now on: the node uses it until the job ends."""
        piece = self._pieces.get(number)
        if piece is None or not isinstance(piece.spec, MemorySpec):
            return None
        piece.holders.add(_THE_NODE)
        return self._whole(piece)

    def is_over(self, key: Key) -> bool:
        """Whether all that had a piece have closed it, and no other can have that name or place."""
        return key in self._over or (key[0] == "order" and int(key[1]) <= self.ordered)

    def piece(self, number: int | None) -> Piece | None:
        """Returns what has a number."""
        return None if number is None else self._pieces.get(number)

    def make(self, key: Key, spec: Spec, mode: str, number: int) -> Piece:
        """Returns a new piece: zeroed, a table with its header and locks.

        Args:
            key: what it is known by.
            spec: what it is.
            mode: the consistency of a table.
            number: which no other has had: of a table from 1, of plain memory below 0.

        Raises:
            OutOfMemoryError: there is no room for it; nothing has changed.
        """
        if isinstance(spec, MemorySpec):
            reserve = self._heap.reserve_sparse if spec.sparse else self._heap.reserve
            offset = reserve(spec.nbytes, f"shared memory {spec.name!r}")
            head = self._map(offset, spec.nbytes, min(spec.nbytes, _MEMORY_HEAD))
            if spec.sparse:
                self._heap.make_huge(offset, spec.nbytes, sparse=True)
            piece = Piece(number, key, spec, offset, spec.nbytes, head, None)
        else:
            piece = self._make_table(key, spec, mode, number)
        self._pieces[piece.number] = piece
        for known_by in _known_by(key, spec):
            self._number_of[known_by] = piece.number
        if key[0] == "order":
            self.ordered += 1
        return piece

    def _make_table(self, key: Key, spec: TableSpec, mode: str, number: int) -> Piece:
        index = self._control.index
        consistency = MODES[mode]
        places = Places.of(spec, index, consistency.in_rounds, consistency.by_quorum)
        offset = self._heap.reserve(places.size)
        head = self._map(offset, places.size, places.head)
        # the states' first values lie beyond the head: the rest is mapped for as long as it takes to write them
        whole = self._map(offset, places.size, places.size) if _has_values(spec) else head
        initialise(whole.address, spec, number, index, consistency.code)
        self._heap.make_huge(offset, places.size)
        shard = Shard(head, spec, index, consistency.code)
        return Piece(number, key, spec, offset, places.size, head, shard)

    def whole(self, piece: Piece) -> Shard:
        """Returns a table with all of its memory, for the node's own work on its values."""
        assert isinstance(piece.spec, TableSpec)
        assert piece.shard is not None
        return Shard(self._whole(piece), piece.spec, piece.shard.index, piece.shard.mode)

    def _whole(self, piece: Piece) -> Segment:
        sparse = isinstance(piece.spec, MemorySpec) and piece.spec.sparse
        return Segment(self._heap.descriptor, piece.offset, at.round_up(piece.size, at.PAGE), sparse=sparse)

    def _map(self, offset: int, size: int, head: int) -> Segment:
        try:
            return Segment(self._heap.descriptor, offset, at.round_up(head, at.PAGE))
        except BaseException:
            self._heap.release(offset, size)
            raise

    def unlist(self, piece: Piece) -> None:
        """Forgets a piece that was never ready: its name or place in the order is free again."""
        if piece.key[0] == "order":
            self.ordered -= 1
        self._forget(piece)

    def release(self, piece: Piece) -> None:
        """Frees the memory of a piece that is forgotten."""
        self.end_reading(piece.number)
        self._heap.release(piece.offset, piece.size)

    def hold(self, piece: Piece, worker_id: int) -> bool:
        """Notes that a worker has a piece; returns whether it has to be made to take part in its rounds and clocks."""
        piece.holders.add(worker_id)
        return piece.shard is not None and not piece.shard.enrolled(worker_id)

    def withdraw(self, piece: Piece, worker_id: int) -> None:
        """Ends a worker's part in a piece that it did not get to use."""
        piece.holders.discard(worker_id)
        if piece.shard is not None:
            piece.shard.withdraw(worker_id)
        self._control.notify()

    def dropped(self, worker_id: int) -> list[Piece]:
        """A worker has left or is lost; returns what it had."""
        had = [piece for piece in self._pieces.values() if worker_id in piece.holders]
        for piece in had:
            piece.holders.discard(worker_id)
        return had

    def lend(self, piece: Piece, reader: Connection) -> None:
        """Notes that a process outside the job reads a piece: it is notified before the piece goes."""
        known = [other for other in self._readers.get(piece.number, ()) if other.socket.fileno() >= 0]
        self._readers[piece.number] = [*known, reader]

    def end_reading(self, number: int | None = None) -> None:
        """Cuts off those who read a piece, or any: before anything is written in its place."""
        for one in list(self._readers) if number is None else [number]:
            for reader in self._readers.pop(one, ()):
                reader.cut()

    def remove(self, piece: Piece) -> None:
        """Forgets a piece; its number, and its place in the order, are not given to another. Its memory stays."""
        if isinstance(piece.spec, MemorySpec) and piece.spec.once:
            self._over.add(piece.key)
        self._forget(piece)

    def _forget(self, piece: Piece) -> None:
        del self._pieces[piece.number]
        for known_by in _known_by(piece.key, piece.spec):
            if self._number_of[known_by] == piece.number:  # its name may be another's by now
                del self._number_of[known_by]

    def needs(self, worker_id: int) -> bool:
        """Returns whether the others may still need what a worker that is gone has staged for a round."""
        return any(shard.needs(worker_id) for shard in self.shards.values())

    def forget(self, worker_id: int) -> None:
        """A number is given to a new worker: the last one's part in the tables ends."""
        for shard in self.shards.values():
            shard.withdraw(worker_id)
