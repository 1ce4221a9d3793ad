"""What this host's workers ask the coordinator, and who gets its answers."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.hosts.control.messages import Answer, Ask, Report, Say
from multiverso.runtime.node.connection import Connection
from multiverso.wire.messages import Message


class Questions:
    """Owner: the node's thread.

    Args:
        report: brings a report to the coordinator.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._waiting: dict[int, tuple[Connection, Message]] = {}  # each worker asks one thing at a time

    def ask(self, connection: Connection, request: Message) -> None:
        """A worker asks something. What it asked before is forgotten."""
        worker = connection.attached_id
        self._waiting[worker] = connection, request
        number = int(request["id"])
        self._report(Ask(worker, number, request["question"]))

    def say(self, connection: Connection, request: Message) -> None:
        """A worker says something that has no answer."""
        self._report(Say(connection.attached_id, request["saying"]))

    def answer(self, order: Answer) -> None:
        """The coordinator answers."""
        connection, request = self._waiting.get(order.worker, (None, {}))
        if connection is None or request["id"] != order.number:
            return  # nobody waits for it any more
        if "wait" not in order.answer:
            del self._waiting[order.worker]
        connection.reply(request, {"answer": order.answer})

    def forget(self, connection: Connection) -> None:
        """A worker's connection has ended."""
        self._waiting = {who: asked for who, asked in self._waiting.items() if asked[0] is not connection}
