"""A socket of ours and who has come in there: processes of this user, wherever that can be told."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Generator, Iterator

from multiverso.errors import StartupError
from multiverso.in_process import close_in_children
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.entrance import Entrance
from multiverso.wire import messages
from multiverso.wire.messages import Message
from multiverso.wire.requests import Challenge, Prove, request_of

_AT_ONCE = 256  # messages read of one connection before others


class Door:
    """Lets processes in, and reads what they say. `fileno` is readable when there is something to `read`.

    Where users cannot be told apart, what a process says before it has proven that it is this user's is not heard, and
    ends its connection. In a forked child all is closed: it would make its parent look alive after its end.

    Args:
        entrance: where they come in, open.
        on_refused: called with who was refused, and why.

    Owner: one thread at a time.
    """

    def __init__(self, entrance: Entrance, on_refused: Callable[[str, str], None] = lambda who, why: None) -> None:
        self.entrance = entrance
        self._on_refused = on_refused
        self._connections: dict[int, Connection] = {}
        self._poll = select.epoll()
        self._poll.register(entrance.listener, select.EPOLLIN)
        close_in_children(self, Door.close)

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
        if message.get("do") in ("challenge", "prove") or not connection.proven:
            self._prove(connection, message)
        else:
            yield connection, message
        return True

    def _prove(self, connection: Connection, message: Message) -> None:
        """Where users cannot be told apart, each side proves to the other that it is this user's."""
        try:
            match request_of(message):
                case Challenge() as request:
                    self.entrance.challenge(connection, request)
                case Prove() as request:
                    self.entrance.prove(connection, request)
                case _:
                    raise StartupError("it has not proven that it knows this user's, or the job's, secret")
        except StartupError as error:
            self._on_refused("a connection", str(error))
            connection.refuse(message.get("id"), error)
            if not connection.proven:
                connection.cut()

    def end(self, connection: Connection) -> None:
        """Ends a connection."""
        if self._connections.pop(connection.socket.fileno(), None) is not None:
            self._poll.unregister(connection.socket)
            connection.socket.close()

    def close(self) -> None:
        """Lets nobody in any more, and ends the connections; what was sent stays there to be read."""
        self.entrance.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        self._poll.close()
