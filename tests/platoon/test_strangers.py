"""Who does not know the job's secret gets nowhere, and what makes no sense is answered and counted, never fatal."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from platoon.channel import Controller, Worker
from platoon.channel.data import MOST_ROOM, BatchClient
from platoon.channel.door import Door, knock
from platoon.channel.secret import PROOF_BYTES, Secret, SecretFile, directory_of_secrets, find_secret
from platoon.channel.wire import dumps, loads, unpack_arrays
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
    """Makes sockets that connect to a port with a password or without one."""
    context, made = zmq.Context(), []

    def connect(port: int, channel: str, secret: Secret | None) -> zmq.Socket:
        made.append(context.socket(zmq.DEALER))
        made[-1].setsockopt(zmq.LINGER, 0)
        if secret is None:
            made[-1].connect(f"tcp://127.0.0.1:{port}")
        else:
            knock(made[-1], secret, channel, port)
        return made[-1]

    yield connect
    for each in made:
        each.close()
    context.term()


def test_strangers_are_not_heard_and_take_no_minibatches(
    serving: Echo, dealer: Any, wait_until: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = {"control": serving.control_port, "data": serving._data().port}
    for channel, port in ports.items():
        for secret in (None, Secret(b"a guess")):
            stranger = dealer(port, channel, secret)
            for message in ([b"1", b"[]"], [secrets.token_bytes(16)], [b""]):
                with contextlib.suppress(zmq.Again):  # it was sent away already
                    stranger.send_multipart(message, zmq.NOBLOCK)
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(secrets.token_bytes(4096))
    # Of each port: no password, and a wrong one. Who sends nonsense and leaves at once may not be seen.
    wait_until(lambda: serving._reporter.refused >= 4)
    with Worker(control_port=serving.control_port) as worker:
        worker.init_mb_sock()
        for i in range(3):
            serving.send_mb([np.array(i)])
            assert worker.recv_mb()[0] == i
        assert worker.send_req("still there") == "still there"
    assert "refused 127.0.0.1: it did not know the job's secret" in capfd.readouterr().err


def test_a_message_that_is_too_long_is_not_kept(serving: Echo, dealer: Any) -> None:
    stranger = dealer(serving._data().port, "data", serving._secret)
    for _ in range(50):
        with contextlib.suppress(zmq.Again):
            stranger.send(bytes(1 << 20), zmq.NOBLOCK)
    with Worker(control_port=serving.control_port) as worker:
        worker.init_mb_sock(data_hwm=1)
        serving.send_mb([np.array(7)])
        assert worker.recv_mb()[0] == 7
        assert not serving._data()._credits
        with pytest.raises(PlatoonError, match="too long"):
            worker.send_req("x" * (33 << 20))


def test_credits_without_end_are_not_kept(serving: Echo, dealer: Any, wait_until: Any) -> None:
    batches = serving._data()
    greedy = dealer(batches.port, "data", serving._secret)
    for _ in range(2 * MOST_ROOM):
        greedy.send(bytes(16))
    wait_until(lambda: batches._receive_credits() or serving._reporter.refused)
    batches._receive_credits()
    assert len(batches._credits) == MOST_ROOM
    greedy.send(b"no credit at all")
    greedy.send_multipart([b"two", b"parts"])
    wait_until(lambda: batches._receive_credits() or serving._reporter.refused > MOST_ROOM)


BAD_REQUESTS = [
    b"[]",
    b"",
    b"\xff\xfe",
    b"{",
    b"1e999",
    b"[" * 50_000,
    b"9" * 10_000,
    dumps({"req": "x"}),
    dumps({"req": "x", "worker_id": "me", "req_info": None}),
    dumps({"req": "x", "worker_id": 2**80, "req_info": None}),
    dumps({"req": "platoon-hello", "worker_id": 1, "req_info": []}),
    dumps({"req": "platoon-hello", "worker_id": 1, "req_info": {"local_rank": "0"}}),
]


def test_requests_that_make_no_sense_are_answered_and_counted(serving: Echo, dealer: Any) -> None:
    odd = dealer(serving.control_port, "control", serving._secret)
    for number, bad in enumerate(BAD_REQUESTS):
        odd.send_multipart([b"%d" % number, bad])
        assert odd.poll(20_000)
        assert odd.recv() == b"%d" % number
        proven = odd.recv()
        assert proven[:PROOF_BYTES] == serving._secret.proof(b"%d" % number)
        assert "error" in loads(proven[PROOF_BYTES:])
    odd.send(b"one part")
    odd.send_multipart([b"1", b"2", b"3", b"4"])
    with Worker(control_port=serving.control_port) as worker:
        assert worker.send_req("still there") == "still there"
        assert serving._reporter.refused == len(BAD_REQUESTS) + 2


def test_a_place_that_there_is_not_is_refused(serving: Echo, dealer: Any) -> None:
    odd = dealer(serving.control_port, "control", serving._secret)
    for rank in (-1, 64, 10**30):
        odd.send_multipart(
            [b"1", dumps({"req": "platoon-hello", "worker_id": 1, "req_info": {"local_rank": rank}})]
        )
        assert odd.poll(20_000)
        assert "no place" in loads(odd.recv_multipart()[1][PROOF_BYTES:])["error"]


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


def test_an_array_of_anything_but_plain_memory_is_refused() -> None:
    """One of dtype "O" made pointers of the bytes that came: a segmentation fault at the first look at it."""
    for header in HEADERS:
        with pytest.raises(PlatoonError, match=r"array|minibatch"):
            unpack_arrays([zmq.Frame(dumps(header)), zmq.Frame(b"\x01" * 32)])


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


@settings(deadline=None, max_examples=200)
@given(st.lists(JSON | ENTRIES, max_size=2), st.lists(st.binary(max_size=64), max_size=2), st.booleans())
def test_whatever_comes_is_an_array_of_plain_memory_or_refused(
    header: Any, parts: list[bytes], copy: bool
) -> None:
    try:
        arrays = unpack_arrays([zmq.Frame(dumps(header)), *map(zmq.Frame, parts)], copy)
    except PlatoonError:
        return
    assert [array.nbytes for array in arrays] == [len(part) for part in parts]
    assert not any(array.dtype.hasobject for array in arrays)


# -- the other way round: who pretends to be the controller -----------------------------------------------


def test_a_program_that_has_the_port_is_not_taken_for_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets everybody in, and answers as a controller does; it has no proof of the secret."""
    secret = Secret.make()
    door = Door(secret, "control", 0, 1 << 20, lambda who, why: None, {})

    def answer() -> None:
        who, number, _ = door.socket.recv_multipart()
        told = {"node": "its node", "controller": os.getpid()}
        door.socket.send_multipart([who, number, Secret(bytes(32)).proof(number) + dumps({"ok": told})])

    thread = threading.Thread(target=answer)
    thread.start()
    monkeypatch.setenv("PLATOON_SECRET", secret.text)
    try:
        with pytest.raises(PlatoonError, match="not this job's controller"):
            Worker(control_port=door.port)
    finally:
        thread.join(100)
        door.close()


