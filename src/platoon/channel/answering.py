"""The controller's end of its workers' connections: ports, and the requests that come in there."""

from __future__ import annotations

import os
import random
import select
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from multiverso.errors import StartupError
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.entrance import Entrance
from multiverso.wire import messages
from multiverso.wire.messages import Message
from multiverso.wire.requests import Challenge, Prove, request_of
from multiverso.wire.trust import SECRET_VARIABLE
from platoon.channel.wire import RESERVED, dumps, loads, socket_name
from platoon.reporting import Reporter
from platoon.util import PlatoonError, readable

_FREE_PORTS = range(49152, 65536)
_TRIES = 1000
_AT_ONCE = 256  # messages read of one connection before others, when a worker's end is to be noted
_MISSING = object()
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


class Door:
    """A port of a controller: workers of the same user on the same host come in, as they do at a job's node.

    A port is the number that programs have always used; it names a Unix socket, where the kernel says which user is at
    the other end. `fileno` is readable when there is something to `read`.

    Args:
        channel: what the port is for, ``"control"`` or ``"data"``.
        port: its number, 0 for a free one.
        on_refused: called with what was refused, and why.

    Raises:
        PlatoonError: the port is taken, or there is no such port.

    Attributes:
        port: the number.
    """

    def __init__(self, channel: str, port: int, on_refused: Callable[[str, str], None]) -> None:
        self._on_refused = on_refused
        self._connections: dict[int, Connection] = {}
        self.entrance = Entrance(None, os.environ.get(SECRET_VARIABLE), self._refuse_user)
        self.port = _open(self.entrance, channel, port)
        self._poll = select.epoll()
        self._poll.register(self.entrance.listener, select.EPOLLIN)
        _doors.add(self)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is something to read."""
        return self._poll.fileno()

    def read(self, all_of_them: bool = False) -> Iterator[tuple[Connection, Message | None]]:
        """Yields what has come, with where it came from; None for a connection that has ended. Never blocks.

        Args:
            all_of_them: all that has come over each connection (up to 256 messages), and not the first message alone.
        """
        ready = dict(self._poll.poll(0))
        if self.entrance.listener.fileno() in ready:
            accepted = self.entrance.accept(self._poll)
            self._connections.update({each.socket.fileno(): each for each in accepted})
            ready = dict(self._poll.poll(0))
        for descriptor in ready:
            for _ in range(_AT_ONCE if all_of_them else 1):
                if descriptor not in self._connections or not (yield from self._read(self._connections[descriptor])):
                    break

    def _read(self, connection: Connection) -> Generator[tuple[Connection, Message | None], None, bool]:
        """Yields a message, if there is one; returns whether there may be another."""
        try:
            received = messages.receive(connection.socket)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            self._on_refused("a worker", f"sent no message: {error}")
            received = None
        if received is None:
            self.end(connection)
            yield connection, None
            return False
        message, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        if message.get("do") in ("challenge", "prove"):
            self._prove(connection, message)
        elif connection.proven:
            yield connection, message
        else:
            self._on_refused("a connection", "did not prove that it knows the job's secret")
            connection.cut()
        return True

    def _prove(self, connection: Connection, message: Message) -> None:
        """Where users cannot be told apart, each side proves to the other that it is this user's."""
        try:
            match request_of(message):
                case Challenge() as request:
                    self.entrance.challenge(connection, request)
                case Prove() as request:
                    self.entrance.prove(connection, request)
        except StartupError as error:
            self._on_refused("a connection", str(error))
            connection.refuse(message.get("id"), error)

    def _refuse_user(self, pid: int, uid: int) -> None:
        self._on_refused(f"process {pid}", f"belongs to user {uid}")

    def end(self, connection: Connection) -> None:
        """Ends a connection."""
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._poll.unregister(connection.socket)
            connection.socket.close()

    def close(self) -> None:
        """Ends the port and its connections; what was sent stays there to be read."""
        self.entrance.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._poll.close()


def _open(entrance: Entrance, channel: str, port: int) -> int:
    if not 0 <= port < 65536:
        raise PlatoonError(f"a port is a number from 1 to 65535, or 0 for a free one; got {port}")
    for number in [port] if port else random.SystemRandom().sample(_FREE_PORTS, _TRIES):
        try:
            entrance.open(socket_name(channel, number))
            return number
        except OSError as error:
            refused = error
    raise PlatoonError(
        f"cannot listen on port {port} ({refused.strerror}); another controller may be using it: "
        "give this one --control-port or --data-port"
    ) from refused


def _after_fork_in_child() -> None:
    """A child that kept the connections would make its parent look alive after its end."""
    for door in list(_doors):
        door.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class BadRequest(Exception):
    """A request that no `Worker` sends."""


@dataclass(frozen=True)
class Query:
    """A request that was read: what is asked, by which process, and what goes with it."""

    req: Any
    worker_id: int
    info: Any

    @classmethod
    def read(cls, message: Message, pid: int) -> Query:
        """Returns what a message asks.

        Raises:
            BadRequest: it is not a request of a worker.
        """
        try:
            query = loads(message["query"]) if isinstance(message.get("query"), str) else None
        except PlatoonError as error:
            raise BadRequest(f"a request cannot be read: {error}") from error
        if not isinstance(query, dict) or query.keys() != {"req", "req_info"}:
            raise BadRequest(f"a request has req and req_info; got {message!r:.200}")
        return cls(query["req"], pid, query["req_info"])

    @property
    def reserved(self) -> bool:
        """Whether the controller answers it itself, and not the user's ``handle_control``."""
        return isinstance(self.req, str) and self.req.startswith(RESERVED)

    def field(self, name: str, *kinds: type) -> Any:
        """Returns an entry of what goes with the request, which has to be of one of these types."""
        value = self.info.get(name, _MISSING) if isinstance(self.info, dict) else _MISSING
        if type(value) not in kinds:
            raise BadRequest(f"the request {self.req!r:.100} needs {name}; got {self.info!r:.200}")
        return value


class Answering:
    """Reads the workers' requests, and gives each an answer, whatever it asks. Owner: the thread that serves.

    Args:
        port: where they arrive, 0 for a free one.
        reporter: takes requests that make no sense.
        answer: answers one.

    Raises:
        PlatoonError: the port is taken.
    """

    def __init__(self, port: int, reporter: Reporter, answer: Callable[[Query], Any]) -> None:
        self.door = Door("control", port, reporter.refuse)
        self._reporter, self._answer = reporter, answer

    @property
    def have_come(self) -> bool:
        """Whether there is something to read; never blocks."""
        return bool(readable([self.door], 0))

    def answer(self, all_of_them: bool) -> bool:
        """Answers those that have come: one of each worker, or all of them when a worker's end is to be noted.

        Returns:
            False when the program's own code has failed in one, which its worker learns.
        """
        return all(
            message is None or self._answer_one(connection, message)
            for connection, message in self.door.read(all_of_them)
        )

    def _answer_one(self, connection: Connection, message: Message) -> bool:
        try:
            connection.reply(message.get("id"), {"answer": dumps(self._answer(Query.read(message, connection.pid)))})
        except PlatoonError as error:
            connection.reply(message.get("id"), {"failed": str(error)})
        except BadRequest as error:
            self._reporter.refuse("a request", f"makes no sense: {error}")
            connection.reply(message.get("id"), {"failed": str(error)})
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            connection.reply(message.get("id"), {"failed": f"the controller failed:\n{text}"})
            self._reporter.say("failed", f"the controller failed in handle_control:\n{text}")
            return False
        return True
