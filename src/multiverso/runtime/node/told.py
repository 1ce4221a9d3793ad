"""What workers of all hosts tell each other: each tells something, and waits for what all have told."""

from __future__ import annotations

from multiverso.errors import MultiversoError
from multiverso.runtime.node.connection import Connection
from multiverso.wire.messages import Message


class Told:
    """This host's workers that have told something. Owner: the node's thread; the coordinator has what they said."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Connection, Message]] = []

    def wait(self, connection: Connection, request: Message) -> None:
        """A worker has told something; it is answered once all have."""
        self._waiting.append((connection, request))

    def answer(self, number: int, notes: dict[int, str | None]) -> None:
        """All workers have told something."""
        for connection, request in self._waiting:
            if request["number"] == number:
                connection.reply(request, {"notes": notes})
        self._waiting = [waiting for waiting in self._waiting if waiting[1]["number"] != number]

    def refuse(self, error: MultiversoError) -> None:
        """Some will never tell: whoever waits is told why."""
        for connection, request in self._waiting:
            connection.refuse(request, error)
        self._waiting.clear()

    def forget(self, connection: Connection) -> None:
        """A process no longer waits."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0] is not connection]
