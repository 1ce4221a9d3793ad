"""Messages between the nodes beside the tables' values, over connections of their own, made when first needed.

Each arrives exactly once and in order, through any number of cut connections. Messages are numbered from 1 and kept
until the other side has said that it has them; on a new connection both say first how far they are, and continue from
there. Nothing outlives a node: one that returns is a new incarnation, and nothing that was said to the last one is
for it.

A message is a frame: ``number`` is its own (0: it only says how far this side is), and the number of the last message
that this side has received stands where others have the table (its upper half) and the chunk (its lower half).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable

from multiverso.hosts.peer.frames import LONGEST_BODY, NOTHING, Body, Carried, Header, Outgoing, ProtocolError, unknown
from multiverso.hosts.peer.peers import Peers
from multiverso.hosts.peer.resources import Buffers, Pace, owner, view
from multiverso.hosts.transport.channel import RefusedError
from multiverso.hosts.transport.handshake import MESSAGES

MESSAGE = 14  # the kind of frame
LONGEST_MESSAGE = 8 << 20
# so much has been received since the last acknowledgement: the other side keeps what follows that
_SAY_BYTES = 1 << 20
_SAY_MESSAGES = 64
_KEPT = 16  # buffers of a size; fresh memory for each large message costs more than what is done with it


class Stream(Carried):
    """One side. Any thread may call.

    Args:
        deliver: gets each message, in the thread that receives.
        pool: memory for messages.
    """

    longest = LONGEST_MESSAGE

    def __init__(self, deliver: Callable[[memoryview], None], pool: Buffers) -> None:
        self._deliver, self._pool = deliver, pool
        self._lock = threading.Lock()
        self._kept: deque[tuple[Body, ...]] = deque()  # the last ones, which are not known to be received
        self._last = 0  # the number of the last message put
        self._sent = 0  # of the last one that went out over this connection
        self._received = 0
        self._unsaid_bytes = self._unsaid = 0
        self._say = False
        # ready: the other side has said on this connection how far it is
        self._connected = self._ready = False
        self._incarnation: int | None = None

    def put(self, *parts: Body) -> None:
        """A message for the other side, in parts; their memory must not change from here on."""
        length = sum(map(len, parts))
        if length > self.longest:
            raise ValueError(f"a message of {length} bytes; the longest has {self.longest}")
        with self._lock:
            self._last += 1
            self._kept.append(parts)

    def connect(self, incarnation: int) -> None:
        """A new connection: what is not known to be received goes again, once the other side has spoken.

        Raises:
            RefusedError: the other node is a new one.
        """
        with self._lock:
            if self._incarnation not in (None, incarnation):
                raise RefusedError("its node has restarted, and knows nothing of what was under way")
            self._incarnation = incarnation
            self._connected = self._say = True
            self._ready = False

    def cut(self) -> None:
        """The connection has ended."""
        with self._lock:
            self._connected = self._ready = False

    @property
    def has_something(self) -> bool:
        """Whether there is something to send."""
        with self._lock:
            return self._connected and (self._say or (self._ready and self._sent < self._last))

    def wait(self, now: float) -> float | None:
        """Returns 0 where there is something to send."""
        return 0.0 if self.has_something else None

    def next(self, now: float, most_new: int = LONGEST_BODY) -> Outgoing | None:
        """Returns the next message, or how far this side is, or None."""
        with self._lock:
            number: int = 0
            parts: tuple[Body, ...] = ()
            if self._ready and self._sent < self._last:
                parts = self._kept[self._sent - self._last]
                number = self._sent = self._sent + 1
            elif not self._say:
                return None
            self._say, self._unsaid, self._unsaid_bytes = False, 0, 0
            high, low = divmod(self._received, 1 << 32)
        header = Header(MESSAGE, table=high, chunk=low, length=sum(map(len, parts)), number=number)
        return Outgoing(header, NOTHING, more=parts)

    def accept(self, header: Header) -> memoryview | None:
        """Notes how far the other side is; returns memory for a message that has not been received before."""
        number, received = header.number, (header.table << 32) + header.chunk
        if header.kind != MESSAGE:
            raise unknown(header)
        if header.length > self.longest or (header.length and not number):
            raise ProtocolError(f"a message of {header.length} bytes; the longest has {self.longest}")
        with self._lock:
            if not self._last - len(self._kept) <= received <= self._last:
                raise ProtocolError(f"message {received} is said to be received, of {self._last}")
            while self._last - len(self._kept) < received:
                self._kept.popleft()
            if not self._ready:
                self._ready, self._sent = True, received
            if number <= self._received:
                return None
            if number != self._received + 1:
                raise ProtocolError(f"message {number} came after message {self._received}")
        return view(self._pool.take(header.length), header.length)

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """Delivers a message; returns whether there is something to send."""
        if body is not None:
            with self._lock:
                self._received = header.number
                self._unsaid += 1
                self._unsaid_bytes += len(body)
                self._say |= self._unsaid >= _SAY_MESSAGES or self._unsaid_bytes >= _SAY_BYTES
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
        self._open = peers.carry(role, self._new_stream, Pace(0))

    def _new_stream(self, host: int) -> Stream:
        stream = self._streams[host] = Stream(functools.partial(self._deliver, host), self._pool)
        return stream

    def open(self) -> None:
        """Begins to connect, unless that has begun."""
        self._peers.open(self._role)

    def send(self, host: int, *parts: Body) -> None:
        """Sends a message over what is open, the memory of whose parts must not change afterwards. Does not wait."""
        self._streams[host].put(*parts)
        self._open[host].pump()

    def free(self, message: Body) -> None:
        """Takes the memory of a message back, or of a part of it, which is no longer read."""
        if isinstance(message, memoryview):
            self._pool.give(owner(message))
