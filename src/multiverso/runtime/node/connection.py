"""One process that talks to the node."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from multiverso.errors import MultiversoError, StartupError
from multiverso.wire import messages
from multiverso.wire.messages import Message


@dataclass(eq=False)
class Connection:
    """One connected process: a worker once it has attached, an observer otherwise. Owner: the node's thread."""

    socket: socket.socket
    pid: int
    proven: bool = True  # False until it has proven that it knows the job's secret, where that is asked for
    nonces: tuple[str, str] | None = None
    worker_id: int | None = None
    life: int | None = None
    enrolled_in: int | None = None  # the table that its last request made it take part in

    @property
    def attached_id(self) -> int:
        """The worker's number.

        Raises:
            StartupError: it has none.
        """
        if self.worker_id is None:
            raise StartupError("this process takes no part in the job (any more): attach first")
        return self.worker_id

    def reply(self, number: int | None, body: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Answers the request of this number. A peer that does not read is cut off; one that is gone is ignored."""
        try:
            messages.send(self.socket, {"re": number, **body}, descriptors)
        except BlockingIOError:
            self.cut()
        except OSError:
            pass

    def cut(self) -> None:
        """Ends it on both sides; the node sees that like any other's end."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def refuse(self, number: int | None, error: MultiversoError) -> None:
        """Answers the request of this number with an error that the session raises."""
        lost = list(getattr(error, "worker_ids", ()))
        self.reply(number, {"error": type(error).__name__, "message": str(error), "worker_ids": lost})
