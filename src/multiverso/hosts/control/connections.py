"""The nodes' control connections: each node has one to the coordinator, which is in the first host's node.

A shell around `Coordinator` that decides nothing. Reports and orders are the records of ``messages.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.control.coordinator import Coordinator
from multiverso.hosts.control.messages import Address, Alone, Order, Report, ToHost, encoded, order_of, report_of
from multiverso.hosts.control.messages import Hello as HelloReport
from multiverso.hosts.peer.peer import Dial, Peer
from multiverso.hosts.peer.receiver import Receiver
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.peer.watched_stream import Timeouts, WatchedStream, ending
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.channel import Channel, RefusedError
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import CONTROL, Begun, Hello, connect
from multiverso.hosts.transport.listener import Listener
from multiverso.node_log import log

_CONNECT_SECONDS = 60.0
_JOIN_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_SOON_SECONDS = 0.05  # until the next attempt to connect: all hosts wait for a decision
_LOST_FLUSH_SECONDS = 0.5  # for what a lost host may still take: the others are not watched meanwhile
_AGAIN_SECONDS = 5.0  # of one attempt to connect again
FLUSH_SECONDS = 2.0

_COUNTED_AS_LOST = "it counts this host as lost, and the others continue without it"

Deliver = Callable[[Order | Alone], None]


class ControlConnection(WatchedStream):
    """One end of the conversation with another node, over a connection of its own.

    Args:
        host: the other one.
        timeouts: how long it waits for the other.
        deliver: gets each message once, in order, by one thread at a time.
        dial: connects; None where the other one does.
        first: a connection that there is already.
        receiver: see `Peer`.
    """

    def __init__(
        self,
        host: int,
        timeouts: Timeouts,
        deliver: Callable[[memoryview], None],
        dial: Dial | None,
        first: tuple[Channel, Hello] | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        super().__init__(deliver, timeouts)
        self.peer = Peer(host, self, Pace(0), dial, "control", _SOON_SECONDS, receiver)
        self.peer.start(first)

    def say(self, message: bytes) -> None:
        """Sends a message: now, or over the next connection. Does not wait."""
        self.put(message)
        self.peer.pump()

    def watch(self, arriving: bool) -> str:
        """To be called several times a second: gives a silent connection up.

        Args:
            arriving: as of `WatchedStream.look`.

        Returns:
            Why the other host counts as lost, in words; nothing as long as it does not.
        """
        now = time.monotonic()
        self.look(now, arriving)
        if self.is_silent(now):
            self.peer.interrupt()
        return self.why_lost(now)

    def end(self, why: str) -> None:
        """Says, after everything else, that this is the end. Does not wait; `close` does."""
        super().end(why)
        self.peer.pump()

    def close(self, deadline: Deadline) -> None:
        """Sends what is left, as long as the other host takes it, and ends the connection."""
        self.peer.close(deadline, math.inf)


class _TurnedAwayError(Exception):
    """A host that knows the secret has no place in this job, or none any more."""


class CoordinatorEnd:
    """The coordinator's end, in the first host's node.

    Args:
        roster: the job's hosts.
        port: where the other nodes' control connections come in; closed by `close`.
        deliver: gets the orders for this host, from any thread.
    """

    def __init__(self, roster: Roster, port: socket.socket, deliver: Deliver) -> None:
        self._roster = roster
        self._deliver = deliver
        self._coordinator = Coordinator(roster)
        self._lock = threading.Lock()  # of the coordinator, and of who has come and who is lost
        self._receiver = Receiver("multiverso-control-in")
        # from the first: what is said to a host that has not come yet is said when it comes
        self._talks = {host: self._new_talk(host) for host in range(1, roster.hosts)}
        self._incarnations: dict[int, int] = {}  # of those that have come
        self._fenced: set[int] = set()  # incarnations whose places others have taken
        self._lost: set[int] = set()
        self._closing = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="multiverso-hosts-watch", daemon=True)
        me = _hello(roster, incarnation=0, generation=1)  # the coordinator's is not asked for
        self.listener = Listener(port, credentials_of(roster), me, self._let_in, "multiverso-hosts")
        self._watching.start()

    def _new_talk(self, host: int) -> ControlConnection:
        def take(body: memoryview) -> None:
            self._take(host, report_of(body), talk)

        talk = ControlConnection(host, Timeouts.of(self._roster.grace), take, None, receiver=self._receiver)
        return talk

    @property
    def all_came(self) -> bool:
        """Whether every other host has connected at least once."""
        with self._lock:
            return len(self._incarnations) == self._roster.hosts - 1

    def report(self, message: Report) -> None:
        """A report of this host's own; as it would travel, so that it compares with the others'."""
        self._take(0, report_of(encoded(message)), None)

    def close(self) -> None:
        """Ends all connections; the other nodes take it for the loss of the coordinator unless the job is over.

        Then it waits a moment for those that do not know so yet: a connection may be cut just now.
        """
        end = Deadline.after(Timeouts.of(self._roster.grace).ended_seconds)
        while (
            self._coordinator.over and not end.passed and not all(self._talks[host].is_done for host in self._present())
        ):
            time.sleep(_LOOK_SECONDS / 10)
        with self._lock:  # from here on no node is let in, nor takes a lost one's place
            self._closing.set()
        self.listener.shut()
        for talk in self._talks.values():
            talk.end("its node has ended")
        flushed = Deadline.after(FLUSH_SECONDS)  # of all together: one whose host is stopped takes all of it
        for talk in self._talks.values():
            talk.close(flushed)
        self.listener.join()
        self._receiver.close()
        self._watching.join(_JOIN_SECONDS)

    def _let_in(self, channel: Channel, theirs: Hello) -> None:
        try:
            talk = self._talk_with(theirs)
        except _TurnedAwayError as error:
            _say_end(channel, str(error))
            channel.close()
            return
        if talk.cuts:
            log(f"{self._roster.names[theirs.host]} is connected again")
        talk.peer.offer(channel, theirs)

    def _talk_with(self, theirs: Hello) -> ControlConnection:
        """Returns the conversation that a connection belongs to.

        Raises:
            _TurnedAwayError: it belongs to none; the connecting node gets the message.
        """
        roster, host = self._roster, theirs.host
        if not (0 < host < roster.hosts == theirs.hosts and theirs.role == CONTROL):
            raise _TurnedAwayError("there is no such host in this job")
        with self._lock:
            if self._closing.is_set():
                raise _TurnedAwayError("its node has ended")
            known = self._incarnations.setdefault(host, theirs.incarnation)
            if theirs.incarnation in self._fenced or (known == theirs.incarnation and host in self._lost):
                raise _TurnedAwayError(_COUNTED_AS_LOST)
            if known == theirs.incarnation:
                return self._talks[host]
            talk, old = self._admit(host, known, theirs.incarnation)
        old.end(_COUNTED_AS_LOST)
        old.close(Deadline.after(_LOST_FLUSH_SECONDS))
        log(f"{roster.names[host]} has restarted, and takes its place in the job again")
        return talk

    def _admit(self, host: int, before: int, incarnation: int) -> tuple[ControlConnection, ControlConnection]:
        """Gives a lost host's place to a new node; returns the conversation with it, and the old one."""
        if not incarnation & 1:  # see `_new_incarnation`
            raise _TurnedAwayError("another node has begun as this host, and this one is not meant to take its place")
        why_not = self._coordinator.why_not()
        if why_not:
            state = "this host counts as lost" if host in self._lost else "another node has begun as this host"
            raise _TurnedAwayError(f"{state}, and {why_not}")
        if host not in self._lost:
            self._give(self._coordinator.lose(host, "another node has begun as this host"))
        self._fenced.add(before)
        self._lost.discard(host)
        self._incarnations[host] = incarnation
        old, new = self._talks[host], self._new_talk(host)
        self._talks[host] = new
        return new, old

    def _present(self) -> list[int]:
        """Returns the hosts that have come and are not lost."""
        with self._lock:
            return [host for host in self._incarnations if host not in self._lost]

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            with self._lock:
                self._give(self._coordinator.tell_news())
            for host in self._present():
                talk = self._talks[host]
                why = talk.watch(arriving=bool(self.listener.strangers))
                if why:
                    with self._lock:
                        if self._talks[host] is talk:  # else another node has its place already
                            self._lost.add(host)
                            self._give(self._coordinator.lose(host, why))
                    talk.end(_COUNTED_AS_LOST)
                    talk.close(Deadline.after(_LOST_FLUSH_SECONDS))

    def _take(self, host: int, report: Report, talk: ControlConnection | None) -> None:
        with self._lock:
            if talk is not None and self._talks[host] is not talk:
                return  # another node has its place: what a fenced one had said is not its successor's
            self._give(self._coordinator.receive(host, report))

    def _give(self, orders: list[ToHost]) -> None:
        last, body = None, b""  # most orders are for many hosts
        for host, order in orders:
            if host in self._lost:
                continue
            if host == 0:
                self._deliver(order)
                continue
            if order is not last:
                last, body = order, encoded(order)
            self._talks[host].say(body)