def test_a_minibatch_without_proof_is_not_taken() -> None:
    secret = Secret.make()
    door = Door(secret, "data", 0, 1 << 20, lambda who, why: None, {})
    context = zmq.Context()
    client = BatchClient(context, door.port, 1, secret)
    try:
        who, nonce = door.socket.recv_multipart()
        for wrong in ([nonce], [nonce, b"null"], [Secret(bytes(32)).proof(nonce), b"null"]):
            door.socket.send_multipart([who, *wrong])
            assert client.socket.poll(20_000)
            with pytest.raises(PlatoonError, match="without proof"):
                client.receive(True)
        door.socket.send_multipart([who, secret.proof(nonce), b"null"])
        assert client.receive(True) == []
    finally:
        client.close()
        context.term()
        door.close()


def test_the_wrong_secret_is_said_at_once(serving: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATOON_SECRET", secrets.token_hex(32))
    with pytest.raises(PlatoonError, match="does not accept this job's secret"):
        Worker(control_port=serving.control_port)
    monkeypatch.setenv("PLATOON_SECRET", "no number")
    with pytest.raises(PlatoonError, match="PLATOON_SECRET has no secret"):
        Worker(control_port=serving.control_port)


# -- the file ------------------------------------------------------------------------------------------------


def test_the_file_is_the_users_own_and_goes_with_its_controller(serving: Echo, wait_until: Any) -> None:
    file = serving._secret_file
    assert file is not None
    status = file._path.lstat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(file._path.parent.lstat().st_mode) == 0o700
    assert status.st_uid == os.geteuid()
    serving.stop()
    wait_until(lambda: not file._path.exists())


def test_the_file_of_a_controller_that_was_killed_is_not_read_and_goes(port: int) -> None:
    code = (
        "import os, sys; from platoon.channel.secret import Secret, SecretFile; "
        "SecretFile(Secret.make(), int(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(port)], check=False, timeout=60)
    left = [path for path in directory_of_secrets().iterdir() if path.name.startswith(f"port-{port}-")]
    assert len(left) == 1
    assert find_secret(port) is None
    with pytest.raises(PlatoonError, match=f"on port {port}, and is it yours"):
        Worker(control_port=port, socket_timeout=100)
    other = SecretFile(Secret.make(), 0)
    assert not left[0].exists()
    other.remove()


def test_a_directory_that_others_can_write_or_own_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "secrets"
    monkeypatch.setattr("platoon.channel.secret.directory_of_secrets", lambda: directory)
    made = SecretFile(Secret.make(), 1)
    assert find_secret(1) is not None
    directory.chmod(0o777)
    for use in (lambda: find_secret(1), lambda: SecretFile(Secret.make(), 2)):
        with pytest.raises(PlatoonError, match="cannot be trusted"):
            use()
    directory.chmod(0o700)
    made.remove()
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(PlatoonError, match="cannot be trusted"):
        find_secret(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")
def test_another_user_learns_nothing_and_takes_nothing(serving: Echo, dealer: Any) -> None:
    """A program of another uid: it cannot read the file, and what it asks without it is not heard."""
    assert serving._secret_file is not None
    child = os.fork()
    if child == 0:
        heard = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            heard = _tries_as_a_stranger(serving._secret_file._path, int(serving.control_port or 0))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(heard)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Worker(control_port=serving.control_port) as worker:
        assert worker.send_req("still there") == "still there"


def _tries_as_a_stranger(secret: Path, port: int) -> int:
    """Returns 0 if it learns nothing: it speaks ZMTP 3 by hand, as a forked child has no use of ZeroMQ's threads."""
    with contextlib.suppress(PermissionError):
        secret.read_text()
        return 2
    with socket.socket() as raw:  # a name would be looked up, for which this user cannot read the encodings
        raw.settimeout(20)
        raw.connect(("127.0.0.1", port))
        said = b""
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
            raw.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
            raw.sendall(b"\x01\x011" + b"\x00\x02[]")
            while block := raw.recv(4096):
                said += block
        return 3 if b"error" in said else 0
