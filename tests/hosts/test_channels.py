"""Connections by themselves: what goes in comes out; what was changed on an encrypted way ends it with the reason."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from core_support import outcome, wait_for

from multiverso.deadline import Deadline
from multiverso.hosts.peer.frames import HEADER_BYTES, RECEIVED, Header, Numbered, ProtocolError, Reader
from multiverso.hosts.peer.messages import Stream
from multiverso.hosts.peer.peer import Peer
from multiverso.hosts.peer.receiver import Receiver
from multiverso.hosts.peer.resources import Buffers, Pace
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.transport.channel import Channel, Plain, RefusedError
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.handshake import Hello
from multiverso.hosts.transport.tls import Encrypted, context_of, encrypt
from multiverso.hosts.values.frames import NEWS
from multiverso.hosts.values.link import Link


@contextmanager
def connected(
    make: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> Iterator[tuple[Encrypted, Encrypted, socket.socket]]:
    """Both ends after their handshake, and the first one's socket."""
    pytest.importorskip("OpenSSL", reason="pyOpenSSL is not installed")
    job = new_credentials()
    ours, theirs = make()
    found: list[Encrypted] = []

    def listen() -> None:
        context = context_of(job.certificate, job.key, True)
        found.append(encrypt(theirs, context, True, Deadline.after(20)))

    thread = threading.Thread(target=listen)
    thread.start()
    first = encrypt(ours, context_of(job.certificate, job.key, False), False, Deadline.after(20))
    thread.join()
    for end in (ours, theirs):
        end.settimeout(20)
    try:
        yield first, found[0], ours
    finally:
        first.close()
        found[0].close()


