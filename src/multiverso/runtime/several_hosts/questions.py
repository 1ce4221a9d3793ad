"""This host's workers' questions to the coordinator, their notes for all workers, and the answers."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.errors import MultiversoError
from multiverso.hosts.control.messages import AllGather, AllGathered, Answer, Ask, Report
from multiverso.runtime.node.connection import Connection
from multiverso.wire import requests as asked


class Questions:
    """Owner: the node's thread.

    Args:
        report: brings a report to the coordinator.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._asked: dict[int, tuple[Connection, asked.Ask]] = {}  # each worker asks one thing at a time
        self._gathering: list[tuple[Connection, asked.AllGather]] = []

    def ask(self, connection: Connection, request: asked.Ask) -> None:
        """A worker asks something. What it asked before is forgotten."""
        worker = connection.attached_id
        self._asked[worker] = connection, request
        self._report(Ask(worker, request.id or 0, request.question))

    def notify(self, connection: Connection, request: asked.Notify) -> None:
        """A worker says something that has no answer."""
        self._report(Ask(connection.attached_id, 0, request.saying))

    def all_gather(self, connection: Connection, request: asked.AllGather) -> None:
        """A worker's note for the workers of all hosts; it is answered once all have sent theirs."""
        report = AllGather(request.number, connection.attached_id, request.note)
        self._gathering.append((connection, request))
        self._report(report)

    def answer(self, order: Answer | AllGathered) -> None:
        """The coordinator answers."""
        if isinstance(order, AllGathered):
            for connection, gathering in self._gathering:
                if gathering.number == order.number:
                    connection.reply(gathering.id, {"notes": order.notes})
            self._gathering = [each for each in self._gathering if each[1].number != order.number]
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
        for connection, gathering in self._gathering:
            connection.refuse(gathering.id, error)
        self._gathering.clear()

    def forget(self, connection: Connection) -> None:
        """A worker's connection has ended, or it no longer waits."""
        self._asked = {who: found for who, found in self._asked.items() if found[0] is not connection}
        self._gathering = [each for each in self._gathering if each[0] is not connection]
