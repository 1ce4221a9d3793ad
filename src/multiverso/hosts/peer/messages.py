"""Messages between the nodes beside the tables' values, over connections of their own, made when first needed.

What is sent arrives exactly once and in order, through any number of cut connections (``stream.py``). Of each two
hosts the higher connects, as in the fabric, at the same port: the connections' role tells them apart. A thread for
each peer receives, and connects anew. Whoever has a message sends what the system takes at once; another thread sends
what is left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.peer.buffers import Buffers, owner, view
from multiverso.hosts.peer.stream import HEAD_BYTES, Body, Stream
from multiverso.hosts.transport.channel import Channel, RefusedError, start_or_raise
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import HANDSHAKE_SECONDS, MAIL, Hello, connect
from multiverso.node_log import log

_SOONEST_SECONDS, _LATEST_SECONDS = 0.02, 1.0
_ADDRESSES_SECONDS = 0.5
_KEPT = 16  # buffers of a size; fresh memory for each large message costs more than what is done with it

Deliver = Callable[[int, Body], None]
Address = tuple[str, int]


@dataclass(eq=False)
class _Peer:
    """One other host. Its fields are guarded by its condition, but for the stream's."""

    host: int
    stream: Stream = field(default_factory=Stream)
    wake: threading.Condition = field(default_factory=threading.Condition)
    channel: Channel | None = None
    reaching: socket.socket | None = None  # while it is dialled
    offered: tuple[Channel, Hello] | None = None
    last: tuple[int, int] = (0, 0)
    incarnation: int | None = None
    failed: str | None = None
    poked: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)  # who has it sends
    live: Channel | None = None  # for whoever has that

    def poke(self) -> None:
        """Wakes the sender: there may be something to send."""
        with self.wake:
            self.poked = True
            self.wake.notify_all()


