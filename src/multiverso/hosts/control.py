"""The nodes' control connections: each node has one to the coordinator, which is in the first host's node.

A shell around `Coordinator`: threads that send and receive, nothing that decides. Reports and orders are JSON objects,
one a message.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.channel import Channel
from multiverso.hosts.coordinator import Coordinator, Message, lines_of
from multiverso.hosts.credentials import Credentials
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport import (
    CONTROL,
    HANDSHAKE_SECONDS,
    Hello,
    Listener,
    Messages,
    RefusedError,
    accept,
    connect,
)

_CONNECT_SECONDS = 60.0
_JOIN_SECONDS = 10.0
_STRANGERS = 16  # connections that have not proven anything yet

Deliver = Callable[[Message], None]


class Speaker:
    """Sends messages over a channel in a thread of its own: who has something to say never waits for the other end."""

    def __init__(self, channel: Messages, name: str) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def say(self, message: Message) -> None:
        """Puts a message in the line."""
        self._queue.put(message)

    def close(self) -> None:
        """Sends what is in the line, and ends."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._channel.send(json.dumps(message).encode())
            except OSError:
                return  # the receiving thread finds out, too, and tells


class Centre:
    """The coordinator's end, in the first host's node.

    Args:
        roster: the job's hosts.
        listener: where the other nodes' control connections come in; closed by `close`.
        deliver: gets the orders for this host, from any thread.
    """

    def __init__(self, roster: Roster, listener: Listener, deliver: Deliver) -> None:
        self._roster = roster
        self._listener = listener
        self._deliver = deliver
        self._coordinator = Coordinator(roster)
        self._lock = threading.Lock()
        self._channels: dict[int, Messages] = {}
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._speakers: dict[int, Speaker] = {}
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._accepting = self._start(self._accept, "multiverso-hosts-accept")

    @property
    def all_came(self) -> bool:
        """Whether every other host has connected, some time or other."""
        return len(self._channels) == self._roster.hosts - 1

    def report(self, message: Message) -> None:
        """A report of this host's own; as JSON carries it, so that it compares with the others'."""
        self._take(0, _parse(json.dumps(message).encode()))

    def close(self) -> None:
        """Ends all connections; the other nodes take it for the loss of the coordinator unless the job is over."""
        self._closing.set()
        self._listener.close()
        for speaker in list(self._speakers.values()):
            speaker.close()
        for channel in list(self._channels.values()):
            channel.close()
        self._accepting.join(_JOIN_SECONDS)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _start(self, target: Callable[..., None], name: str, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._listener.accept()
            except OSError:
                if self._closing.wait(0.05):  # out of descriptors, perhaps not for long
                    return
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(self._start(self._let_in, "multiverso-hosts-control", connection))

    def _let_in(self, connection: socket.socket) -> None:
        roster = self._roster
        try:
            deadline = Deadline.after(HANDSHAKE_SECONDS)
            channel, theirs = accept(connection, credentials_of(roster), _hello(roster), deadline)
        except RefusedError as error:
            _log(f"a connection was refused: {error}")
            return
        except (OSError, MultiversoError):
            return
        finally:
            self._strangers.release()
        messages = Messages(channel)
        with self._lock:
            known = 0 < theirs.host < roster.hosts == theirs.hosts and theirs.role == CONTROL
            fits = known and theirs.host not in self._channels
            if fits:
                self._channels[theirs.host] = messages
                name = f"multiverso-hosts-tell-{theirs.host}"
                self._speakers[theirs.host] = Speaker(messages, name)
        if fits:
            self._serve(theirs.host, messages)
        messages.close()

    def _serve(self, host: int, messages: Messages) -> None:
        why = "its connection to the coordinator ended"
        try:
            while (body := messages.receive()) is not None:
                self._take(host, _parse(body))
        except (KeyError, TypeError, ValueError) as error:
            why = f"it sent what is no report ({error!r})"
        except OSError as error:
            why = f"its connection to the coordinator broke ({error.strerror or error})"
        if not self._closing.is_set():
            self._lose(host, why)

    def _take(self, host: int, report: Message) -> None:
        if report.get("do") == "workers":
            report = {**report, "workers": lines_of(report["workers"])}
        with self._lock:
            self._give(self._coordinator.receive(host, report))

    def _lose(self, host: int, why: str) -> None:
        with self._lock:
            self._give(self._coordinator.lose(host, why))

    def _give(self, orders: list[tuple[int, Message]]) -> None:
        for host, order in orders:
            if host == 0:
                self._deliver(order)
            elif host in self._speakers:
                self._speakers[host].say(order)


class Outpost:
    """Another host's end.

    Args:
        roster: the job's hosts.
        address: where this host's copies are reached.
        deliver: gets the coordinator's orders, and a last one of its own when the connection has ended:
            ``{"do": "alone", "why": ...}``.

    Raises:
        StartupError: the coordinator cannot be reached, or turned this host away.
    """

    def __init__(self, roster: Roster, address: Any, deliver: Deliver) -> None:
        self._deliver = deliver
        self._closing = False
        channel = _dial(roster)
        self._channel = Messages(channel)
        self._speaker = Speaker(self._channel, "multiverso-hosts-tell")
        self._speaker.say({"do": "hello", "address": address})
        self._thread = threading.Thread(target=self._listen, name="multiverso-hosts-control", daemon=True)
        self._thread.start()

    @property
    def all_came(self) -> bool:
        """Whether there is nobody to wait for: that is the coordinator's business."""
        return True

    def report(self, message: Message) -> None:
        """Sends a report."""
        self._speaker.say(message)

    def close(self) -> None:
        """Ends the connection, after what was reported has been sent."""
        self._closing = True
        self._speaker.close()
        self._channel.close()
        self._thread.join(_JOIN_SECONDS)

    def _listen(self) -> None:
        why = "the connection to it ended"
        try:
            while (body := self._channel.receive()) is not None:
                self._deliver(_parse(body))
        except OSError as error:
            why = f"the connection to it broke ({error.strerror or error})"
        except (KeyError, ValueError) as error:
            why = f"it sent what is no order ({error!r})"
        if not self._closing:
            self._deliver({"do": "alone", "why": why})


def credentials_of(roster: Roster) -> Credentials:
    """Returns the job's credentials."""
    return Credentials.from_text(roster.credentials)


def _hello(roster: Roster) -> Hello:
    return Hello(roster.host, roster.hosts, int.from_bytes(os.urandom(8), "big"), role=CONTROL)


def _dial(roster: Roster) -> Channel:
    """Connects to the coordinator, which may not be there yet."""
    end = Deadline.after(_CONNECT_SECONDS)
    while True:
        try:
            return connect(roster.coordinator, credentials_of(roster), _hello(roster), end)[0]
        except RefusedError:
            raise
        except OSError as error:
            if end.passed:
                where = "{}:{}".format(*roster.coordinator)
                raise StartupError(
                    f"the node of {roster.names[0]}, the job's first host, cannot be reached at {where} "
                    f"({error.strerror or error}): is it running, and does a firewall let this port through?"
                ) from error
        time.sleep(0.05)


def _log(line: str) -> None:
    print(f"multiverso: node: {line}", file=sys.stderr, flush=True)


def _parse(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    return message
