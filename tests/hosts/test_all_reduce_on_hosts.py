"""all_reduce over several hosts: its messages in any order and over any cuts, and sessions that use it."""

from __future__ import annotations

import random
import socket
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import bits, outcome, wait_for
from fabric_support import interrupt
from rehearsing import rehearsal

from multiverso.errors import InterruptedRoundError, ShapeMismatchError, WaitTimeoutError, WorkerLostError
from multiverso.hosts.combining import CHUNK_BYTES, COMBINE, PIECE_BYTES, PIECES, SMALL_BYTES, Combining, Piece
from multiverso.hosts.peer import peer as peer_module
from multiverso.hosts.peer import peers as peers_module
from multiverso.hosts.peer.frames import RECEIVED, Header, ProtocolError
from multiverso.hosts.peer.messages import LONGEST_MESSAGE, MESSAGE, Messages, Stream
from multiverso.hosts.peer.peers import Peers
from multiverso.hosts.peer.resources import Buffers, Pace
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.channel import RefusedError
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.hosts.transport.handshake import MESSAGES
from multiverso.memory.words import load64
from multiverso.runtime import Session
from multiverso.runtime.collective.reducer import Reducer, all_reduce
from multiverso.runtime.several_hosts.reductions import BROKEN, FAILED, LINE, Reductions
from multiverso.runtime.several_hosts.this_host import ThisHost
from multiverso.tables import ArrayTableHandler
from multiverso.wire.requests import Combine


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_brings_each_message_once_and_in_order_through_cuts(seed: int) -> None:
    dice = random.Random(seed)
    wires: list[deque[tuple[Header, bytes]]] = [deque(), deque()]
    put, got = [0, 0], [[], []]  # type: ignore[var-annotated]

    def deliver(side: int, message: Any) -> None:
        got[side].append(int(bytes(message).rstrip(b"\0")))

    ends = [Stream(partial(deliver, side), Buffers(2)) for side in range(2)]
    for end in ends:
        end.connect(1)
    for _ in range(1000):
        side = dice.randrange(2)
        what = dice.random()
        if what < 0.02:  # cut: what is on the wires is gone
            for end, wire in zip(ends, wires, strict=True):
                wire.clear()
                end.cut()
                end.connect(1)
        elif what < 0.3:
            put[side] += 1
            ends[side].put(b"%d" % put[side] + bytes(dice.choice((0, 0, 0, 0, 0, 300_000))))
        elif what < 0.65:
            said(ends[side], wires[side])
        elif wires[1 - side]:
            hear(ends[side], *wires[1 - side].popleft())
    for side in (0, 1, 0, 1):
        while said(ends[side], wires[side]):
            pass
        while wires[side]:
            hear(ends[1 - side], *wires[side].popleft())
    assert got[1] == list(range(1, put[0] + 1))
    assert got[0] == list(range(1, put[1] + 1))
    assert not any(end.has_something for end in ends)


def said(end: Stream, wire: deque[tuple[Header, bytes]]) -> bool:
    """Puts the next frame of a stream on a wire; returns whether there was one."""
    found = end.next(0.0)
    if found is not None:
        wire.append((found.header, b"".join(found.more)))
    return found is not None


def hear(end: Stream, header: Header, body: bytes) -> None:
    room = end.accept(header)
    if room is not None:
        room[:] = body
    end.arrived(header, room, 0.0)


def new_stream() -> Stream:
    stream = Stream(lambda message: None, Buffers(2))
    stream.connect(1)
    return stream


def test_a_stream_keeps_little_of_what_was_received_and_refuses_nonsense() -> None:
    one, other = new_stream(), new_stream()
    wire: deque[tuple[Header, bytes]] = deque()
    assert said(other, wire)
    hear(one, *wire.popleft())
    for number in range(1000):
        one.put(bytes(10))
        assert said(one, wire)
        hear(other, *wire.popleft())
        if said(other, wire):
            hear(one, *wire.popleft())
        assert len(one._kept) <= 65, number
    with pytest.raises(ProtocolError, match="after message"):
        new_stream().accept(Header(MESSAGE, length=10, number=2))
    with pytest.raises(ProtocolError, match="is said to be received"):
        new_stream().accept(Header(MESSAGE, number=1, received=1))
    unsent = new_stream()
    unsent.put(b"{}")
    with pytest.raises(ProtocolError, match="is said to be received"):  # what is to be sent next was gone
        unsent.accept(Header(RECEIVED, received=1))
    with pytest.raises(ProtocolError, match="longest"):
        new_stream().accept(Header(MESSAGE, length=LONGEST_MESSAGE + 1, number=1))
    with pytest.raises(ValueError, match="longest"):
        one.put(bytearray(LONGEST_MESSAGE + 1))
    with pytest.raises(RefusedError, match="restarted"):
        one.connect(2)


