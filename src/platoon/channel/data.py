"""The minibatch channel: the controller deals minibatches to whichever worker has room.

A worker grants credits, one for each minibatch that it has room for, so a slow worker gets fewer and none is sent to a
worker that is gone. A minibatch is written into memory of its own once, and its descriptor is what travels. The
controller keeps that until the worker says that it has the minibatch, and deals it again to others when the worker has
ended before.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from socket import socket

from multiverso.errors import NodeLostError
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages, trust
from multiverso.wire.messages import Message
from platoon.channel.answering import open_port
from platoon.channel.requests import Requests
from platoon.channel.wire import Array, Minibatch, pack_arrays, unpack_arrays
from platoon.util import PlatoonError, readable

MOST_ROOM = 1000  # minibatches on their way to one worker, as a user may say
_MOST_UNREAD = 100  # of these, in fact: a Unix socket holds somewhat more
_MOST_SPARE = 8
_SLICE_SECONDS = 0.5
_END = {"end": True}
_SENDER = struct.Struct("=i?")
_FULL = (errno.EAGAIN, errno.ETOOMANYREFS)  # so much is unread, by this worker or by all


@dataclass(eq=False)
class _Taker:
    """A worker that takes minibatches.

    Attributes:
        connection: where it is reached.
        on_way: sent, and not known to be received.
    """

    connection: Connection
    on_way: deque[Minibatch] = field(default_factory=deque)


class Senders:
    """What a controller knows of the processes that send its minibatches: its own, and forks of it.

    Memory that they share has a record for each port, whose sender writes it before anybody can connect there. That of
    port 0, from which nobody sends, is the controller's, which closes it.
    """

    def __init__(self) -> None:
        self._controller = os.pidfd_open(os.getpid())
        self._records = mmap.mmap(-1, (1 << 16) * _SENDER.size)

    @property
    def deserted(self) -> bool:
        """Whether this process is a fork, and the controller has closed or ended."""
        return self.ended(0)[1] or bool(readable([self._controller], 0))

    def note(self, port: int, no_more: bool) -> None:
        """This process sends from a port, or has sent all."""
        _SENDER.pack_into(self._records, port * _SENDER.size, os.getpid(), no_more)

    def ended(self, port: int) -> tuple[int, bool]:
        """Returns the process that has sent from a port, or 0, and whether there is no more from there."""
        process, no_more = _SENDER.unpack_from(self._records, port * _SENDER.size)
        return process, no_more

    def close(self) -> None:
        """Forgets them."""
        self.note(0, no_more=True)
        os.close(self._controller)


class BatchServer:
    """The controller's end. Any thread may send, one at a time.

    Args:
        port: the port, 0 for a free one.
        senders: learns that this process sends.
        on_refused: called, in any thread, with what was refused, and why.

    Raises:
        PlatoonError: the port is taken.

    Attributes:
        port: where it listens.
        ended: whether there are no more minibatches.
    """

    def __init__(self, port: int, senders: Senders, on_refused: Callable[[str, str], None]) -> None:
        self._senders, self._on_refused = senders, on_refused
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._takers: dict[socket, _Taker] = {}
        self._next: deque[_Taker] = deque()  # once for each minibatch that it has room for
        self._again: deque[Minibatch] = deque()  # those that their workers did not live to receive come first
        self._most_on_way = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # each holds a descriptor
        self._spare: list[FileIO] = []  # memory of minibatches that were received: to write to it again is faster
        self.ended = False
        self.closed = False
        self._door, self.port = open_port("data", port, on_refused)
        senders.note(self.port, no_more=False)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `look` has something to do."""
        return self._door.fileno()

    def send(self, arrays: Sequence[object] | Array, timeout_seconds: float, all_ended: Callable[[], bool]) -> None:
        """Sends a minibatch to the next worker that has room, and waits for one if none has.

        Args:
            arrays: what it has.
            timeout_seconds: how long to wait.
            all_ended: says whether there is no worker any more.
        """
        poll = select.poll()
        with self._sending:
            if self.ended:
                raise PlatoonError("end_mb() was called: there can be no more minibatches")
            batch = pack_arrays(arrays, self._spare)
            until = time.monotonic() + timeout_seconds
            try:
                with self._lock:
                    if not self.closed:
                        poll.register(self._door, select.POLLIN)
                    self._again.append(batch)
                while not self._has_left(batch):
                    left = until - time.monotonic()
                    if self._senders.deserted:
                        raise PlatoonError("the controller has closed: no worker will take this minibatch")
                    if all_ended():
                        raise PlatoonError("all workers have ended: none will take this minibatch")
                    if left <= 0:
                        raise PlatoonError(f"no worker had room for a minibatch within {timeout_seconds:g} s")
                    poll.poll(1000 * min(left, _SLICE_SECONDS))
            except BaseException:
                with self._lock:
                    if batch in self._again:
                        self._again.remove(batch)
                        batch.close()
                raise

    def _has_left(self, batch: Minibatch) -> bool:
        with self._lock:
            if self.closed:
                raise PlatoonError("the controller is closed: no worker will take this minibatch")
            self._look()
            return batch not in self._again

    def look(self, ended: int | None = None) -> None:
        """Takes note of what workers have said, and deals what waits.

        Args:
            ended: a process that has ended: what was on its way to it goes to others.
        """
        with self._lock:
            if not self.closed:
                self._look(ended)

    def _look(self, ended: int | None = None) -> None:
        for connection, message in self._door.read(all_of_them=True):
            if message is None:
                self._forget(connection)
            else:
                self._note(connection, message)
        for taker in [each for each in self._takers.values() if each.connection.pid == ended]:
            self._forget(taker.connection)
            self._door.end(taker.connection)
        while self._next and (self._again or self.ended):
            if sum(len(taker.on_way) for taker in self._takers.values()) >= self._most_on_way:
                break
            taker = self._next.popleft()
            try:
                if self._again:
                    batch = self._again[0]
                    messages.send(taker.connection.socket, {"arrays": batch.header}, (batch.file.fileno(),))
                    taker.on_way.append(self._again.popleft())
                else:
                    messages.send(taker.connection.socket, _END)
            except OSError as error:
                if error.errno in _FULL:  # it grants another credit when it has read something, and we come back here
                    self._next.append(taker)
                    break
                taker.connection.cut()  # it has gone, and is seen to

    def _note(self, connection: Connection, message: Message) -> None:
        """A worker has room for more, and may have received what is on its way."""
        taker = self._takers.setdefault(connection.socket, _Taker(connection))
        room = message.get("room")
        if message.get("do") != "grant" or type(room) is not int or not 0 < room <= MOST_ROOM - self._next.count(taker):
            self._on_refused("a worker", f"granted no credit for 1 to {MOST_ROOM} minibatches: {message!r:.200}")
            return
        if message.get("received") is True and taker.on_way:
            batch = taker.on_way.popleft()
            if message.get("kept") is False and len(self._spare) < _MOST_SPARE:
                self._spare.append(batch.file)
            else:
                batch.close()
        self._next.extend([taker] * room)

    def _forget(self, connection: Connection) -> None:
        taker = self._takers.pop(connection.socket, None)
        if taker is not None:
            self._again.extendleft(reversed(taker.on_way))
            self._next = deque(each for each in self._next if each is not taker)

    def end(self) -> None:
        """Ends the minibatches, for the workers that wait and for each that asks later."""
        with self._sending:
            self.ended = True
            self._senders.note(self.port, no_more=True)
        self.look()

    def close(self, no_more: bool = True) -> None:
        """Ends the channel.

        Args:
            no_more: announce that there are no more minibatches; otherwise it is an error for those that wait.
        """
        self.closed = True  # a sender that waits sees it
        if no_more:
            self._senders.note(self.port, no_more=True)
        with self._lock:
            for taker in self._takers.values():
                if no_more:
                    with contextlib.suppress(OSError):
                        messages.send(taker.connection.socket, _END)
                self._again.extend(taker.on_way)
            self._door.close()
            for batch in self._again:
                batch.close()
            while self._spare:
                self._spare.pop().close()
            self._again.clear()
            self._takers.clear()