class NodeEnd:
    """Another host's end.

    Args:
        roster: the job's hosts.
        address: where this host's copies are reached.
        deliver: gets the coordinator's orders, and `Alone` when there is no coordinator any more.

    Raises:
        StartupError: the coordinator cannot be reached, or turned this host away.
    """

    def __init__(self, roster: Roster, address: Address, deliver: Deliver) -> None:
        self._roster, self._deliver = roster, deliver
        self._closing = threading.Event()
        self._incarnation = _new_incarnation(roster.times_replaced > 0)
        self._said_at = 0  # of which cut it was said that the connection is tried again
        first = _dial(roster, self._incarnation)
        self._talk = ControlConnection(
            0, Timeouts.of(roster.grace), lambda body: deliver(order_of(body)), self._dial_again, first
        )
        self._talk.say(encoded(HelloReport(address)))
        self._watching = threading.Thread(target=self._watch, name="multiverso-hosts-watch", daemon=True)
        self._watching.start()

    @property
    def all_came(self) -> bool:
        """Whether the job is over: the coordinator knows."""
        return True

    def report(self, message: Report) -> None:
        """Sends a report, over the next connection where there is none now."""
        self._talk.say(encoded(message))

    def close(self) -> None:
        """Ends the connection, after what was reported has been sent."""
        self._closing.set()
        self._talk.end("its node has ended")
        self._talk.close(Deadline.after(FLUSH_SECONDS))
        self._watching.join(_JOIN_SECONDS)

    def _dial_again(self, generation: int, begun: Begun) -> tuple[Channel, Hello]:
        talk = self._talk
        if talk.ended is not None:
            raise OSError("it has ended")
        try:
            hello = _hello(self._roster, self._incarnation, generation)
            end = Deadline.after(_AGAIN_SECONDS)
            return connect(self._roster.coordinator, credentials_of(self._roster), hello, end, begun)
        except (OSError, MultiversoError) as error:
            is_new = self._said_at != talk.cuts and talk.ended is None
            if is_new and not isinstance(error, RefusedError):
                self._said_at = talk.cuts
                log(f"the connection to {self._roster.names[0]} is cut, and is tried again ({error})")
            raise

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            why = self._talk.peer.failed or self._talk.watch(self._talk.peer.is_arriving)
            if why and not self._closing.is_set():
                leader = self._roster.names[0]
                self._deliver(Alone(f"the connection to {leader}, which leads the job, is over: {why}"))
                return


