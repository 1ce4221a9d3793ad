"""Messages between the nodes beside the tables' values, over connections of their own, made when first needed.

A message is a frame of any bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from multiverso.hosts.peer.frames import RECEIVED, Body, Header, Numbered, Outgoing, ProtocolError, unknown
from multiverso.hosts.peer.peers import Peers
from multiverso.hosts.peer.receiver import Receiver
from multiverso.hosts.peer.resources import Buffers, Pace, owner, view
from multiverso.hosts.transport.handshake import MESSAGES, ROLES

MESSAGE = 14  # the kind of frame
LONGEST_MESSAGE = 8 << 20
_KEPT = 16  # buffers of a size; fresh memory for each large message costs more than what is done with it


class Stream(Numbered):
    """One side. Any thread may call.

    Args:
        deliver: gets each message, in the thread that receives.
        pool: memory for messages.
    """

    longest = LONGEST_MESSAGE

    def __init__(self, deliver: Callable[[memoryview], None], pool: Buffers) -> None:
        super().__init__(pool)
        self._deliver = deliver

    def put(self, *parts: Body) -> None:
        """A message for the other side, in parts; their memory must not change from here on."""
        length = sum(map(len, parts))
        if length > self.longest:
            raise ValueError(f"a message of {length} bytes; the longest has {self.longest}")
        self.post(Outgoing(Header(MESSAGE, length=length), more=parts))

    def accept(self, header: Header) -> memoryview | None:
        """Returns memory for a message that has not been received before."""
        if header.kind not in (MESSAGE, RECEIVED):
            raise unknown(header)
        if header.length > self.longest:
            raise ProtocolError(f"a message of {header.length} bytes; the longest has {self.longest}")
        return view(self._pool.take(header.length), header.length) if self.is_new(header) else None

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """Delivers a message; returns whether there is something to send."""
        if body is not None:
            self.note(header)
            self._deliver(body)
        return self.has_something


class Messages:
    """A node's messages to the others. Any thread may call.

    Args:
        peers: the node's connections, which are closed with what else they carry.
        deliver: gets another host's number and its message, in the thread of that host.
        role: of the connections, of ``handshake.ROLES``.
    """

    def __init__(self, peers: Peers, deliver: Callable[[int, memoryview], None], role: int = MESSAGES) -> None:
        self._pool = Buffers(_KEPT)
        self._streams: dict[int, Stream] = {}
        self._deliver, self._peers, self._role = deliver, peers, role
        self._open = peers.carry(role, self._new_stream, Pace(0), Receiver(f"multiverso-{ROLES[role]}-in"))

    def _new_stream(self, host: int) -> Stream:
        stream = self._streams[host] = Stream(functools.partial(self._deliver, host), self._pool)
        return stream

    def open(self) -> None:
        """Begins to connect, unless that has begun."""
        self._peers.open(self._role)

    def end(self, host: int) -> None:
        """Ends the connection to a lost host: nothing more comes from it. To be called without a lock of `deliver`."""
        self._peers.end(self._role, host)

    def renew(self, host: int) -> None:
        """After `end`: another node may take the lost host's place, of which nothing is known."""
        self._peers.renew(self._role, host)

    def send(self, host: int, *parts: Body) -> None:
        """Sends a message over what is open, the memory of whose parts must not change afterwards. Does not wait."""
        self._streams[host].put(*parts)
        self._open[host].pump()

    def free(self, message: Body) -> None:
        """Takes the memory of a message back, or of a part of it, which is no longer read."""
        if isinstance(message, memoryview):
            self._pool.give(owner(message))
