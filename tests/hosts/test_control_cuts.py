"""Control connections that are cut are made again; who is silent for longer than the grace is lost, on both sides."""

from __future__ import annotations

import random
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from core_support import in_threads, outcome, wait_for
from rehearsing import rehearsal

import multiverso as mv
from multiverso.deadline import Deadline
from multiverso.errors import NodeLostError, WorkerLostError
from multiverso.hosts.control.connections import ControlConnection
from multiverso.hosts.control.messages import Alone
from multiverso.hosts.peer.frames import HEADER_BYTES, RECEIVED, Header
from multiverso.hosts.peer.messages import MESSAGE
from multiverso.hosts.peer.watched_stream import ENDS, Timeouts, WatchedStream
from multiverso.hosts.transport.channel import Plain
from multiverso.hosts.transport.handshake import Hello
from multiverso.runtime import Session


def test_cuts_lose_nothing_and_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    rounds, most_rounds = 12, 1000
    enough: list[bool] = []

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1000, dtype="int64", session=session)
        for number in range(most_rounds):
            if number % 10 == 9:
                mv.ArrayTableHandler(3, session=session)
            table.add([1] * 1000)
            session.barrier()
            assert set(table.get().tolist()) == {3 * (number + 1)}
            session.barrier()
            counted.wait(30)
            if number + 1 >= rounds and enough[number]:
                break
        return True

    with rehearsal(1, 1, 1, relayed=True) as job:
        counted = threading.Barrier(3, lambda: enough.append(all(r.connections > 2 for r in job.relays.values())))
        over = threading.Event()
        randomness = random.Random(5)

        def cut() -> None:
            most = dict.fromkeys(job.relays, 0)
            while not over.wait(0.005):
                for host, relay in job.relays.items():
                    if relay.carried > most[host]:  # more than the handshake: they get on
                        most[host] = randomness.randrange(1000, 5000)
                        relay.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            assert job.run(work) == [True] * 3
            assert all(node.stay() for node in job.nodes)  # what was said last has reached all
        finally:
            over.set()
            cutter.join()
        assert enough[-1], "nothing was cut"
    said = capfd.readouterr().err
    assert "is connected again" in said
    assert "is lost" not in said


def test_silence_for_longer_than_the_grace_loses_the_host_on_both_sides() -> None:
    with rehearsal(1, 1, relayed=True, grace=5.0) as job:
        met, silenced = threading.Barrier(2), threading.Event()

        def work(worker_id: int) -> Any:
            with job.session(worker_id) as session:
                table = mv.ArrayTableHandler(10, session=session)
                table.add([1.0] * 10)
                session.barrier()
                met.wait(30)
                if worker_id == 0:
                    job.relays[1].speaks.clear()
                    silenced.set()
                silenced.wait(30)
                error = outcome(session.barrier)
                return error, table.snapshot()[0]

        (first, here), (second, there) = in_threads([lambda i=i: work(i) for i in range(2)])  # type: ignore[misc]
        assert isinstance(first, WorkerLostError)
        assert "host-1" in str(first)
        assert isinstance(second, NodeLostError)
        assert here == there == 2.0


def test_a_host_that_has_just_connected_again_is_heard_out_before_it_counts_as_lost() -> None:
    """On a busy machine the handshake takes most of the grace; it has shown that the other node is there."""
    now = 0.0
    conversation = WatchedStream(lambda message: None, Timeouts.of(6.0), clock=lambda: now)
    conversation.connect(1)
    now = 3.0
    assert conversation.is_silent(now)
    conversation.cut()
    now = 5.5
    conversation.connect(1)
    assert not conversation.why_lost(8.4)
    conversation.arrived(Header(RECEIVED), None, 8.4)
    assert not conversation.why_lost(14.3)
    assert conversation.why_lost(14.5) == "it was silent for 6 s"

    now = 14.0
    conversation.cut()
    conversation.connect(1)
    assert not conversation.why_lost(16.9)
    assert conversation.why_lost(17.1), "no word over the new connection, either"