class Mail:
    """A node's messages to the others.

    Args:
        host: this host's number.
        hosts: how many there are.
        credentials: the job's.
        address_of: returns where another host is reached; None while that is not known.
        deliver: gets another host's number and its message, in the thread of that host.

    Owner: the thread that made it calls `close`; the other methods may be called by any.
    """

    def __init__(
        self,
        host: int,
        hosts: int,
        credentials: Credentials,
        address_of: Callable[[int], Address | None],
        deliver: Deliver,
    ) -> None:
        self._host, self._hosts = host, hosts
        self._credentials, self._address_of, self._deliver = credentials, address_of, deliver
        self._incarnation = int.from_bytes(os.urandom(8), "big")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._peers = {peer: _Peer(peer) for peer in range(hosts) if peer != host}
        self._threads: list[threading.Thread] = []
        self._pool = Buffers(_KEPT)

    def open(self) -> None:
        """Begins to connect, unless that has begun."""
        with self._lock:
            if self._threads or self._closing.is_set():
                return
            for peer in self._peers.values():
                name = f"multiverso-mail-{peer.host}"
                thread = threading.Thread(target=self._run, args=(peer,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def send(self, peer: int, *parts: Body) -> None:
        """Sends a message, the memory of whose parts must not change afterwards. Does not wait."""
        self._peers[peer].stream.put(*parts)
        self._send_now(self._peers[peer])

    def _send_now(self, peer: _Peer) -> None:
        """Sends what the system takes at once; the rest is the sending thread's."""
        if peer.sending.acquire(blocking=False):
            try:
                if peer.live is None:
                    return  # what there is goes with the next connection
                while (found := peer.stream.next()) is not None:
                    if not peer.live.send_now(*found):
                        break
                else:
                    return
            except (OSError, MemoryError) as error:
                _log_if_unsendable(peer, error)
                if peer.live is not None:
                    peer.live.shutdown()
                return
            finally:
                peer.sending.release()
        peer.poke()

    def free(self, message: Body) -> None:
        """Takes the memory of a message back, or of a part of it; nobody reads it any more."""
        if isinstance(message, memoryview):
            self._pool.give(owner(message))

    def failed(self, hosts: Iterable[int]) -> str | None:
        """Returns why one of these hosts will never be reached, if that is so."""
        whys = (self._peers[host].failed for host in hosts if host in self._peers)
        return next((why for why in whys if why is not None), None)

    def offer(self, channel: Channel, hello: Hello) -> None:
        """A higher host has connected: its connection takes the place of an older one."""
        peer = self._peers.get(hello.host)
        unwanted: list[Channel] = [channel]
        if peer is not None and hello.host > self._host and hello.hosts == self._hosts:
            self.open()
            with peer.wake:
                newer = hello.incarnation != peer.last[0] or hello.generation > peer.last[1]
                if newer and not self._closing.is_set():
                    unwanted = [peer.offered[0]] if peer.offered else []
                    peer.offered = channel, hello
                    peer.last = hello.incarnation, hello.generation
                    if peer.channel is not None:
                        peer.channel.shutdown()
                    peer.wake.notify_all()
        for each in unwanted:
            each.shutdown()
            each.close()

    def interrupt(self, peer: int) -> None:
        """Cuts the connection to a peer, as a fault of the network would: for tests."""
        with self._peers[peer].wake:
            if (channel := self._peers[peer].channel) is not None:
                channel.shutdown()

    def close(self) -> None:
        """Ends all connections. May be called again."""
        self._closing.set()
        for peer in self._peers.values():
            with peer.wake:
                for channel in (peer.channel, peer.offered[0] if peer.offered else None):
                    if channel is not None:
                        channel.shutdown()
                if peer.reaching is not None and peer.channel is None:
                    with contextlib.suppress(OSError):  # it has not begun, or is over
                        peer.reaching.shutdown(socket.SHUT_RDWR)
                peer.wake.notify_all()
        for thread in self._threads:
            thread.join()
        for peer in self._peers.values():
            if peer.offered is not None:
                peer.offered[0].close()

    # -- a peer's threads ------------------------------------------------------------------------------------

    def _run(self, peer: _Peer) -> None:
        pause, generation = _SOONEST_SECONDS, 0
        while not self._closing.is_set():
            try:
                if peer.host > self._host:
                    found = self._offered(peer)
                else:
                    generation += 1
                    found = self._dial(peer, generation)
                if found is not None:
                    pause = _SOONEST_SECONDS
                    self._converse(peer, *found)
            except RefusedError as error:
                peer.failed = str(error)
                log(f"host {peer.host}: {error}")
                return
            except (OSError, MultiversoError, MemoryError) as error:
                if isinstance(error, (MultiversoError, MemoryError)) and not self._closing.is_set():
                    log(f"the connection to host {peer.host} was closed: {error}")
            if peer.host < self._host:
                self._closing.wait(pause)
                pause = min(_LATEST_SECONDS, 2 * pause)

    def _dial(self, peer: _Peer, generation: int) -> tuple[Channel, Hello] | None:
        address = self._address_of(peer.host)
        if address is None:
            self._closing.wait(_ADDRESSES_SECONDS)
            return None
        me = Hello(self._host, self._hosts, self._incarnation, generation, MAIL)

        def begun(way: socket.socket) -> None:
            with peer.wake:
                peer.reaching = way
                if self._closing.is_set():
                    raise OSError("this end is closing")

        return connect(address, self._credentials, me, Deadline.after(HANDSHAKE_SECONDS), begun)

    def _offered(self, peer: _Peer) -> tuple[Channel, Hello] | None:
        with peer.wake:
            peer.wake.wait_for(lambda: peer.offered is not None or self._closing.is_set())
            offered, peer.offered = peer.offered, None
        if offered is not None and self._closing.is_set():
            offered[0].close()
            return None
        return offered

    def _converse(self, peer: _Peer, channel: Channel, hello: Hello) -> None:
        ended = threading.Event()
        name = f"multiverso-mail-out-{peer.host}"
        sender = threading.Thread(target=self._send, args=(peer, channel, ended), name=name, daemon=True)
        try:
            if peer.incarnation not in (None, hello.incarnation):
                raise RefusedError("its node has come again, and knows nothing of what was under way")
            peer.incarnation = hello.incarnation
            with peer.wake:
                peer.channel, peer.reaching = channel, None
                if self._closing.is_set() or peer.offered is not None:
                    return
            peer.stream.connected()
            with peer.sending:
                peer.live = channel
            start_or_raise(sender)
            self._receive(peer, channel)
        finally:
            ended.set()
            channel.shutdown()
            peer.poke()
            if sender.ident is not None:
                sender.join()
            with peer.sending:
                peer.live = None
            with peer.wake:
                peer.channel = None
            channel.close()

    def _receive(self, peer: _Peer, channel: Channel) -> None:
        head = memoryview(bytearray(HEAD_BYTES))
        while _fill(channel, head):
            length = peer.stream.length(head)
            body = view(self._pool.take(length), length)
            if not _fill(channel, body):
                return
            message = peer.stream.arrived(head, body)
            if message is not None:
                self._deliver(peer.host, message)
            if peer.stream.has():
                self._send_now(peer)

    def _send(self, peer: _Peer, channel: Channel, ended: threading.Event) -> None:
        try:
            while True:
                with peer.wake:
                    peer.wake.wait_for(lambda: peer.poked or peer.stream.has() or ended.is_set())
                    peer.poked = False
                if ended.is_set():
                    return
                with peer.sending:
                    channel.flush()
                    while (found := peer.stream.next()) is not None:
                        channel.send(*found)
        except (OSError, MemoryError) as error:
            _log_if_unsendable(peer, error)
        finally:
            channel.shutdown()  # whatever it was: the receiver goes on to the next connection


def _log_if_unsendable(peer: _Peer, error: Exception) -> None:
    if isinstance(error, MemoryError):  # else the connection is over
        log(f"the connection to host {peer.host} was closed, since nothing can be sent: {error!r}")


def _fill(channel: Channel, view: memoryview) -> bool:
    """Receives so many bytes; False at the connection's end."""
    while view:
        count = channel.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True