def test_a_host_that_is_dialled_does_not_keep_mail_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the whole handshake's time."""
    monkeypatch.setattr(peers_module, "HANDSHAKE_SECONDS", 300.0)  # more than this test may take
    with socket.create_server(("127.0.0.1", 0)) as unplugged:
        place = unplugged.getsockname()[:2]
        peers = Peers(1, 2, new_credentials(False), ("127.0.0.1", 0))
        peers.connect(0, place)
        made = Messages(peers, lambda host, message: None)
        made.open()
        with unplugged.accept()[0] as silent:
            peers.shut()
            peers.close()
            while silent.recv(1024):
                pass  # its hello, and then its end


def test_a_node_that_takes_a_lost_ones_place_may_connect_before_the_loss_is_known() -> None:
    """It was fenced off then in place of the lost one, for ever."""
    credentials = new_credentials(False)

    def node(host: int) -> tuple[Peers, Mapping[int, peer_module.Peer], tuple[str, int]]:
        peers = Peers(host, 2, credentials, ("127.0.0.1", 0))
        ends = peers.carry(MESSAGES, lambda number: Stream(lambda message: None, Buffers(2)), Pace(0))
        return peers, ends, peers.listen()

    first, ends, address = node(0)
    made = [first]
    try:
        for _ in range(2):
            other, its, _ = node(1)
            made.append(other)
            other.connect(0, address)
            other.open(MESSAGES)
            wait_for(lambda its=its: its[0].bytes_received or its[0].connections > 1)  # type: ignore[misc]
            if other is made[1]:
                other.shut()
                other.close()
        first.end(MESSAGES, 1)
        first.renew(MESSAGES, 1)
        wait_for(lambda: ends[1].connected)
    finally:
        for peers in made:
            peers.shut()
            peers.close()


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_combined_in_host_order_whatever_comes_when(seed: int) -> None:
    """With the memory that nodes have: a slot for every second piece, read until a message arrives, then used again."""
    dice, rng = random.Random(seed), np.random.default_rng(seed)
    hosts = [dice.choice(([0, 1], [0, 1, 2], [0, 2, 5]))][0]
    wires: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in hosts for b in hosts if a != b}
    freed: list[Any] = []
    ends = {
        host: Combining(
            host,
            hosts,
            lambda to, *parts, host=host: wires[host, to].append(parts),  # type: ignore[misc]
            lambda body: freed.append(np.copyto(np.frombuffer(body, np.uint8), 255)),
        )
        for host in hosts
    }
    slots = {(host, i): np.empty(PIECE_BYTES, np.uint8) for host in hosts for i in range(2 * PIECES)}
    pieces = []
    for number in range(1, 7):
        dtype = np.dtype(dice.choice(("float32", "float64", "int64")))
        size = dice.choice((1, 100, SMALL_BYTES // 8 + 1, CHUNK_BYTES // 4, CHUNK_BYTES // 2 - 3))
        operation = dice.choice(list(COMBINE))
        pieces.append((Piece(number, number, operation, dtype, size * dtype.itemsize), size))
    own = [[(rng.standard_normal(size) * 9).astype(piece.dtype) for _ in hosts] for piece, size in pieces]
    out: dict[int, list[Any]] = {host: [] for host in hosts}
    begun, done = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0)
    while min(done.values()) < len(pieces):
        ready = [h for h in hosts if begun[h] < len(pieces) and begun[h] - done[h] < PIECES]
        ways = [way for way, wire in wires.items() if wire]
        if ready and (not ways or dice.random() < 0.2):
            host = dice.choice(ready)
            number = begun[host]
            begun[host] += 1
            piece, value = pieces[number][0], own[number][hosts.index(host)]
            mine, result = (slots[host, 2 * (number % PIECES) + i][: piece.nbytes].view(piece.dtype) for i in (0, 1))
            mine[...] = value
            ended = ends[host].begin(piece, mine, result)
        else:
            assert ways, "somebody is missing"
            way = dice.choice(ways)
            host = way[1]
            ended = ends[host].arrived(way[0], memoryview(bytearray().join(wires[way].popleft())))
        for number in ended:
            piece = pieces[done[host]][0]
            mine, result = (slots[host, 2 * (done[host] % PIECES) + i] for i in (0, 1))
            out[host].append(result[: piece.nbytes].view(piece.dtype).copy())
            mine[...] = 255
            done[host] += 1
            assert number == done[host]
    for number, (piece, _) in enumerate(pieces):
        wanted = own[number][0].copy()
        for other in own[number][1:]:
            wanted = COMBINE[piece.operation](wanted, other)
        assert all(bits(out[host][number]) == bits(wanted) for host in hosts)
    assert freed


def test_what_other_nodes_send_is_checked_before_it_is_used() -> None:
    said: list[bytes] = []
    end = Combining(0, [0, 1], lambda host, *parts: said.append(b"".join(parts)))
    other = Combining(1, [0, 1], lambda host, *parts: said.append(b"".join(parts)))
    piece = Piece(1, 7, "sum", np.dtype("float32"), 40)
    other.begin(piece, np.ones(10, np.float32), np.empty(10, np.float32))
    (message,) = said
    for bad in (message[:-1], message + b"x", b"\7" + message[1:], message[:9], message[:8] + bytes(8) + message[16:]):
        with pytest.raises(ProtocolError):
            end.arrived(1, bad)
    assert end.missing(1) == [1]
    assert end.arrived(1, message) == []
    with pytest.raises(ShapeMismatchError, match="another host"):
        end.begin(Piece(1, 8, "sum", np.dtype("float32"), 40), np.ones(10, np.float32), np.empty(10, np.float32))


def test_what_there_is_no_memory_for_is_said_to_whoever_waits_for_it() -> None:
    """The thread that has received it has said that it is here: it is not sent again."""

    def array(*place: Any) -> Any:
        raise MemoryError("no memory")

    line = np.zeros(LINE.size, np.uint8)
    way: Any = SimpleNamespace(send=None, free=None, open=lambda: None, notify=lambda: None)
    memory: Any = SimpleNamespace(address=line.ctypes.data, array=array)
    catalogue: Any = SimpleNamespace(whole_memory=lambda name: memory)
    roster = Roster(0, ("a", "b"), (1, 1), ("127.0.0.1", 1))
    reductions = Reductions(ThisHost(roster, way, catalogue, way, way, way, threading.Event()), way)
    reductions.contribute(0, Combine(1, 1, 4, "float32", "sum"))
    assert load64(line.ctypes.data + FAILED) == BROKEN


# -- sessions ------------------------------------------------------------------------------------------------

LARGE = PIECE_BYTES // 4 * 2 + 12_345


def expected(workers: tuple[int, ...], operation: str, arrays: list[Any], dtype: Any) -> Any:
    """Workers in their order on each host, then hosts in theirs."""
    working = np.float32 if dtype == np.float16 else np.int64 if dtype == np.uint8 else dtype
    combine = COMBINE["sum" if operation == "average" else operation]
    hosts, first = [], 0
    for count in workers:
        part = arrays[first].astype(working)
        for other in arrays[first + 1 : first + count]:
            part = combine(part, other.astype(working))
        hosts.append(part)
        first += count
    result = hosts[0]
    for part in hosts[1:]:
        result = combine(result, part)
    if operation == "average":
        size = sum(workers)
        result = result // size if result.dtype.kind == "i" else result / result.dtype.type(size)
    return result.astype(dtype)


@pytest.mark.parametrize("workers", [(3, 1), (1, 1, 1)], ids=str)
def test_every_worker_has_the_same_bits_through_cut_connections(workers: tuple[int, ...]) -> None:
    cases = [
        (size, np.dtype(dtype), operation)
        for size in (1, 1000, SMALL_BYTES // 4 + 1)
        for dtype in ("float32", "float64", "float16", "int32", "uint8")
        for operation in ("sum", "product", "max", "min", "average")
    ] + [(LARGE, np.dtype("float32"), "sum"), (0, np.dtype("float32"), "sum")]

    def value(worker: int, size: int, dtype: Any) -> Any:
        return (np.random.default_rng([worker, size]).standard_normal(size) * 3 + 4).astype(dtype)

    with rehearsal(*workers, encrypted=len(workers) == 2) as job:

        def work(session: Session) -> str:
            reducer = Reducer(session, session.workers_num)
            for number, (size, dtype, operation) in enumerate(cases):
                arrays = [value(worker, size, dtype) for worker in range(session.workers_num)]
                if session.worker_id == 0 and number % 7 == 3:
                    interrupt(job.nodes[0].hosts.fabric, 1)  # type: ignore[attr-defined]
                got = reducer.all_reduce(arrays[session.worker_id], operation)
                assert bits(got) == bits(expected(workers, operation, arrays, dtype)), (size, dtype, operation)
                mine = arrays[session.worker_id]
                assert reducer.all_reduce(mine, operation, mine) is mine
                assert bits(mine) == bits(got)
            strided = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
            total = reducer.all_reduce(strided)
            assert np.array_equal(total, strided * session.workers_num)
            return "done"

        assert job.run(work) == ["done"] * sum(workers)


@pytest.mark.parametrize("sync", [False, True])
def test_it_ends_no_round(sync: bool) -> None:
    """As `multiverso.all_reduce` calls it, in the middle of a round of a table."""

    def work(session: Session) -> Any:
        table = ArrayTableHandler(2, session=session)
        found = []
        for turn in range(3):
            table.add([1, session.worker_id])
            found.append(all_reduce(session, np.array([session.worker_id + 1, turn]), "max").tolist())
            if sync:
                assert table.get().tolist() == [4 * (turn + 1), 6 * (turn + 1)]
        session.barrier()
        return found, table.snapshot().tolist()

    with rehearsal(2, 2) as job:
        assert job.run(work, sync=sync) == [([[4, 0], [4, 1], [4, 2]], [12, 18])] * 4


def test_who_is_missing_is_named_and_a_call_that_raised_goes_on() -> None:
    waited = threading.Event()

    def work(session: Session) -> Any:
        reducer = Reducer(session, 3)
        mine = np.full(5, session.worker_id + 1.0)
        if session.worker_id == 2:
            assert waited.wait(30)
            return reducer.all_reduce(mine).tolist()
        errors = []
        if session.worker_id == 0:
            errors.append(outcome(lambda: reducer.all_reduce(mine, timeout_seconds=3.0)))
            errors.append(outcome(lambda: reducer.all_reduce(mine, "max")))
            waited.set()
        return [*errors, reducer.all_reduce(mine).tolist()]

    with rehearsal(2, 1) as job:
        (late, other, first), (second,), third = job.run(work)
    assert isinstance(late, WaitTimeoutError)
    assert "all_reduce(sum) of 5 float64: missing worker" in str(late)
    assert "what others add to a reduction, which needs worker" in str(late)
    assert isinstance(other, InterruptedRoundError)
    assert first == second == third == [6.0] * 5


def test_a_death_and_a_leaving_are_errors_that_name_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.collective.across_hosts._LEFT_SECONDS", 0.2)
    for how in ("dies", "leaves"):
        gone, told = threading.Event(), threading.Barrier(2)

        def work(session: Session, how: str = how, gone: Any = gone, told: Any = told) -> Any:
            reducer = Reducer(session, 2)
            reducer.all_reduce(np.ones(3))
            told.wait(30)  # both have it
            if session.worker_id == 1:
                if how == "dies":
                    job.lose(1)
                else:
                    session.shutdown()
                gone.set()
                told.wait(30)
                return None
            assert gone.wait(30)
            errors = [outcome(lambda: reducer.all_reduce(np.ones(3))) for _ in range(2)]
            told.wait(30)
            return errors

        with rehearsal(1, 1, on_lost="continue") as job:
            first, again = job.run(work)[0]
        assert isinstance(first, WorkerLostError), first
        assert "worker 1 (pid" in str(first)
        assert "on host-1)" in str(first)
        assert "all_reduce(sum) of 3 float64" in str(first)
        assert "nothing more can be reduced" in str(again)


def test_different_calls_are_refused_on_all_hosts() -> None:
    def work(session: Session) -> Any:
        reducer = Reducer(session, 2)
        return outcome(lambda: reducer.all_reduce(np.ones(3 + session.worker_id)))

    with rehearsal(1, 1) as job:
        for error in job.run(work):
            assert isinstance(error, ShapeMismatchError)
            assert "do not call all_reduce with the same things" in str(error)