def test_a_connection_that_is_being_made_is_waited_for_as_long_as_a_silent_one() -> None:
    """In rehearsals of 64 hosts on two cores some took longer than 5 s to show that they belong to the job."""
    now = 0.0
    conversation = WatchedStream(lambda message: None, Timeouts.of(30.0), clock=lambda: now)
    conversation.connect(1)
    conversation.cut()

    def look_until(end: float, arriving: bool) -> str:
        nonlocal now
        while now < end and not conversation.why_lost(now):
            now += 0.1
            conversation.look(now, arriving)
        return conversation.why_lost(now)

    assert not look_until(1.0, arriving=False)
    assert not look_until(20.0, arriving=True)
    assert not look_until(23.0, arriving=False)
    assert look_until(25.0, arriving=False) == "the connection to it ended, and was not made again within 5 s"
    conversation.connect(1)
    conversation.arrived(Header(RECEIVED), None, now)
    conversation.cut()
    assert look_until(1000.0, arriving=True) == "it was silent for 30 s", "but not for ever"


def test_a_node_that_has_reached_the_port_and_is_slow_to_prove_itself_is_not_lost() -> None:
    with rehearsal(1, 1, relayed=True, grace=20.0) as job:
        relay = job.relays[1]

        def work(session: Session) -> Any:
            session.barrier()
            if session.worker_id == 0:
                relay.speaks.clear()
                relay.cut()
                time.sleep(Timeouts().ended_seconds + 1.5)
                relay.speaks.set()
            session.barrier()
            there = session.live_workers()
            session.barrier()  # who leaves is there no longer
            return there

        assert job.run(work) == [[0, 1]] * 2
        assert relay.connections > 1


def test_time_in_which_this_node_was_stopped_is_none_of_the_others_silence() -> None:
    """A rehearsal of 64 hosts on two cores lost some: nobody had had a processor for seconds."""
    now = 0.0
    conversation = WatchedStream(lambda message: None, Timeouts.of(30.0), clock=lambda: now)
    conversation.connect(1)

    def look_until(end: float) -> None:
        nonlocal now
        while now < end:
            now += 0.1
            conversation.look(now)

    look_until(4.0)
    now = 100.0  # stopped
    conversation.look(now)
    assert not conversation.is_silent(now)
    conversation.cut()
    now = 200.0
    conversation.look(now)
    assert not conversation.why_lost(now)
    look_until(204.0)
    assert not conversation.why_lost(now)
    look_until(205.0)
    assert "was not made again within 5 s" in conversation.why_lost(now)


def test_a_link_that_is_silent_for_less_than_the_grace_is_survived() -> None:
    with rehearsal(1, 1, relayed=True, grace=30.0) as job:

        def work(session: Session) -> Any:
            table = mv.ArrayTableHandler(10, session=session)
            if session.worker_id == 0:
                job.relays[1].speaks.clear()
                job.relays[1].is_open.clear()
                began = time.monotonic()
                wait_for(lambda: time.monotonic() - began > 0.5)
                job.relays[1].cut()  # what was under way is lost with it
                job.relays[1].speaks.set()
                job.relays[1].is_open.set()
            table.add([1.0] * 10)
            session.barrier()
            return table.get()[0]

        assert job.run(work) == [2.0, 2.0]


def test_another_node_in_the_place_of_a_live_one_is_refused() -> None:
    """Also in a job that would take one in: this one is not meant to take a lost one's place."""
    from multiverso.hosts.control.connections import NodeEnd

    with rehearsal(1, 1, on_lost="continue") as job:
        sessions = in_threads([lambda i=i: job.session(i) for i in range(2)])  # type: ignore[misc]
        heard: list[Any] = []
        other = NodeEnd(job.roster.on(1), ("127.0.0.1", 1), heard.append)
        try:
            wait_for(lambda: heard)
            why = "another node has begun as this host, and this one is not meant to take its place"
            assert [type(order) for order in heard] == [Alone]
            assert heard[0].why.endswith(f"is over: {why}")
        finally:
            other.close()
        in_threads([session.barrier for session in sessions])
        assert [session.live_workers() for session in sessions] == [[0, 1]] * 2
        in_threads([session.shutdown for session in sessions])


HELLO = Hello(1, 2, 8)


def new_talk(heard: list[bytes]) -> ControlConnection:
    return ControlConnection(1, Timeouts(), lambda message: heard.append(bytes(message)), None)