def credentials_of(roster: Roster) -> Credentials:
    """Returns the job's credentials."""
    return Credentials.from_text(roster.credentials)


def _new_incarnation(takes_a_place: bool) -> int:
    """Returns a random number for a node; an odd one where it is meant to take a lost one's place.

    So that is known before anything is made of its connection: an odd number ends the node that has the place now.
    """
    return int.from_bytes(os.urandom(8), "big") & ~1 | takes_a_place


def _hello(roster: Roster, incarnation: int, generation: int) -> Hello:
    return Hello(roster.host, roster.hosts, incarnation, generation, role=CONTROL)


def say_absent(roster: Roster, host: int, why: str) -> None:
    """Tells the coordinator that a host will not come, from elsewhere: it ended before its node could connect.

    The coordinator would wait for it. Where the host's node has come this is turned away,
    and where the coordinator cannot be reached nothing is said.

    Args:
        roster: the job's hosts.
        host: which of them.
        why: in words, for the log and the errors.
    """
    try:
        channel, _ = _dial(roster.on(host), _new_incarnation(takes_a_place=False))
    except (OSError, MultiversoError):
        return
    _say_end(channel, why)
    rest = memoryview(bytearray(4096))
    with contextlib.suppress(OSError):
        while channel.recv_into(rest):  # until the coordinator has read that, and has ended it
            pass
    channel.close()


def _say_end(channel: Channel, why: str) -> None:
    frame = ending(why)
    with contextlib.suppress(OSError):
        channel.send(frame.header.pack(), frame.body)


def _dial(roster: Roster, incarnation: int) -> tuple[Channel, Hello]:
    """Connects to the coordinator, which may not be there yet."""
    end = Deadline.after(_CONNECT_SECONDS)
    while True:
        try:
            return connect(roster.coordinator, credentials_of(roster), _hello(roster, incarnation, 1), end)
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
