"""What the node does for each request of a process on its host; `wire.requests` says what requests look like."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from multiverso.errors import MultiversoError, StartupError
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.entrance import Entrance
from multiverso.runtime.node.hosts import Hosts
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.status import status_of
from multiverso.spec.table import MemorySpec, TableSpec
from multiverso.wire.messages import Message
from multiverso.wire.requests import asked, check


class Requests:
    """Owner: the node's thread.

    Args:
        entrance: where the processes came from.
        members: who is in the job.
        began: when the node did (``time.monotonic()``).
        hosts: those of the job.
    """

    def __init__(self, entrance: Entrance, members: Membership, began: float, hosts: Hosts) -> None:
        self._entrance = entrance
        self._members = members
        self._began = began
        self._hosts = hosts

    def status(self) -> dict[str, Any]:
        """Returns what ``multiverso top`` shows: workers, what they wait for, tables and their statistics."""
        return status_of(self._entrance.address, self._began, self._members, self._hosts)

    def answer(self, connection: Connection, request: Message) -> None:
        """Does what is asked for, now or when others have asked too, or says why it cannot be."""
        try:
            do = asked(request)
            if not connection.proven and do not in ("challenge", "prove"):
                raise StartupError(
                    "this node cannot tell users apart, and this process has not proven that it knows the job's secret"
                )
            check(request)
            self._handler(do)(connection, request)
        except MultiversoError as error:
            connection.refuse(request, error)
        except (KeyError, TypeError, ValueError) as error:
            # one worker's broken message must not end everybody's job
            text = str(request)[:500]
            connection.refuse(request, StartupError(f"the node cannot read this request ({error!r}): {text}"))

    def _handler(self, do: str) -> Callable[[Connection, Message], None]:
        # made for each request: kept, it would be a cycle, and keep the job's memory until a collection
        handlers = self._hosts.requests() | {
            "hello": self._hello,
            "challenge": self._entrance.challenge,
            "prove": self._entrance.prove,
            "attach": self._members.attach,
            "ready": self._members.ready,
            "withdraw": self._members.withdraw,
            "create": self._create,
            "share": self._share,
            "initialised": self._initialised,
            "close": self._close_table,
            "cancel": self._cancel,
            "status": self._status,
            "look": self._look,
        }
        if do not in handlers:
            raise StartupError(f"only workers of a job on several hosts send the request {do!r}")
        return handlers[do]

    # -- of any process --------------------------------------------------------------------------------------

    def _hello(self, connection: Connection, request: Message) -> None:
        connection.reply(request, {})

    def _status(self, connection: Connection, request: Message) -> None:
        connection.reply(request, {"status": self.status()})

    def _look(self, connection: Connection, request: Message) -> None:
        _look(connection, request, self._members.catalogue, self._members.memory)

    # -- of workers, for tables ------------------------------------------------------------------------------

    def _create(self, connection: Connection, request: Message) -> None:
        spec = TableSpec.from_message(request["spec"])
        key = ("name", spec.name) if spec.name is not None else ("order", int(request["order"]))
        self._members.creations.ask(connection, request, key, spec, self._members.mode)

    def _share(self, connection: Connection, request: Message) -> None:
        spec = MemorySpec.from_message(request["spec"])
        self._members.creations.ask(connection, request, ("memory", spec.name), spec, "")

    def _initialised(self, connection: Connection, request: Message) -> None:
        self._members.creations.initialised(connection.attached_id)

    def _close_table(self, connection: Connection, request: Message) -> None:
        self._members.catalogue.close(int(request["number"]), connection.attached_id)
        connection.reply(request, {"closed": True})

    def _cancel(self, connection: Connection, request: Message) -> None:
        """The session gave up waiting for an answer."""
        self._members.forget(connection)
        if connection.worker_id is not None:
            self._members.creations.cancel(connection, request.get("why"))


def _look(connection: Connection, request: Message, catalogue: Catalogue, descriptor: int) -> None:
    """Gives a process that only looks at a table its place, and memory that cannot be written to.

    Args:
        connection: of whoever asks: a process of this user (that knows the job's secret, where that is asked for).
        request: names a table (``"name"``) or plain memory (``"memory"``).
        catalogue: what the job has.
        descriptor: of the job's memory.

    Raises:
        StartupError: this system gives no descriptor that is only for reading.
    """
    kind, name = request["kind"], request["name"]
    if kind not in ("name", "memory"):
        raise StartupError(f"what is looked at is of the kind 'name' or 'memory'; got {kind!r}")
    piece = catalogue.find((kind, name))
    if piece is None:
        connection.reply(request, {"offset": None})
        return
    body: Message = {"offset": piece.offset, "size": piece.size}
    if isinstance(piece.spec, TableSpec) and piece.shard is not None:
        body |= {"spec": piece.spec.as_message(), "mode": piece.shard.mode, "workers": piece.shard.workers}
    try:
        # another open file of the same memory: what it cannot do, no copy of it can
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"this system gives no memory that can only be read ({error})") from error
    try:
        catalogue.lend(piece, connection)
        connection.reply(request, body, (reading,))
    finally:
        os.close(reading)
