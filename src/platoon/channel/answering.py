"""The controller's end of its workers' connections: ports, and the requests that come in there."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.door import Door
from multiverso.runtime.node.entrance import Entrance
from multiverso.wire.messages import Message
from multiverso.wire.trust import SECRET_VARIABLE
from platoon.channel.wire import RESERVED, dumps, loads, socket_name
from platoon.reporting import Reporter
from platoon.util import PlatoonError

_FREE_PORTS = range(49152, 65536)
_TRIES = 1000
_MISSING = object()


def open_port(channel: str, port: int, on_refused: Callable[[str, str], None]) -> tuple[Door, int]:
    """Opens a port, where workers of the same user on the same host come in, as they do at a job's node.

    A port is the number that programs have always used; it names a Unix socket, where the kernel says which user is at
    the other end.

    Args:
        channel: what the port is for, ``"control"`` or ``"data"``.
        port: its number, 0 for a free one.
        on_refused: called with what was refused, and why.

    Returns:
        What is behind the port, and its number.

    Raises:
        PlatoonError: the port is taken, or there is no such port.
    """
    if not 0 <= port < 65536:
        raise PlatoonError(f"a port is a number from 1 to 65535, or 0 for a free one; got {port}")

    def refuse_user(pid: int, uid: int) -> None:
        on_refused(f"process {pid}", f"belongs to user {uid}")

    entrance = Entrance(None, os.environ.get(SECRET_VARIABLE), refuse_user)
    for number in [port] if port else random.SystemRandom().sample(_FREE_PORTS, _TRIES):
        try:
            entrance.open(socket_name(channel, number))
            return Door(entrance, on_refused), number
        except OSError as error:
            refused = error
    raise PlatoonError(
        f"cannot listen on port {port} ({refused.strerror}); another controller may be using it: "
        "give this one --control-port or --data-port"
    ) from refused


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
        self.door, self.port = open_port("control", port, reporter.refuse)
        self._reporter, self._answer = reporter, answer

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
