"""The threads and the connection of a `Conversation`: a thin shell, in which nothing is decided."""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable

from multiverso.deadline import Deadline
from multiverso.hosts.peer.conversation import Conversation, Timeouts, ending
from multiverso.hosts.transport.channel import Channel

_JOIN_SECONDS = 10.0
FLUSH_SECONDS = 2.0


class Talk:
    """One host's end of its conversation with another. Any thread.

    Args:
        timeouts: how long it waits for the other.
        deliver: gets each message once, in order, by one thread at a time.
        name: of its thread.
    """

    def __init__(self, timeouts: Timeouts, deliver: Callable[[bytes], None], name: str) -> None:
        self._conversation = Conversation(timeouts, time.monotonic())
        self._deliver = deliver
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._channel: Messages | None = None
        self._closed, self._generation = False, 0
        self._queue: queue.SimpleQueue[tuple[Messages, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=name, daemon=True)
        self._thread.start()

    def say(self, message: bytes) -> None:
        """Sends a message: now, or over the next connection. Does not wait."""
        with self._lock:
            self._put(self._conversation.say(message, time.monotonic()))

    def serve(self, channel: Messages, generation: int) -> None:
        """Continues over a connection, in place of any before, until it ends; closes it.

        Args:
            channel: the connection.
            generation: counts the connections that the other host has made; one that was made before another that is
                served already, and has come late, is closed: what it carries is older than what was heard.

        Raises:
            ProtocolError: what came is nothing that the other host may say.
        """
        with self._lock:
            closed = self._closed or generation <= self._generation
            if not closed:
                before, self._channel, self._generation = self._channel, channel, generation
                self._put(self._conversation.connected(time.monotonic()))
        if closed:  # where it was made while this ended, nobody else would close it
            channel.close()
            return
        if before is not None:
            before.close()
        try:
            while self._hear(channel):
                pass
        finally:
            with self._lock:
                if self._channel is channel:
                    self._channel = None
                    self._conversation.cut(time.monotonic())
            channel.close()

    def _hear(self, channel: Messages) -> bool:
        try:
            body = channel.receive()
        except OSError:
            return False
        if body is None:
            return False
        with self._delivering:  # the thread of the connection before may still be in here
            with self._lock:
                if self._channel is not channel:
                    return False
                message, out = self._conversation.receive(body, time.monotonic())
                self._put(out)
            if message is not None:
                self._deliver(message)
        return self.ended is None

    def look(self) -> str:
        """To be called several times a second: sends a beat, gives a silent connection up.

        Returns:
            Why the other host counts as lost, in words; nothing as long as it does not.
        """
        now = time.monotonic()
        with self._lock:
            self._put(self._conversation.tick(now))
            silent = self._channel if self._conversation.is_silent(now) else None
            why = self._conversation.why_lost(now)
        if silent is not None:
            silent.close()
        return why

    @property
    def ended(self) -> str | None:
        """Why the other side has ended it, once it has."""
        return self._conversation.ended

    @property
    def is_done(self) -> bool:
        """Whether the other side has heard all that was said to it, or has ended."""
        return self._conversation.ended is not None or self._conversation.all_heard

    @property
    def cuts(self) -> int:
        """How often a connection ended."""
        return self._conversation.cuts

    def end(self, why: str) -> None:
        """Sends what is queued, and then that this is the end. Waits for nobody; `close` does."""
        with self._lock:
            if self._closed:
                return
            self._put([ending(why)])
            self._closed = True
        self._queue.put(None)

    def close(self, why: str, deadline: Deadline | None = None) -> None:
        """Sends what is queued, then that this is the end, and ends the connection.

        Args:
            why: it is the end.
            deadline: until when the other host may take what is sent; by default two seconds from now.
        """
        self.end(why)
        self._thread.join((deadline or Deadline.after(FLUSH_SECONDS)).left(threading.TIMEOUT_MAX))
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.close()  # and whoever is stuck in sending over it goes on
        self._thread.join(_JOIN_SECONDS)

    def _put(self, bodies: list[bytes]) -> None:
        if self._channel is not None:
            for body in bodies:
                self._queue.put((self._channel, body))

    def _send(self) -> None:
        while (item := self._queue.get()) is not None:
            channel, body = item
            with contextlib.suppress(OSError):  # whoever receives finds out, too; it is said again
                if channel is self._channel:
                    channel.send(body)


_LENGTH = struct.Struct("!I")


class Messages:
    """Whole messages over a channel: for the control plane.

    Args:
        channel: that both have checked.
        longest: bytes of a message; more ends the connection before anything is allocated.
    """

    def __init__(self, channel: Channel, longest: int = 64 << 20) -> None:
        self._channel, self._longest = channel, longest
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def send(self, message: bytes) -> None:
        """Sends a message; any thread may.

        Raises:
            OSError: the connection has ended.
        """
        with self._sending:
            self._channel.send(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Waits for the next message; None at the end of the connection. One thread at a time."""
        with self._receiving:
            head = self._read(_LENGTH.size)
            if head is None:
                return None
            (length,) = _LENGTH.unpack(head)
            return self._read(length) if length <= self._longest else None

    def _read(self, count: int) -> bytes | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                got = self._channel.recv_into(view)
            except OSError:
                return None
            if not got:
                return None
            view = view[got:]
        return bytes(data)

    def close(self) -> None:
        """Ends the connection and wakes whoever receives. May be called again, by any thread."""
        self._channel.shutdown()
        with self._sending, self._receiving:
            self._channel.close()
