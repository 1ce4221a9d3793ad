"""Requests that have come to a controller: read one at a time, each with an answer, whatever it asks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import zmq

from platoon.channel.query import BadRequest, Query
from platoon.channel.secret import Secret
from platoon.channel.wire import dumps
from platoon.reporting import Reporter
from platoon.util import PlatoonError

_AT_ONCE = 256  # requests answered before an end is noted all the same, when others ask without end


class Answering:
    """The controller's end of the workers' questions. Owner: the thread that serves.

    Args:
        socket: where they arrive.
        secret: what answers are signed with.
        reporter: hears of what makes no sense.
        answer: answers one.
    """

    def __init__(
        self, socket: zmq.Socket, secret: Secret, reporter: Reporter, answer: Callable[[Query], Any]
    ) -> None:
        self.socket = socket
        self._secret, self._reporter, self._answer = secret, reporter, answer

    @property
    def have_come(self) -> bool:
        """Whether one is there to be read; never blocks."""
        return bool(self.socket.get(zmq.EVENTS) & zmq.POLLIN)

    def answer(self, all_of_them: bool) -> bool:
        """Answers one: asking whether there is another costs as much as the poll for everything.

        Those that have come, when a worker's end is to be noted: what it asked before comes first.

        Returns:
            False when the program's own code has failed in one, which its worker is told.
        """
        for _ in range(_AT_ONCE if all_of_them else 1):
            if not self._answer_one():
                return False
            if not (all_of_them and self.have_come):
                break
        return True

    def _answer_one(self) -> bool:
        worker, *parts = self.socket.recv_multipart()
        if len(parts) != 2:
            self._reporter.refuse("a worker", f"sent a message of {len(parts)} parts and not 2")
            return True
        number, message = parts
        address = [worker, number]
        try:
            self._reply(address, {"ok": self._answer(Query.read(message))})
        except PlatoonError as error:
            self._reply(address, {"error": str(error)})
        except BadRequest as error:
            self._reporter.refuse("a request", f"makes no sense: {error}")
            self._reply(address, {"error": str(error)})
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            self._reply(address, {"error": f"the controller failed:\n{text}"})
            self._reporter.say("failed", f"the controller failed in handle_control:\n{text}")
            return False
        return True

    def _reply(self, address: list[bytes], answer: dict[str, Any]) -> None:
        worker, number = address
        self.socket.send_multipart([worker, number, self._secret.proof(number) + dumps(answer)])