def read_frame(channel: Plain) -> tuple[Header, bytes]:
    head = received(channel, HEADER_BYTES)
    header = Header.unpack(head)
    return header, received(channel, header.length)


def received(channel: Plain, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        assert got, "the connection has ended"
        view = view[got:]
    return bytes(data)


def test_a_connection_that_is_made_while_its_conversation_ends_is_closed_at_once() -> None:
    here, there = socket.socketpair()
    talk = new_talk([])
    talk.end("its node has ended")
    talk.close(Deadline.after(30))
    with there:
        there.settimeout(30)
        talk.peer.offer(Plain(here), HELLO)
        assert there.recv(1) == b""


def test_a_connection_that_comes_after_a_newer_one_is_closed_and_changes_nothing() -> None:
    """It took the newer one's place, and what it said had been heard before ended the conversation with an error."""
    pairs = [socket.socketpair() for _ in range(2)]
    (newer, other), (older, late) = pairs
    for end in (other, late):
        end.settimeout(30)
    heard: list[bytes] = []
    talk, there = new_talk(heard), Plain(other)
    talk.peer.offer(Plain(newer), replace(HELLO, generation=2))
    assert read_frame(there) == (Header(RECEIVED), b"")
    talk.peer.offer(Plain(older), HELLO)
    with late:
        assert late.recv(1) == b""
    there.send(Header(MESSAGE, number=1, length=2).pack() + b"{}")
    wait_for(lambda: heard == [b"{}"])
    talk.close(Deadline.after(30))
    there.close()


def test_why_a_node_ends_comes_after_all_that_it_has_said() -> None:
    """On a new connection it came before what was kept, if the other node had not said yet how far it was."""
    conversation = WatchedStream(lambda message: None, Timeouts())
    conversation.connect(1)
    conversation.put(b"{}")
    conversation.end("its node has ended")
    now = time.monotonic()
    said = conversation.next(now)
    assert said is not None
    assert said.header.kind == RECEIVED
    assert conversation.next(now) is None
    assert conversation.has_words, "who closes it waits for the other node's first word"
    assert conversation.accept(Header(RECEIVED)) is None
    frames = [frame for frame in (conversation.next(now) for _ in range(3)) if frame is not None]
    assert [(frame.header.number, frame.header.flags) for frame in frames] == [(1, 0), (2, ENDS)]
    assert not conversation.has_words


def test_what_comes_after_the_reason_for_an_end_does_not_replace_it() -> None:
    """A report of another thread of the ending node came after a number that nobody had noted: "no node sends" it."""
    heard: list[bytes] = []
    ending, other = (WatchedStream(lambda message: heard.append(bytes(message)), Timeouts()) for _ in range(2))
    for end in (ending, other):
        end.connect(1)
    assert ending.accept(Header(RECEIVED)) is None
    ending.end("its node has ended")
    ending.put(b"{}")
    ending.end("and once more")
    now = time.monotonic()
    while (frame := ending.next(now)) is not None:
        body = other.accept(frame.header)
        if body is not None:
            body[:] = b"".join((frame.body, *frame.more))
        other.arrived(frame.header, body, now)
    assert other.ended == "its node has ended"
    assert heard == [b"{}"]


def test_what_was_said_last_reaches_a_host_that_is_slow_to_read_it() -> None:
    """It had half a second, the slice of any other wait, and not the two that a slow link may take."""
    here, there = socket.socketpair()
    there.settimeout(30)
    heard: list[bytes] = []
    talk, other = new_talk(heard), Plain(there)
    talk.peer.offer(Plain(here), HELLO)
    assert read_frame(other) == (Header(RECEIVED), b"")
    other.send(Header(MESSAGE, number=1, length=2).pack() + b"{}")
    wait_for(lambda: heard)
    talk.say(b"x" * (4 << 20))  # more than the system keeps
    talk.end("its node has ended")
    closing = threading.Thread(target=talk.close, args=(Deadline.after(30),))
    closing.start()
    time.sleep(0.8)  # the other host is slow
    while not (frame := read_frame(other))[0].number:
        pass  # it lives
    header, body = frame
    while not (last := read_frame(other)[1]):
        pass
    closing.join(30)
    assert not closing.is_alive()
    other.close()
    assert (header.number, len(body)) == (1, 4 << 20)
    assert last == b"its node has ended"
