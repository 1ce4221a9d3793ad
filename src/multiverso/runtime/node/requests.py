"""Answers the requests of processes on the node's host, and returns its status as JSON can carry it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.control.messages import Note
from multiverso.layout import words as at
from multiverso.memory.heap import for_reading
from multiverso.runtime.job.logged import MEMORY
from multiverso.runtime.job.processes import note_of
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.creation import Asked
from multiverso.runtime.node.entrance import Entrance
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.one_host import Hosts
from multiverso.spec.table import MemorySpec, TableSpec
from multiverso.wire import requests as asked
from multiverso.wire.messages import Message

_LIVENESS = {at.ALIVE: "alive", at.LOST: "lost"}
_UNKNOWN = Note("", 0.0, 0, None, {})
_KNOWN = ("program", "cpu_seconds", "resident_bytes", "logged")  # as `note_of` has it


@dataclass(frozen=True)
class Requests:
    """Owner: the node's thread.

    Attributes:
        entrance: where the processes came from.
        members: who is in the job.
        began: when the node did (``time.monotonic()``).
        hosts: those of the job.
    """

    entrance: Entrance
    members: Membership
    began: float
    hosts: Hosts

    def status(self) -> dict[str, Any]:
        """Returns what ``multiverso top`` shows: workers and their waits, tables with statistics, ways to hosts."""
        control, catalogue = self.members.control, self.members.catalogue
        notes = self.hosts.notes()
        graph = catalogue.wait_graph()
        now = time.monotonic_ns()
        logged = catalogue.memory(MEMORY)
        workers = []
        for worker in graph.workers.values():
            wait, there = worker.wait, notes.get(worker.worker_id, _UNKNOWN)
            is_here = worker.host == control.here
            note = (
                note_of(worker, logged, control.index.of(worker.worker_id))
                if is_here
                else {what: getattr(there, what) for what in _KNOWN}
            )
            workers.append(
                {
                    "id": worker.worker_id,
                    "pid": worker.pid,
                    "host": worker.host or None,
                    "state": "left" if worker.has_left else _LIVENESS.get(worker.liveness, "free"),
                    "waiting_for": graph.name_of(wait) if wait else None,
                    "waiting_seconds": (now - wait.since_ns) / 1e9 if wait else 0.0,
                    "needs": graph.missing(wait) if wait else [],
                    "waited_seconds": control.waited_seconds(worker.worker_id),
                    "incarnation": worker.incarnation,
                    "checkpoint": control.checkpoint(worker.worker_id),
                    **note,
                }
            )
        tables = [
            {
                "id": table_id,
                "name": shard.spec.name,
                "kind": shard.spec.kind,
                "shape": list(shard.spec.shape),
                "dtype": shard.spec.dtype,
                "updater": shard.spec.updater,
                "rounds": shard.committed,
                "workers": {i: shard.statistics(i) for i in sorted(graph.workers) if i < shard.workers}
                | {i: note.tables[table_id] for i, note in notes.items() if table_id in note.tables},
            }
            for table_id, shard in catalogue.shards.items()
            if shard.spec.part_of is None
        ]
        for called, table in catalogue.keyed_tables().items():
            remote = {worker: dict(note.keyed[called]) for worker, note in notes.items() if called in note.keyed}
            rows, columns = table["shape"]
            shape = [rows + sum(int(counts.pop("rows", 0)) for counts in remote.values()), columns]
            lines = table["workers"] | remote
            tables.append(
                table | {"shape": shape, "workers": {i: lines[i] for i in sorted(graph.workers) if i in lines}}
            )
        return {
            "address": self.entrance.address,
            "host": control.here or None,
            "job": self.hosts.job,
            "leads": self.hosts.leads,
            "workers_num": self.members.workers_num,
            "up_seconds": time.monotonic() - self.began,
            "memory_bytes": self.members.memory.heap.used,
            "lost": control.lost(),
            "workers": workers,
            "tables": tables,
            "links": self.hosts.links(),
            "publications": self.hosts.remote_publications(),
        }

    def answer(self, connection: Connection, message: Message) -> None:
        """Does what is asked for, now or when others have asked too, or says why it cannot be."""
        try:
            if not connection.proven and message.get("do") not in ("challenge", "prove"):
                raise StartupError(
                    "this node cannot tell users apart, and this process has not proven that it knows the job's secret"
                )
            self._answer(connection, asked.request_of(message))
        except MultiversoError as error:
            connection.refuse(message.get("id"), error)
        except (KeyError, TypeError, ValueError) as error:
            # one worker's broken message must not end everybody's job
            text = str(message)[:500]
            connection.refuse(message.get("id"), StartupError(f"the node cannot read this request ({error!r}): {text}"))

    def _answer(self, connection: Connection, request: asked.Request) -> None:
        members = self.members
        match request:
            case asked.Hello():
                connection.reply(request.id, {})
            case asked.Challenge():
                self.entrance.challenge(connection, request)
            case asked.Prove():
                self.entrance.prove(connection, request)
            case asked.Status():
                connection.reply(request.id, {"status": self.status()})
            case asked.Look():
                _look(connection, request, members.catalogue, members.memory.heap.descriptor)
            case asked.Find():
                connection.reply(request.id, self.hosts.find(request.name))
            case asked.Attach():
                members.attach(connection, request)
            case asked.Ready():
                members.ready(connection, request)
            case asked.Withdraw():
                members.withdraw(connection, request)
            case asked.Create():
                spec = TableSpec.from_message(request.spec)
                if spec.name is None and request.order is None:
                    raise StartupError("a table has a name, or a number in the order of creation")
                members.creations.ask(Asked(connection, request, spec, members.mode))
            case asked.Share():
                memory = MemorySpec.from_message(request.spec)
                members.creations.ask(Asked(connection, request, memory, ""))
            case asked.Initialised():
                members.creations.initialised(connection.attached_id)
            case asked.Leaving():
                connection.reply(request.id, {"lines": members.leaving(connection.attached_id)})
            case asked.Close():
                members.creations.close(request.number, connection.attached_id)
                connection.reply(request.id, {"closed": True})
            case asked.Cancel():
                members.forget(connection)
                if connection.worker_id is not None:
                    members.creations.cancel(connection, request.why)
            case _:
                self.hosts.answer(connection, request)


def _look(connection: Connection, request: asked.Look, catalogue: Catalogue, descriptor: int) -> None:
    """Gives a process that only looks at a table its place, and memory that cannot be written to.

    Args:
        connection: of the process that asks: one of this user (that knows the job's secret, where that is asked for).
        request: names it.
        catalogue: what the job has.
        descriptor: of the job's memory.

    Raises:
        StartupError: this system gives no descriptor that is only for reading.
    """
    piece = catalogue.find(("memory", request.name))
    if piece is None:
        connection.reply(request.id, {"offset": None})
        return
    with for_reading(descriptor) as reading:
        catalogue.lend(piece, connection)
        connection.reply(request.id, {"offset": piece.offset, "size": piece.size}, (reading.fileno(),))