def received(channel: Channel, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = channel.recv_into(view)
        assert got
        view = view[got:]
    return bytes(data)


def test_who_waits_has_acknowledged_what_has_come() -> None:
    """The system waits for an answer to send it with; an idle connection looked busy, and slow, until then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Plain(socket.create_connection(listener.getsockname()))
        accepted = listener.accept()[0]
        second = Plain(accepted)
    for _ in range(20):  # so that the system expects answers
        for one, other in ((first, second), (second, first)):
            one.send(b"x")
            assert received(other, 1) == b"x"

    def segments_sent() -> int:  # tcpi_segs_out
        return int.from_bytes(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 140)[136:], sys.byteorder)

    class Waiting:
        def poll(self, milliseconds: int | None = None) -> list[tuple[int, int]]:
            assert milliseconds or segments_sent() > before  # the first time that is left to an answer
            return []

    before = segments_sent()
    first.send(b"x")
    assert received(second, 1) == b"x"
    second._poll = Waiting()  # type: ignore[assignment]
    second.await_some()
    first.close()
    second.close()


def test_what_the_system_does_not_take_at_once_is_sent_by_flush_without_a_copy() -> None:
    ours, theirs = socket.socketpair()
    first, second = Plain(ours), Plain(theirs)
    check_that_what_is_left_is_sent_later(first, second)
    first.close()
    second.close()


def test_what_is_left_of_a_large_part_is_encrypted_only_when_it_is_sent() -> None:
    with connected() as (first, second, socket_of_first):
        socket_of_first.settimeout(None)  # as the handshake leaves it; with one, Python waits before it sends
        check_that_what_is_left_is_sent_later(first, second)


def check_that_what_is_left_is_sent_later(first: Channel, second: Channel) -> None:
    body = bytearray(8 << 20)
    assert not first.send_now(b"head", body)
    body[-4:] = b"late"  # of what is left nothing was copied
    assert not first.send_now(b"next")  # and what follows waits behind it
    sender = threading.Thread(target=lambda: first.send(b"tail"))  # what is left goes first
    sender.start()
    assert received(second, 4 + len(body) + 8) == b"head" + bytes(body) + b"nexttail"
    sender.join()
    assert first.send_now(b"whole")
    assert received(second, 5) == b"whole"


def test_a_small_part_after_a_large_one_and_one_that_ends_early_are_received_over_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = Plain(socket.create_connection(server.getsockname()))
        second = Plain(server.accept()[0])
    large = os.urandom((1 << 20) + 17)

    def send() -> None:
        first.send(large)
        first.send(b"small")
        first.send(large[: len(large) - 300_000])
        first.shutdown()

    sender = threading.Thread(target=send)
    sender.start()
    view = memoryview(bytearray(len(large)))
    assert (second.recv_into(view), bytes(view)) == (len(large), large)
    assert received(second, 5) == b"small"  # is waited for by itself, whatever a large part waits for
    assert second.recv_into(view) == len(large) - 300_000  # the end wakes whoever waits for more
    assert second.recv_into(view) == 0
    sender.join()
    first.close()
    second.close()


def test_large_and_small_parts_come_in_order_from_both_sides() -> None:
    with connected() as (first, second, _):
        large = os.urandom((1 << 20) + 17)
        sender = threading.Thread(target=lambda: first.send(b"head", large, b"", b"tail"))
        sender.start()
        assert second.send_now(b"answer", b"!")
        assert received(second, 4 + len(large) + 4) == b"head" + large + b"tail"
        assert received(first, 7) == b"answer!"
        sender.join()


def cut_anywhere() -> tuple[socket.socket, socket.socket]:
    """Two sockets; what goes from the first to the second is cut at random bytes."""
    (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()

    def relay(source: socket.socket, sink: socket.socket) -> None:
        cuts = random.Random(1)
        with source, sink, suppress(ConnectionError):  # either end may be closed first
            while data := source.recv(cuts.randint(1, 3000)):
                sink.sendall(data)

    with near, far:
        for ends in ((near.dup(), far.dup()), (far.dup(), near.dup())):
            threading.Thread(target=relay, args=ends).start()
    return ours, theirs


def test_records_that_the_network_has_cut_anywhere_are_put_together() -> None:
    with connected(cut_anywhere) as (first, second, _):
        text = os.urandom(100_000)
        for length in (1, 5, 16_384, 40_000, 100_000):
            first.send(text[:length])
            assert received(second, length) == text[:length]


def test_what_was_changed_on_the_way_ends_the_connection_with_the_reason() -> None:
    with connected() as (_, second, socket_of_first):
        socket_of_first.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody has encrypted
        with pytest.raises(ConnectionError, match=r"TLS: .*(mac|decrypt)"):
            second.recv_into(memoryview(bytearray(1)))


def test_a_pyopenssl_that_keeps_openssl_otherwise_is_refused_with_what_to_install() -> None:
    pytest.importorskip("OpenSSL", reason="pyOpenSSL is not installed")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RefusedError, match=r"keeps it otherwise.*_ssl.*pip install"):
        Encrypted(ours, object())


def check_that_what_is_there_is_received_without_a_wait(first: Channel, second: Channel) -> None:
    view = memoryview(bytearray(10))
    with pytest.raises(BlockingIOError):
        second.recv_now(view)
    first.send(b"0123456789abcde")
    got = b""
    while len(got) < 15:  # also what the last read has received and not given
        second.await_some()
        with suppress(BlockingIOError):
            got += view[: second.recv_now(view)].tobytes()
    assert got == b"0123456789abcde"
    with pytest.raises(BlockingIOError):
        second.recv_now(view)
    first.shutdown()
    second.await_some()
    assert second.recv_now(view) == 0


def test_what_is_there_is_received_without_a_wait() -> None:
    ours, theirs = socket.socketpair()
    first, second = Plain(ours), Plain(theirs)
    check_that_what_is_there_is_received_without_a_wait(first, second)
    first.close()
    second.close()
    with connected() as (encrypted, other, _):
        for end in (encrypted, other):
            end._socket.settimeout(None)
        with suppress(BlockingIOError):  # what TLS itself says after the handshake
            other.recv_now(memoryview(bytearray(1)))
        check_that_what_is_there_is_received_without_a_wait(encrypted, other)


def test_who_closes_after_a_cut_ends_once_the_other_side_has_said_that_it_has_all() -> None:
    """It waited for its whole time: nothing was left to send, and nobody woke it."""
    carried = Stream(lambda message: None, Buffers(1))
    peer = Peer(1, carried, Pace(0), None, "test")
    peer.start()
    others = []
    for generation in (1, 2):
        ours, theirs = socket.socketpair()
        theirs.settimeout(20)
        others.append(Plain(theirs))
        peer.offer(Plain(ours), Hello(1, 2, incarnation=5, generation=generation))
        assert Header.unpack(received(others[-1], HEADER_BYTES)).kind == RECEIVED
        if generation == 1:
            others[0].send(Header(RECEIVED).pack())
            carried.put(b"word")
            peer.pump()
            received(others[0], HEADER_BYTES + 4)
            others[0].close()
    closing = threading.Thread(target=peer.close, args=(Deadline.after(120),), kwargs={"last_words_seconds": 120.0})
    closing.start()
    wait_for(lambda: peer._closing_soon)
    assert carried.has_words
    others[1].send(Header(RECEIVED, received=1).pack())
    closing.join(30)
    assert not closing.is_alive()
    others[1].close()


def test_who_waits_leaves_nothing_in_openssl_that_would_wake_nobody() -> None:
    with connected() as (first, second, socket_of_first):
        socket_of_first.settimeout(None)
        peer = Peer(1, Link(0, 1, Pace(0)), Pace(0), None, "test")
        peer._channel, peer._reader = first, Reader()
        many = 1000  # more than is read at a time
        second.send(b"".join(Header(NEWS, number=number).pack() for number in range(1, many + 1)))
        peer.receive_now()
        assert peer.bytes_received == many * HEADER_BYTES


@pytest.mark.parametrize(
    "carried",
    [
        Link(0, 1, Pace(0)),
        Neighbour(Rounds(0, range(2), lambda peer: None), 1),
        Stream(lambda message: None, Buffers(1)),
    ],
    ids=lambda carried: type(carried).__name__,
)
def test_a_frame_of_a_kind_that_nobody_here_knows_ends_the_connection(carried: Numbered) -> None:
    with pytest.raises(ProtocolError, match="no kind of frame has the number 250"):
        carried.accept(Header(250))


def test_what_came_with_the_handshake_is_received_though_the_socket_is_empty() -> None:
    """A receiver waits for the socket, and OpenSSL may have taken more from it than the handshake has read."""
    with connected() as (first, second, socket_of_first):
        socket_of_first.settimeout(None)
        second.send(b"welcome")
        second.send(Header(RECEIVED).pack())
        assert received(first, 7) == b"welcome"
        assert first.holds_some
        receiver, carried = Receiver("test"), Stream(lambda message: None, Buffers(1))
        carried.put(b"word")
        peer = Peer(1, carried, Pace(0), None, "test", receiver=receiver)
        peer.start()
        peer.offer(first, Hello(1, 2, incarnation=5, generation=1))
        try:
            wait_for(lambda: carried._ready, 20)
        finally:
            peer.end()
            receiver.close()


def test_an_error_in_one_connection_ends_that_and_no_other() -> None:
    receiver, pairs = Receiver("test"), [socket.socketpair() for _ in range(2)]
    received_by: list[list[bytes]] = [[], []]
    errors: list[Any] = [None, None]

    def take(which: int) -> bool:
        received_by[which].append(pairs[which][0].recv(1))
        return {b"x": True, b"": False}[received_by[which][-1]]

    def wait(which: int) -> None:
        errors[which] = outcome(lambda: receiver.receive(pairs[which][0].fileno(), lambda: take(which)))

    threads = [threading.Thread(target=wait, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    pairs[0][1].send(b"?")
    threads[0].join(20)
    pairs[1][1].send(b"x")
    wait_for(lambda: received_by[1] == [b"x"], 20)
    pairs[1][1].close()
    threads[1].join(20)
    receiver.close()
    assert [type(error) for error in errors] == [KeyError, type(None)]
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
