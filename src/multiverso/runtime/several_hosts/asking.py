"""This host's workers' questions to the coordinator, their notes for all workers, and the answers."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.errors import MultiversoError
from multiverso.hosts.control.messages import Answer, Ask, Report, Say, Tell, Told
from multiverso.runtime.node.connection import Connection
from multiverso.wire import requests as asked


class Asking:
    """Owner: the node's thread.

    Args:
        report: brings a report to the coordinator.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._asked: dict[int, tuple[Connection, asked.Ask]] = {}  # each worker asks one thing at a time
        self._told: list[tuple[Connection, asked.Tell]] = []

    def ask(self, connection: Connection, request: asked.Ask) -> None:
        """A worker asks something. What it asked before is forgotten."""
        worker = connection.attached_id
        self._asked[worker] = connection, request
        self._report(Ask(worker, request.id or 0, request.question))

    def say(self, connection: Connection, request: asked.Say) -> None:
        """A worker says something that has no answer."""
        self._report(Say(connection.attached_id, request.saying))

    def tell(self, connection: Connection, request: asked.Tell) -> None:
        """A worker's note for the workers of all hosts; it is answered once all have sent theirs."""
        report = Tell(request.number, connection.attached_id, request.note)
        self._told.append((connection, request))
        self._report(report)

    def answer(self, order: Answer | Told) -> None:
        """The coordinator answers."""
        if isinstance(order, Told):
            for connection, told in self._told:
                if told.number == order.number:
                    connection.reply(told.id, {"notes": order.notes})
            self._told = [told for told in self._told if told[1].number != order.number]
            return
        found = self._asked.get(order.worker)
        if found is None or found[1].id != order.number:
            return  # it is no longer waited for
        connection, request = found
        if "wait" not in order.answer:
            del self._asked[order.worker]
        connection.reply(request.id, {"answer": order.answer})

    def refuse(self, error: MultiversoError) -> None:
        """Some notes will never come: those that wait for them get the reason."""
        for connection, request in self._told:
            connection.refuse(request.id, error)
        self._told.clear()

    def forget(self, connection: Connection) -> None:
        """A worker's connection has ended, or it no longer waits."""
        self._asked = {who: found for who, found in self._asked.items() if found[0] is not connection}
        self._told = [told for told in self._told if told[0] is not connection]
