"""What this host's workers ask the coordinator, or tell all workers, and who gets the answers."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.errors import MultiversoError
from multiverso.hosts.control.messages import Answer, Ask, Report, Say, Tell, Told
from multiverso.runtime.node.connection import Connection
from multiverso.wire.messages import Message


class Asking:
    """Owner: the node's thread.

    Args:
        report: brings a report to the coordinator.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._asked: dict[int, tuple[Connection, Message]] = {}  # each worker asks one thing at a time
        self._told: list[tuple[Connection, Message]] = []

    def ask(self, connection: Connection, request: Message) -> None:
        """A worker asks something. What it asked before is forgotten."""
        worker = connection.attached_id
        self._asked[worker] = connection, request
        self._report(Ask(worker, int(request["id"]), request["question"]))

    def say(self, connection: Connection, request: Message) -> None:
        """A worker says something that has no answer."""
        self._report(Say(connection.attached_id, request["saying"]))

    def tell(self, connection: Connection, request: Message) -> None:
        """A worker tells the workers of all hosts something; it is answered once all have told something."""
        report = Tell(int(request["number"]), connection.attached_id, str(request["note"]))
        self._told.append((connection, request))
        self._report(report)

    def answer(self, order: Answer | Told) -> None:
        """The coordinator answers."""
        if isinstance(order, Told):
            for connection, request in self._told:
                if request["number"] == order.number:
                    connection.reply(request, {"notes": order.notes})
            self._told = [told for told in self._told if told[1]["number"] != order.number]
            return
        asked = self._asked.get(order.worker)
        if asked is None or asked[1]["id"] != order.number:
            return  # nobody waits for it any more
        connection, request = asked
        if "wait" not in order.answer:
            del self._asked[order.worker]
        connection.reply(request, {"answer": order.answer})

    def refuse(self, error: MultiversoError) -> None:
        """Some will never tell: whoever waits for that is told why."""
        for connection, request in self._told:
            connection.refuse(request, error)
        self._told.clear()

    def forget(self, connection: Connection) -> None:
        """A worker's connection has ended, or it no longer waits."""
        self._asked = {who: asked for who, asked in self._asked.items() if asked[0] is not connection}
        self._told = [told for told in self._told if told[0] is not connection]
