"""Other users get nowhere, and what makes no sense is answered and counted, never fatal."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from io import FileIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages, trust
from platoon.channel import Controller, Worker
from platoon.channel.answering import open_port
from platoon.channel.data import MOST_ROOM
from platoon.channel.wire import dumps, loads, socket_name, unpack_arrays
from platoon.util import PlatoonError

NOBODY = 65534


class Echo(Controller):
    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        return req


@pytest.fixture
def serving() -> Iterator[Echo]:
    controller = Echo(control_port=0, data_port=0, data_hwm=3)
    controller.init_control(0)
    thread = threading.Thread(target=controller.serve)
    thread.start()
    try:
        yield controller
    finally:
        controller.stop()
        thread.join(100)
        assert not thread.is_alive()


@pytest.fixture
def dealer() -> Iterator[Any]:
    """Makes connections to a port that speak as they like."""
    made: list[NodeLink] = []

    def connect(port: int, channel: str) -> NodeLink:
        made.append(NodeLink(messages.connect(socket_name(channel, port), 20)))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def batches(controller: Echo) -> Any:
    return controller.asocket


def refused(controller: Echo) -> int:
    return int(vars(controller)["_Controller__reporter"].refused)


def still_serves(controller: Echo) -> None:
    with Worker(control_port=controller.control_port) as worker:
        worker.init_mb_sock()
        for i in range(3):
            controller.send_mb([np.array(i)])
            assert worker.recv_mb()[0] == i
        assert worker.send_req("still there") == "still there"


def test_who_speaks_nonsense_takes_no_minibatches(
    serving: Echo, dealer: Any, wait_until: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = {"control": serving.control_port, "data": batches(serving).port}
    nonsense = [b"", b"[]", os.urandom(4096), b"{}", b'{"long": 9}', b"[" * 50_000]
    for channel, port in ports.items():
        for said in nonsense:
            stranger = dealer(port, channel).connection
            with contextlib.suppress(OSError):
                stranger.send(said)
    wait_until(lambda: batches(serving).look() or refused(serving) >= 2 * (len(nonsense) - 1))
    still_serves(serving)
    assert "refused a worker: it sent no message" in capfd.readouterr().err


def test_a_request_that_is_too_long_is_not_sent(serving: Echo) -> None:
    with Worker(control_port=serving.control_port) as worker, pytest.raises(PlatoonError, match="too long"):
        worker.send_req("x" * (33 << 20))


def test_a_request_of_megabytes_is_answered(serving: Echo) -> None:
    with Worker(control_port=serving.control_port) as worker:
        assert worker.send_req("x" * (9 << 20)) == "x" * (9 << 20)


def test_credits_without_end_are_not_kept(serving: Echo, dealer: Any) -> None:
    sent = batches(serving)
    greedy = dealer(sent.port, "data")
    for room in (1, MOST_ROOM - 1, 1, 0, -5, 10**30, True, None, "1"):
        greedy.tell({"do": "grant", "room": room})
    sent.look()
    assert len(sent._next) == MOST_ROOM
    assert refused(serving) == 7
    greedy.close()
    still_serves(serving)


def test_a_worker_that_reads_no_answers_stops_nobody(serving: Echo, dealer: Any) -> None:
    silent = dealer(serving.control_port, "control")
    silent.connection.setblocking(False)
    with contextlib.suppress(OSError):  # cut off, or not heard for a while
        for _ in range(500):
            messages.send(silent.connection, {"do": "ask", "query": dumps({"req": "x" * 30_000, "req_info": None})})
            select.select([], [silent.connection], [], 1)
    still_serves(serving)


BAD_REQUESTS = [
    *({"query": text} for text in ("[]", "", "{", "[" * 50_000, "9" * 10_000, dumps({"req": "x"}))),
    *({"query": odd} for odd in (None, 1, {"req": "x", "req_info": None})),
    {},
    {"query": dumps({"req": "platoon-hello", "req_info": []})},
    {"query": dumps({"req": "platoon-hello", "req_info": {"local_rank": "0"}})},
]


def test_requests_that_make_no_sense_are_answered_and_counted(serving: Echo, dealer: Any) -> None:
    odd = dealer(serving.control_port, "control")
    for bad in BAD_REQUESTS:
        answer, _ = odd.ask({"do": "ask", **bad}, float("inf"), "an answer")
        assert "failed" in answer
    still_serves(serving)
    assert refused(serving) == len(BAD_REQUESTS)


def test_a_place_that_there_is_not_is_refused(serving: Echo, dealer: Any) -> None:
    odd = dealer(serving.control_port, "control")
    for rank in (-1, 64, 10**30):
        query = dumps({"req": "platoon-hello", "req_info": {"local_rank": rank}})
        answer, _ = odd.ask({"do": "ask", "query": query}, float("inf"), "an answer")
        assert "no place" in answer["failed"]


# -- arrays ------------------------------------------------------------------------------------------------

HEADERS = [
    [{"shape": [4], "dtype": "O", "fortran_order": False}],
    [{"shape": [4], "dtype": "|O", "fortran_order": False}],
    [{"shape": [4], "dtype": "O8", "fortran_order": False}],
    [{"shape": [4], "dtype": "object", "fortran_order": False}],
    [{"shape": [2], "dtype": "i8,O", "fortran_order": False}],
    [{"shape": [2], "dtype": [["a", "O"]], "fortran_order": False}],
    [{"shape": [4], "dtype": "f8", "fortran_order": None, "more": 1}],
    [{"shape": [-4], "dtype": "f8", "fortran_order": False}],
    [{"shape": [2**32, 2**32], "dtype": "f8", "fortran_order": False}],
    [{"shape": [2**62, 4, 0], "dtype": "f8", "fortran_order": False}],
    [{"shape": [4.0], "dtype": "f8", "fortran_order": False}],
    [{"shape": 4, "dtype": "f8", "fortran_order": False}],
    [{"shape": [1] * 65, "dtype": "f8", "fortran_order": False}],
    [{"shape": [4], "dtype": "S0", "fortran_order": False}],
    [{"shape": [4], "dtype": "DTypeLike", "fortran_order": False}],
    [{"shape": [4], "dtype": "m8[no]", "fortran_order": False}],
    ["f8"],
    {"0": 1},
    None,
]


def unpacked(header: Any, parts: list[bytes], copy: bool = True) -> list[Any]:
    with FileIO(os.memfd_create("arrays"), "r+") as memory:
        memory.write(b"".join(part.ljust(64, b"\0") for part in parts))
        return unpack_arrays(loads(dumps(header)), [memory.fileno()], copy)


def test_an_array_of_anything_but_plain_memory_is_refused() -> None:
    """One of dtype "O" made pointers of the bytes that came: a segmentation fault at the first look at it."""
    for header in HEADERS:
        with pytest.raises(PlatoonError, match=r"array|minibatch"):
            unpacked(header, [b"\x01" * 32])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "shape": JSON | st.lists(st.integers(-2, 9), max_size=4),
        "dtype": JSON | st.from_regex(r"[<>|=]?[a-zA-Z?][0-9]{0,2}", fullmatch=True),
        "fortran_order": JSON | st.booleans(),
    }
)


@settings(max_examples=200)
@given(st.lists(JSON | ENTRIES, max_size=2), st.lists(st.binary(max_size=64), max_size=2), st.booleans())
def test_whatever_comes_is_an_array_of_plain_memory_or_refused(header: Any, parts: list[bytes], copy: bool) -> None:
    try:
        arrays = unpacked(header, parts, copy)
    except PlatoonError:
        return
    assert sum(-(-array.nbytes // 64) for array in arrays) == len(parts)
    assert not any(array.dtype.hasobject for array in arrays)


# -- the other way round: who pretends to be the controller -----------------------------------------------

TAKES = """
import os, sys
from platoon.channel import wire
from multiverso.wire import messages
wire.os.geteuid = lambda: int(sys.argv[2])
name = wire.socket_name("control", int(sys.argv[1]))
os.setuid(65534)
port = messages.listen(name)
print("taken", flush=True)
port.accept()[0].recv(1)
sys.stdin.readline()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")
def test_another_users_program_that_has_the_port_is_told_nothing(experiment: Any, port: int) -> None:
    experiment.write(takes=TAKES)
    thief = subprocess.Popen(
        [sys.executable, experiment.folder / "takes.py", str(port), str(os.geteuid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with thief:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "taken\n"
        with pytest.raises(PlatoonError, match=f"port {port} is no controller of this user.*user 65534"):
            Worker(control_port=port)
        with pytest.raises(PlatoonError, match=f"port {port}.*--control-port"):
            Controller().init_control(port)
        thief.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")
def test_another_user_learns_nothing_and_takes_nothing(
    serving: Echo, wait_until: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program of another uid: the kernel says whose it is, and what it asks is not heard."""
    names = [socket_name("control", serving.control_port or 0), socket_name("data", batches(serving).port)]
    child = os.fork()
    if child == 0:
        heard = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            heard = sum(_is_heard(name) for name in names)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(heard)
    wait_until(lambda: batches(serving).look() or refused(serving) == 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    still_serves(serving)
    assert f"refused process {child}: it belongs to user {NOBODY}" in capfd.readouterr().err


def _is_heard(name: str) -> bool:
    """Whether a port says anything to this process but that it ends the connection."""
    with messages.connect(name, 20) as raw, contextlib.suppress(ConnectionError):
        messages.send(raw, {"id": 1, "do": "ask", "query": dumps({"req": "x", "req_info": None})})
        messages.send(raw, {"do": "grant", "room": 1})
        raw.settimeout(60)
        return bool(raw.recv(1))
    return False


# -- where users cannot be told apart ------------------------------------------------------------------------


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a user namespace without a map."""
    monkeypatch.setattr("multiverso.files.users.look_alike", lambda: True)


def test_where_users_look_alike_each_side_proves_that_it_knows_the_secret(alike: None, serving: Echo) -> None:
    with Worker(control_port=serving.control_port) as worker:
        done = threading.Event()
        served = threading.Thread(target=lambda: (serving.send_mb([np.array(7)]), done.set()))
        served.start()
        worker.init_mb_sock()
        assert worker.recv_mb()[0] == 7
        served.join(60)
        assert worker.send_req("here") == "here"


def test_who_does_not_know_the_secret_is_not_heard(
    alike: None, serving: Echo, dealer: Any, monkeypatch: pytest.MonkeyPatch, wait_until: Any
) -> None:
    monkeypatch.setenv(trust.SECRET_VARIABLE, trust.new_secret())
    with pytest.raises(PlatoonError, match="does not know this job's secret"):
        Worker(control_port=serving.control_port)
    asks = {"do": "ask", "query": dumps({"req": "x", "req_info": None})}
    for first in (asks, {"do": "prove", "proof": "no"}, {"do": "challenge"}, {"do": "challenge", "nonce": 3}):
        stranger = dealer(serving.control_port, "control")
        messages.send(stranger.connection, {"id": 1, **first})
        with contextlib.suppress(OSError):
            messages.send(stranger.connection, {"id": 2, **asks})
        assert not _answers(stranger.connection)
    monkeypatch.delenv(trust.SECRET_VARIABLE)
    with Worker(control_port=serving.control_port) as worker:
        assert worker.send_req("still there") == "still there"


def _answers(connection: socket.socket) -> bool:
    """Whether one of the answers up to the connection's end is one to a request."""
    answers = []
    while (received := messages.receive(connection)) is not None:
        answers.append(received[0])
    return any("answer" in each for each in answers)


def test_a_port_is_gone_from_forked_children(port: int) -> None:
    door, _ = open_port("control", port, lambda who, why: None)
    child = os.fork()
    if child == 0:
        os._exit(int(bool(door._connections) or door.entrance.listener.fileno() != -1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    door.close()
    open_port("control", port, lambda who, why: None)[0].close()
