"""A connection to another node that is made again whenever it is cut, and the threads that carry frames over it.

One thread connects again, and receives where no `Receiver` does; one sends. What the frames mean is known to the
protocols that are carried.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.peer.frames import HEADER_BYTES, LONGEST_BODY, Numbered, Outgoing, ProtocolError, Reader
from multiverso.hosts.peer.receiver import Receiver
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.transport.channel import FAR, Channel, RefusedError
from multiverso.hosts.transport.handshake import Begun, Hello
from multiverso.node_log import log

_SOONEST_SECONDS, _LATEST_SECONDS = 0.02, 1.0
_MOST_PAUSE_SECONDS = 0.05
_SMALL_BYTES = 16 * 1024
_COUNTED_TOGETHER = 8  # small frames
Dial = Callable[[int, Begun], tuple[Channel, Hello]]


class Peer:
    """Another node, as one role of this one's connections reaches it.

    Args:
        number: the peer's host.
        carried: what goes over the connection.
        pace: the node's budget.
        dial: connects with a generation; None where the peer does.
        name: of its threads.
        latest_seconds: the longest pause between two attempts to connect; a second.
        receiver: receives for this peer and others; None: a thread of its own does.

    Attributes:
        failed: why it will never be connected, if that is so.
        connections: so far.
        connections_before: those to the node whose place this one has taken.
        bytes_sent, bytes_received: of all of them together.
    """

    def __init__(
        self,
        number: int,
        carried: Numbered,
        pace: Pace,
        dial: Dial | None,
        name: str,
        latest_seconds: float | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self.number = number
        self.failed: str | None = None
        self.connections = self.connections_before = self.bytes_sent = self.bytes_received = 0
        self._carried, self._name, self._receiver = carried, name, receiver
        self._pace, self._dial, self._latest = pace, dial, latest_seconds
        self._wake = threading.Condition()
        self._poked = self._closing_soon = False
        self._reaching: socket.socket | None = None  # while it dials
        self._dialling = False  # until a connection is there: it may take long, and touches nothing
        self._closing = threading.Event()
        self._sending = threading.Lock()  # frames go out in the order in which they were made
        self._receiving = threading.Lock()
        self._reader: Reader | None = None
        self._leaves_some = False
        self._uncounted = 0
        self._live: Channel | None = None
        # of which a part is left in the channel
        self._unsent: Outgoing | None = None
        self._channel: Channel | None = None
        self._offered: tuple[Channel, Hello] | None = None
        self._last = (0, 0)
        self._got_on = False  # whether anything that counts has come over the last connection
        self._generation, self._busy_before = 0, 0.0
        self._thread = threading.Thread(target=self._run, name=f"multiverso-{name}-in-{number}", daemon=True)

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._live is not None

    @property
    def is_arriving(self) -> bool:
        """Whether the other node's port has taken a connection that neither end has proven itself over yet."""
        with self._wake, contextlib.suppress(OSError):
            return self._reaching is not None and bool(self._reaching.getpeername())
        return False

    def start(self, first: tuple[Channel, Hello] | None = None) -> None:
        """Begins to connect, unless it does so already.

        Args:
            first: a connection that has been made, of generation 1.
        """
        if self._thread.ident is None:
            if first is not None:
                self._offered, self._generation = first, 1
            self._thread.start()

    def poke(self) -> None:
        """Says that there may be something to send."""
        with self._wake:
            self._poked = True
            self._wake.notify_all()

    def pump(self) -> None:
        """Sends from this thread what the system takes at once: it is still in this processor's cache.

        A change of threads costs more than that. What waits for the other side is the sender's, and so are large
        pushes, which are computed first: meanwhile this thread may receive.
        """
        if self._pump_leaves_some():
            self.poke()

    def _pump_leaves_some(self) -> bool:
        """Like `pump`; returns whether the sender is to be woken."""
        if self._sending.acquire(blocking=False):
            try:
                return self._pump(self._live)
            except (OSError, MemoryError) as error:
                self._log_if_unsendable(error)
                if self._live is not None:
                    self._live.shutdown()
                return False
            finally:
                self._sending.release()
        return self._carried.wait(time.monotonic()) is not None

    @property
    def _has_words(self) -> bool:
        return self._unsent is not None or self._carried.has_words

    def _next(self, most_new: int = LONGEST_BODY) -> Outgoing | None:
        outgoing = self._carried.next(time.monotonic(), most_new)
        if outgoing is not None:
            self.bytes_sent += HEADER_BYTES + outgoing.header.length
        return outgoing

    def _pump(self, channel: Channel | None) -> bool:
        if channel is None:
            return False
        if self._unsent is not None:
            return True
        while True:
            outgoing = self._unsent = self._next(_SMALL_BYTES)
            if outgoing is None:
                return self._carried.wait(time.monotonic()) is not None
            if not channel.send_now(outgoing.header.pack(), outgoing.body, *outgoing.more):
                return True
            self._unsent = None
            if not self._carried.has_something:
                return False

    def offer(self, channel: Channel, hello: Hello) -> None:
        """The peer has connected. It takes the place of an older connection, whose threads end first."""
        with self._wake:
            newer = hello.incarnation != self._last[0] or hello.generation > self._last[1]
            unwanted: Channel | None = channel
            if self._dial is None and newer and not self._closing.is_set():
                unwanted = self._offered[0] if self._offered else None
                self._offered, self._last = (channel, hello), (hello.incarnation, hello.generation)
                if self._channel is not None:
                    self._channel.shutdown()
            self._wake.notify_all()
        if unwanted is not None:
            unwanted.close()

    def delay(self) -> float:
        """Returns how long the way there and back takes now, smoothed; ``FAR`` while that is not known."""
        channel = self._channel
        return channel.delay() if channel is not None else FAR

    def busy_seconds(self) -> float:
        """Returns for how long something was on its way there, over all connections."""
        with self._wake:
            return self._busy_before + (self._channel.busy_seconds() if self._channel is not None else 0.0)

    def count_on(self, lost: Peer) -> None:
        """Before `start`: counts on from what went to and from the node whose place this one has taken."""
        self.connections_before = lost.connections_before + lost.connections
        self.bytes_sent, self.bytes_received = lost.bytes_sent, lost.bytes_received
        self._busy_before = lost.busy_seconds()

    def interrupt(self) -> None:
        """Ends the connection, as a fault of the network would; the next one begins at once."""
        with self._wake:
            if self._channel is not None:
                self._channel.shutdown()

    def close(self, deadline: Deadline, last_words_seconds: float = 0.2) -> None:
        """Says what is left to say, and ends the threads.

        Args:
            deadline: until when what is left may be sent.
            last_words_seconds: and for how long at most.
        """
        self._closing_soon = True
        self.poke()
        with self._wake:
            # what is said last is sent, if the peer takes it
            self._wake.wait_for(lambda: not self._has_words, deadline.left(last_words_seconds))
        if (dialling := self.end()) is not None:
            dialling.join()

    def end(self) -> threading.Thread | None:
        """Ends the connection at once, with a peer that is lost; returns the thread if it still waits for one.

        A thread that looks up a host's address may do so for seconds. It leaves what is carried alone from now on, and
        ends when it is through; any other has ended when this returns.
        """
        self._closing.set()
        with self._wake:
            dialling = self._dialling
            for channel in (self._channel, self._offered[0] if self._offered else None):
                if channel is not None:
                    channel.shutdown()
            if self._reaching is not None and self._channel is None:
                with contextlib.suppress(OSError):  # it has not begun, or is over
                    self._reaching.shutdown(socket.SHUT_RDWR)
            self._wake.notify_all()
        if self._thread.ident is not None:
            if dialling:
                return self._thread
            self._thread.join()
        if self._offered is not None:
            self._offered[0].close()
        return None

    # -- the receiving thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _SOONEST_SECONDS
        while not self._closing.is_set():
            began, self._got_on = time.monotonic(), False
            try:
                found = self._connection()
                if found is not None:
                    self._converse(*found)
            except RefusedError as error:
                self.failed = str(error)
                log(f"host {self.number}: {error}")
                return
            except (OSError, MultiversoError, MemoryError) as error:
                if isinstance(error, (ProtocolError, MemoryError)):
                    log(f"the connection to host {self.number} was closed: {error}")
            # at once where the connection has carried something: a second for each cut is what a bad link would cost
            lasted = self._got_on or time.monotonic() - began > 1
            pause = _SOONEST_SECONDS if lasted else min(self._latest or _LATEST_SECONDS, 2 * pause)
            if self._dial is not None:
                self._closing.wait(pause)

    def _connection(self) -> tuple[Channel, Hello] | None:
        if self._dial is not None and self._offered is None:
            self._generation += 1
            with self._wake:
                self._dialling = True
            return self._dial(self._generation, self._note_reaching)
        with self._wake:
            self._wake.wait_for(lambda: self._offered is not None or self._closing.is_set())
            if self._closing.is_set():
                return None  # `end` closes what was offered
            offered, self._offered = self._offered, None
            return offered

    def _note_reaching(self, way: socket.socket) -> None:
        with self._wake:
            self._reaching = way
            if self._closing.is_set():
                raise OSError("this end is closing")

    def _converse(self, channel: Channel, hello: Hello) -> None:
        ended, begun = threading.Event(), False
        sender = threading.Thread(
            target=self._send, args=(channel, ended), name=f"multiverso-{self._name}-out-{self.number}", daemon=True
        )
        try:
            with self._wake:
                self._channel, self._dialling, self._reaching = channel, False, None
                if self._closing.is_set() or self._offered is not None:
                    return
            begun = True
            self.connections += 1
            self._carried.connect(hello.incarnation)
            self._carried.at_distance(channel.round_trip())
            with self._sending:
                self._live = channel
            try:
                sender.start()
            except RuntimeError as error:  # the system gives no thread, perhaps not for long
                raise MemoryError(str(error)) from error
            self._reader = Reader()
            if self._receiver is None:
                self._receive(channel)
            elif not channel.holds_some or self._receive_some():  # what came with the handshake has left the socket
                self._receiver.receive(channel.fileno(), self._receive_some)
        finally:
            ended.set()
            channel.shutdown()
            self.poke()
            if sender.ident is not None:
                sender.join()
            with self._receiving:
                self._reader = None
            with self._sending:
                self._live = self._unsent = None
            with self._wake:
                self._busy_before += channel.busy_seconds()
                self._channel = None
            if begun:  # else another pair may have its place, and a connection
                self._carried.cut()
            channel.close()

    def _receive(self, channel: Channel) -> None:
        used = time.thread_time()
        while True:
            channel.await_some()
            with self._receiving:
                while True:
                    reader = self._reader
                    if reader is None:  # who waited here has received what no node sends, or the end
                        return
                    try:
                        # a frame that has begun to come is waited for: no other can be received meanwhile
                        count = self._take(reader, channel.recv_into if reader.inside else channel.recv_now)
                    except BlockingIOError:
                        break
                    if not count:
                        return
                    pause = 0.0
                    if self._uncounted >= _COUNTED_TOGETHER:  # counting takes as long as a small frame
                        used, self._uncounted = self._pace.count(used), 0
                        pause = self._carried.pause(time.monotonic())
                    self._tell()
                    # this node may have done enough for others lately: what they push waits in the connection
                    if pause:
                        self._closing.wait(min(pause, _MOST_PAUSE_SECONDS))

    def _receive_some(self) -> bool:
        """For the receiver: takes what is there, and acknowledges it; returns whether the connection goes on."""
        self.receive_now()
        channel = self._channel
        if channel is None or self._reader is None:
            return False
        channel.acknowledge()
        return True

    def receive_now(self) -> None:
        """Receives in the calling thread what is there already, unless another one does so."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            channel, reader = self._channel, self._reader
            if channel is None or reader is None:
                return
            try:
                while self._take(reader, channel.recv_now):
                    # what has left the socket is taken here: the receiving thread would not be woken for it
                    if not channel.holds_some:
                        self._tell()
                        return
            except BlockingIOError:
                self._tell()
                return
            except (OSError, MultiversoError, MemoryError) as error:
                if isinstance(error, (ProtocolError, MemoryError)):
                    log(f"the connection to host {self.number} was closed: {error}")
            self._reader = None  # the receiving thread ends this connection
            channel.shutdown()
        finally:
            self._receiving.release()

    def _take(self, reader: Reader, recv: Callable[[memoryview], int]) -> int:
        """Receives, and does what is to do with what is whole; returns how many bytes came, 0 at the end."""
        count = recv(reader.room())
        if count:
            self.bytes_received += count
            reader.filled(count)
            while True:
                begun = reader.begin()
                whole = reader.whole() if begun is None else reader.place(self._carried.accept(begun))
                if whole is None:
                    break
                header, body = whole
                if self._carried.arrived(header, body, time.monotonic()):
                    self._leaves_some |= self._pump_leaves_some()
                self._got_on |= header.length > 0
                self._uncounted += 1 + header.length // _SMALL_BYTES
        return count

    def _tell(self) -> None:
        """Wakes others, last: who wakes before this thread waits has to wait for the interpreter, and wakes twice."""
        self._carried.wake()
        if self._leaves_some or self._closing_soon:  # who closes waits for the last acknowledgement
            self._leaves_some = False
            self.poke()

    # -- the sending thread ----------------------------------------------------------------------------------

    def _send(self, channel: Channel, ended: threading.Event) -> None:
        try:
            self._send_until(channel, ended)
        except (OSError, MultiversoError, MemoryError) as error:
            self._log_if_unsendable(error)
        finally:
            channel.shutdown()  # whatever it was: the receiver continues to the next connection, and nothing waits here

    def _log_if_unsendable(self, error: Exception) -> None:
        if isinstance(error, (MultiversoError, MemoryError)):  # else the connection is over
            log(f"the connection to host {self.number} was closed, since nothing can be sent: {error!r}")

    def _send_until(self, channel: Channel, ended: threading.Event) -> None:
        used = time.thread_time()
        while True:
            with self._wake:
                wait = self._carried.wait(time.monotonic())
                if wait != 0.0 and not self._poked and not ended.is_set():
                    self._wake.wait(wait)
                self._poked = False
            if ended.is_set():
                return
            with self._sending:
                channel.flush()
                self._unsent = None
                outgoing = self._next()
                if outgoing is not None:
                    channel.send(outgoing.header.pack(), outgoing.body, *outgoing.more)
            if self._closing_soon and not self._has_words:
                with self._wake:
                    self._wake.notify_all()
            used = self._pace.count(used)