class BatchClient:
    """A worker's end.

    Args:
        port: where the controller sends from.
        room: how many minibatches may be on their way to this worker.
        requests: the worker's connection to the controller.
    """

    def __init__(self, port: int, room: int, requests: Requests) -> None:
        if not 1 <= room <= MOST_ROOM:
            raise PlatoonError(f"data_hwm must be from 1 to {MOST_ROOM}, got {room}")
        self._port, self._room = port, min(room, _MOST_UNREAD)
        self._requests = requests
        self._link: NodeLink | None = None
        self._ended = False
        if not trust.proof_needed():  # which the sender asks for when it sends
            self._connect(time.monotonic())

    def _connect(self, until: float) -> NodeLink | None:
        if self._link is None:
            self._link = self._requests.connect("data", self._port, until)
            if self._link is not None:
                self._link.tell({"do": "grant", "room": self._room})
        return self._link

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a minibatch has come; -1 until the controller is there."""
        return -1 if self._link is None else self._link.connection.fileno()

    def receive(self, copy: bool, timeout_seconds: float) -> list[Array]:
        """Waits for a minibatch; returns its arrays, or an empty list when there are no more.

        Raises:
            PlatoonError: none came in time, there will be none, or its parts do not fit each other.
        """
        if self._ended:
            return []
        until = time.monotonic() + timeout_seconds
        before = 0
        while (link := self._connect(until)) is None:
            # asked each time, so that one that ends just now is heard of
            process, no_more = self._requests.ask("platoon-sender", {"port": self._port})
            if no_more:
                self._ended = True
                return []
            if before == process != 0:  # its port was open when it was said the first time, and then it was not
                raise self._without_end(process)
            before = process
            self._requests.wait(None, until, f"a minibatch, and no sender is on port {self._port}")
        self._requests.wait(link.connection, until, "a minibatch")
        received = messages.receive(link.connection)
        if received is None:
            raise self._without_end(messages.peer(link.connection)[0])
        message, descriptors = received
        try:
            if message.get("end") is True:
                self._ended = True
                return []
            arrays = unpack_arrays(message.get("arrays"), descriptors, copy)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        with contextlib.suppress(NodeLostError):  # what was sent last is there all the same
            link.tell({"do": "grant", "room": 1, "received": True, "kept": not copy})
        return arrays

    def _without_end(self, process: int) -> PlatoonError:
        return PlatoonError(
            f"process {process}, which sent minibatches on port {self._port}, has ended, or closed the channel, "
            "without end_mb(); this worker waited for a minibatch"
        )

    def close(self) -> None:
        """Gives up what is on its way."""
        if self._link is not None:
            self._link.close()
