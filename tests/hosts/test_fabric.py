"""Copies of tables on several hosts, kept near each other over real sockets."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from core_support import wait_for
from fabric_support import Adder, barrier, changed, fabrics, interrupt, new_shard

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError, WaitTimeoutError
from multiverso.hosts import fabric
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.peer import peer as peer_module
from multiverso.hosts.peer import peers as peers_module
from multiverso.hosts.transport import handshake, tls
from multiverso.hosts.transport.channel import RefusedError
from multiverso.hosts.transport.credentials import Credentials, new_credentials
from multiverso.hosts.transport.handshake import Hello
from multiverso.hosts.transport.listener import open_port
from multiverso.hosts.values.copies import CHUNK_BYTES, chunk_bytes_of, chunks_of, homes_of
from multiverso.hosts.values.state import Ticket
from multiverso.layout import words as at
from multiverso.memory import words
from multiverso.spec.table import DTYPES, TableSpec

CHUNKS = TableSpec("array", 1, 700_000)  # three chunks: with two hosts, each is home of some


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_sums_are_exact_on_all_hosts_through_cut_connections(encrypted: bool) -> None:
    with fabrics(2, new_credentials(encrypted), share=0) as made:
        shards = [new_shard(CHUNKS) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        adders = [Adder(shard) for shard in shards]
        barrier(made)  # both are connected
        for turn in range(40):
            for adder in adders:
                adder.add(np.full(CHUNKS.elements, 1 + turn % 3, "float32"))
            interrupt(made[turn % 2], (turn + 1) % 2)
        barrier(made)
        expected = 2 * sum(1 + turn % 3 for turn in range(40))
        for shard in shards:
            assert np.all(shard.values() == expected)
        connections = made[0].statistics()[1]["connections"]
        assert connections > 1, "the connection was never cut"


def test_a_link_that_is_cut_again_and_again_and_carries_something_between_is_made_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a connection had carried, the next pause was twice as long, up to a second for each cut."""
    monkeypatch.setattr(peer_module, "_LATEST_SECONDS", 3600.0)
    with fabrics(2, share=0) as made:
        shards = [new_shard(TableSpec("array", 1, 100)) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        adders = [Adder(shard) for shard in shards]
        for _ in range(15):
            for adder in adders:
                adder.add(np.ones(100, "float32"))
            barrier(made)
            interrupt(made[1], 0)
        barrier(made)
        assert all(np.all(shard.values() == 30) for shard in shards)


def test_values_that_take_long_to_come_say_how_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("multiverso.saying._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("multiverso.saying.say", said.append)
    with fabrics(2, share=0) as made:
        for each in made:
            each.attach(1, new_shard(CHUNKS))
        barrier(made)
        left: set[Any] = set(range(1, 100_000))
        monkeypatch.setattr(made[0].links[1], "settle", lambda take, tables: Ticket(1, left))
        taking = threading.Thread(target=made[0].take, args=(Deadline.after(60),))
        taking.start()
        wait_for(lambda: left.pop() and said)  # it looks each half a second how many are left
        left.clear()
        taking.join()
    assert re.fullmatch(r"taking values from 1 other host\(s\): \d+\.\d of 104\.\d GB, about \d+ s left", said[0])


def test_an_encrypted_connection_is_made_anew_before_its_key_is_used_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_MOST_RECORDS", 250)  # a pass over the table is about 200 each way
    with fabrics(2, new_credentials(encrypted=True), share=0) as made:
        shards = [new_shard(CHUNKS) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        adders = [Adder(shard) for shard in shards]
        for _ in range(6):
            for adder in adders:
                adder.add(np.ones(CHUNKS.elements, "float32"))
            barrier(made)
        assert all(np.all(shard.values() == 12) for shard in shards)
        assert made[0].statistics()[1]["connections"] > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_any_numbers_are_the_same_on_all_hosts_after_a_barrier(dtype: str) -> None:
    spec = TableSpec("matrix", 100, 7, dtype)
    random = np.random.default_rng(1)
    with fabrics(3, share=0) as made:
        shards = [new_shard(spec) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        adders = [Adder(shard) for shard in shards]
        total = np.zeros(spec.elements, dtype)
        for _ in range(5):
            for adder in adders:
                if dtype.startswith("int"):
                    delta = random.integers(-(2**30), 2**30, spec.elements).astype(dtype)
                else:
                    delta = (random.standard_normal(spec.elements) * 10.0 ** random.integers(-9, 9)).astype(dtype)
                adder.add(delta)
                total += delta
        barrier(made)
        first = shards[0].values().tobytes()
        assert all(shard.values().tobytes() == first for shard in shards)
        if dtype.startswith("int"):
            assert np.array_equal(shards[0].values(), total)
        else:
            np.testing.assert_allclose(shards[0].values(), total, rtol=1e-3, atol=1e-6 * float(np.abs(total).max()))


@pytest.mark.parametrize("number", [1, 2], ids=["at_home", "elsewhere"])
def test_a_node_that_rests_hears_of_a_change_at_once(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "_LATER_SECONDS", 600.0)  # so long it rests if nobody wakes it
    spec = TableSpec("array", 1, 8)
    with fabrics(2, share=0) as made:
        shards = [new_shard(spec, number) for _ in made]
        adders = [Adder(shard) for shard in shards]
        for host, shard, adder in zip(made, shards, adders, strict=True):
            host.tables.rest.share(adder.control)
            host.attach(number, shard, control=adder.control)
        barrier(made)
        for turn in range(1, 4):
            for adder in adders:
                wait_for(lambda adder=adder: words.load32(adder.control + at.NODE_RESTS) == 1)  # type: ignore[misc]
            adders[0].add(np.ones(spec.elements))
            wait_for(lambda turn=turn: bool(np.all(shards[1].values() == turn)))  # type: ignore[misc]


def test_who_waits_for_a_host_that_is_lost_and_there_again_waits_for_it_no_longer() -> None:
    """Both may be over before the one that waits looks."""
    with Fabric(0, 2, new_credentials(encrypted=False)) as fabric:
        fabric.attach(1, new_shard(CHUNKS))
        taken: list[None] = []
        waiting = threading.Thread(target=lambda: taken.append(fabric.take(Deadline.after(60))))  # type: ignore[func-returns-value]
        waiting.start()
        wait_for(lambda: bool(fabric._settled._waiters))  # type: ignore[attr-defined]
        with fabric._settled:
            fabric.regroup([0])
            fabric.joined(1)
        waiting.join(30)
        assert taken, "it has asked the new homes"


def test_what_is_no_finite_number_travels_and_goes_again() -> None:
    spec = TableSpec("array", 1, 6)
    with fabrics(2, share=0) as made:
        shards = [new_shard(spec) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        for values in ([np.nan, np.inf, -np.inf, 3e38, 1, 0], [0, 1, np.nan, -3e38, np.inf, 0], [1, 2, 3, 4, 5, 6]):
            for writer in shards:
                with np.errstate(all="ignore"):
                    writer.values()[:] = values
                changed(writer)
                barrier(made)
                np.testing.assert_array_equal(shards[0].values(), shards[1].values())
                np.testing.assert_array_equal(writer.values(), np.array(values, "float32"))


def test_a_table_that_another_host_has_not_yet_waits_for_it_and_a_closed_one_is_dropped() -> None:
    spec = TableSpec("array", 1, 5)
    with fabrics(2, share=0) as made:
        shards = [new_shard(spec, number) for number in (1, 2) for _ in made]
        made[0].attach(1, shards[0])
        Adder(shards[0]).add(np.ones(5))
        made[1].attach(1, shards[1])
        barrier(made)
        assert np.all(shards[1].values() == 1)
        made[1].detach(1)
        Adder(shards[0]).add(np.ones(5))
        made[0].attach(3, shards[2])  # its home is host 1
        with pytest.raises(WaitTimeoutError, match="host 0 could not give its changes to host"):
            made[0].settle(Deadline.after(0), [3])
        made[1].attach(3, shards[3])
        made[0].detach(1)
        Adder(shards[3]).add(np.ones(5))
        barrier(made)
        assert np.all(shards[2].values() == 1)
        assert np.all(shards[1].values() == 1)


def test_tables_at_rest_send_nothing() -> None:
    spec = TableSpec("array", 1, 5)
    with fabrics(2, share=0) as made:
        shards = [new_shard(spec, number) for number in (1, 2) for _ in made]
        for i, shard in enumerate(shards):
            made[i % 2].attach(1 + i // 2, shard)
        for shard in shards:
            Adder(shard).add(np.ones(5))
        barrier(made)
        before = None
        still = 0
        for _ in range(3000):  # the last passes find nothing, and then no more begin
            now = [fabric.statistics() for fabric in made]
            still = still + 1 if now == before else 0
            before = now
            if still == 20:
                break
            threading.Event().wait(0.01)
        assert still == 20, before


def test_adds_reach_other_hosts_beside_the_training_without_a_barrier() -> None:
    spec = TableSpec("array", 1, 5)
    with fabrics(2) as made:
        shards = [new_shard(spec) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        for i, adding in enumerate((0, 1, 0)):
            Adder(shards[adding]).add(np.ones(5))
            deadline = Deadline.after(30)
            while not np.all(shards[1 - adding].values() == i + 1):
                assert not deadline.passed
                threading.Event().wait(0.002)


def test_a_lost_host_and_a_closed_fabric_end_waits() -> None:
    with fabrics(2, share=0) as made:
        for fabric in made:
            for number in (1, 2):
                fabric.attach(number, new_shard(TableSpec("array", 1, 5), number))
        barrier(made)
        made[1].close()
        threading.Timer(0.05, made[0].lost, (1,)).start()
        with pytest.raises(MultiversoError, match="host 1 is lost"):
            made[0].settle(Deadline.after(60))


def test_a_job_goes_on_without_a_lost_host_which_may_come_again() -> None:
    with fabrics(3, job := new_credentials(False), share=0) as made:
        shards = [new_shard(CHUNKS) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        for shard in shards:
            Adder(shard).add(np.ones(CHUNKS.elements))
        barrier(made)
        made[2].close()
        left = made[:2]
        for fabric in left:
            fabric.lost(2)
        for fabric, shard in zip(left, shards, strict=False):
            fabric.regroup([0, 1])
            Adder(shard).add(np.ones(CHUNKS.elements))
        barrier(left)
        assert all(np.all(shard.values() == 5) for shard in shards[:2])
        with Fabric(2, 3, job, share=0) as again:
            again.begin_anew([[0, 1]], [], 2)
            again.listen()
            new = new_shard(CHUNKS)
            again.attach(1, new)
            for peer in (0, 1):
                made[peer].joined(2)
                again.connect(peer, made[2].peers._addresses[peer])
            again.take(Deadline.after(60))
            assert np.all(new.values() == 5)
            Adder(new).add(np.ones(CHUNKS.elements))
            barrier([*left, again])
            assert all(np.all(shard.values() == 6) for shard in (*shards[:2], new))


def test_a_host_that_is_lost_while_it_is_dialled_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unplugged host answers nothing for the whole handshake's time: what waits for it is ended."""
    monkeypatch.setattr(peers_module, "HANDSHAKE_SECONDS", 300.0)  # more than this test may take
    with socket.create_server(("127.0.0.1", 0)) as unplugged, Fabric(1, 2, new_credentials(False)) as fabric:
        fabric.listen()
        fabric.attach(1, new_shard(CHUNKS))
        dialling = fabric.ends[0]
        fabric.connect(0, unplugged.getsockname()[:2])
        with unplugged.accept()[0]:  # it is connected, and nothing is said
            fabric.regroup([1])
            dialling._thread.join(60)
            assert not dialling._thread.is_alive()
            fabric.settle(Deadline.after(60))


def test_a_host_that_is_dialled_does_not_keep_the_fabric_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the whole handshake's time."""
    monkeypatch.setattr(peers_module, "HANDSHAKE_SECONDS", 300.0)  # more than this test may take
    with ExitStack() as stack:
        unplugged = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        fabric = Fabric(6, 7, new_credentials(False))
        fabric.listen()
        fabric.attach(1, new_shard(CHUNKS))
        for host in range(6):  # more than are dialled at a time
            fabric.connect(host, unplugged.getsockname()[:2])
        silent = [stack.enter_context(unplugged.accept()[0]) for _ in range(peers_module._AT_A_TIME)]
        fabric.close()
        for each in silent:
            while each.recv(1024):
                pass  # its hello, and then its end


def test_hosts_that_do_not_answer_keep_no_other_from_being_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "HANDSHAKE_SECONDS", 300.0)  # more than this test may take
    monkeypatch.setattr(peers_module, "_TURN_SECONDS", 0.1)
    job, last = new_credentials(False), 1 + peers_module._AT_A_TIME
    with ExitStack() as stack:
        unplugged = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        first, high = (stack.enter_context(Fabric(host, last + 1, job)) for host in (0, last))
        place = first.listen()
        high.listen()
        high.attach(1, new_shard(CHUNKS))
        for host in range(1, last):
            high.connect(host, unplugged.getsockname()[:2])
        for _ in range(1, last):
            stack.enter_context(unplugged.accept()[0])
        high.connect(0, place)
        wait_for(lambda: high.ends[0].connected)  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [MemoryError, MultiversoError])
def test_what_cannot_be_sent_ends_the_connection_and_goes_over_the_next(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The thread that sends once ended alone: the connection stayed, and everybody waited for what did not come."""
    with fabrics(2) as made:
        shards = [new_shard(CHUNKS) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        barrier(made)
        link, raised = made[0].links[1], list[bool]()
        take = link.next

        def fails_once(*arguments: Any) -> Any:
            if not raised and threading.current_thread().name.startswith("multiverso-values-out"):
                raised.append(True)
                raise error("now")
            return take(*arguments)

        monkeypatch.setattr(link, "next", fails_once)
        Adder(shards[0]).add(np.ones(700_000))
        barrier(made)
        assert raised
        assert np.all(shards[1].values() == 1)
    assert f"nothing can be sent: {error.__name__}('now')" in capfd.readouterr().err


def test_memory_that_is_missing_where_anybody_sends_costs_a_connection(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread of the node's that had something to send got the error, and what it had taken was never sent."""
    with fabrics(2) as made:
        shards = [new_shard(CHUNKS) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        barrier(made)
        peer, link, raised = made[0].ends[1], made[0].links[1], list[bool]()
        take, wait, connections = link.next, link.wait, peer.connections

        def is_here() -> bool:
            return not raised and threading.current_thread() is threading.main_thread()

        def fails_once(*arguments: Any) -> Any:
            if is_here():
                raised.append(True)
                raise MemoryError("now")
            return take(*arguments)

        monkeypatch.setattr(link, "wait", lambda now: 0.0 if is_here() else wait(now))
        monkeypatch.setattr(link, "next", fails_once)
        Adder(shards[0]).add(np.ones(700_000))
        wait_for(lambda: peer.pump() or bool(raised))
        barrier(made)
        assert np.all(shards[1].values() == 1)
        assert peer.connections > connections
    assert "nothing can be sent: MemoryError('now')" in capfd.readouterr().err


def test_a_connection_that_got_no_thread_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that made it ended by that: there was never another one, and everybody waited."""
    start, refused = threading.Thread.start, list[str]()

    def fails_once(thread: threading.Thread) -> None:
        if not refused and thread.name.startswith("multiverso-values-out"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    with fabrics(2) as made:
        shards = [new_shard(TableSpec("array", 1, 5)) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        Adder(shards[0]).add(np.ones(5))
        barrier(made)
        assert np.all(shards[1].values() == 1)
    assert refused


# -- who is let in -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ours, theirs, words",
    [
        (False, False, "another job"),
        (True, True, "not of this job"),
        (True, False, "insecure-fabric"),
        (False, True, "insecure-fabric"),
    ],
)
def test_other_jobs_are_refused_in_words(ours: bool, theirs: bool, words: str) -> None:
    assert words in str(_refusal(new_credentials(ours), new_credentials(theirs)))


@pytest.mark.parametrize("encrypted", [False, True])
def test_another_version_is_refused_in_words(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_credentials(encrypted)
    monkeypatch.setattr(Hello, "pack", _pack_of_version_99)
    assert "version 99" in str(_refusal(job, job))


def _pack_of_version_99(self: Hello, job: Credentials, pack: Any = Hello.pack) -> bytes:
    raw = pack(self, job)
    return raw[:4] + (99).to_bytes(2, "big") + raw[6:]


def test_who_knows_the_job_but_not_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = new_credentials(False)
    monkeypatch.setattr(handshake, "job_of", lambda credentials: b"j" * 16)
    assert "secret" in str(_refusal(job, Credentials(b"x" * 32)))


def _refusal(listens: Credentials, connects: Credentials) -> BaseException:
    """What the connecting side is told."""
    listener = open_port(("127.0.0.1", 0))
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            handshake.accept(listener.accept()[0], listens, Hello(0, 2, 1), Deadline.after(30))
        except (OSError, StartupError) as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(OSError) as caught:
            handshake.connect(listener.getsockname(), connects, Hello(1, 2, 1), Deadline.after(30))
    finally:
        thread.join()
        listener.close()
    assert errors, "the listening side let it in"
    return caught.value


def test_a_stranger_that_says_nothing_or_nonsense_hinders_nobody() -> None:
    with fabrics(2, share=0) as made:
        shards = [new_shard(TableSpec("array", 1, 5)) for _ in made]
        place = made[1].peers._addresses[0]
        with socket.create_connection(place) as silent, socket.create_connection(place) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
            for fabric, shard in zip(made, shards, strict=True):
                fabric.attach(1, shard)
            Adder(shards[1]).add(np.ones(5))
            barrier(made)
            assert np.all(shards[0].values() == 1)
            assert silent.fileno() >= 0


def test_a_wrong_secret_ends_the_wait_for_the_link_with_the_reason() -> None:
    with Fabric(0, 2, new_credentials(False)) as first, Fabric(1, 2, new_credentials(False)) as second:
        place = first.listen()
        second.listen()
        second.attach(2, new_shard(TableSpec("array", 1, 5), 2))
        second.connect(0, place)
        with pytest.raises(MultiversoError, match="another job"):
            second.settle(Deadline.after(30))


# -- small things ----------------------------------------------------------------------------------------------------


def test_chunks_cover_a_table_in_whole_stripes() -> None:
    for elements, stripe, nbytes in [(1, 1, 4), (100, 7, 64), (100, 64, 64), (1000, 16, 8), (7, 7, 8)]:
        chunks = chunks_of(elements, stripe, 4, nbytes)
        assert [c.low for c in chunks] == [0, *(c.high for c in chunks[:-1])]
        assert chunks[-1].high == elements
        assert all(c.size * 4 <= nbytes for c in chunks)
        if stripe * 4 <= nbytes:
            assert all(c.low % stripe == 0 for c in chunks)


def test_all_hosts_are_home_to_as_much_of_a_table() -> None:
    assert chunk_bytes_of(400 << 20, 100) == CHUNK_BYTES  # four for each
    assert chunk_bytes_of(4, 2) == 64 << 10  # smaller ones would save nothing
    for megabytes, hosts, each in [(1, 2, 1), (3, 2, 2), (40, 30, 2), (40, 100, 1), (25, 64, 1)]:
        nbytes = chunk_bytes_of(megabytes << 20, hosts)
        chunks = chunks_of(megabytes << 18, 2048, 4, nbytes)
        homes = homes_of(1, len(chunks), list(range(hosts)))
        assert nbytes < CHUNK_BYTES
        assert 0.8 * each * hosts <= len(chunks) <= each * hosts
        assert max(map(homes.count, homes)) == each


def test_homes_are_spread() -> None:
    assert homes_of(1, 6, [0, 1, 2]) == [0, 0, 1, 1, 2, 2]
    assert {homes_of(number, 1, [0, 1, 2])[0] for number in range(3)} == {0, 1, 2}


def test_credentials_travel_as_text_and_damage_is_refused() -> None:
    for encrypted in (False, True):
        made = new_credentials(encrypted)
        assert Credentials.from_text(made.to_text()) == made
        assert made.secret.hex() not in repr(made)
        for text in ("", "x", made.to_text()[:-8], "A" * 20_000):
            with pytest.raises(StartupError, match="damaged"):
                Credentials.from_text(text)


def test_a_refusal_is_an_error_of_starting_and_of_the_connection() -> None:
    assert issubclass(RefusedError, StartupError)
    assert issubclass(RefusedError, ConnectionError)
