"""The node's socket: another user neither is the node, nor gets anything from it, nor keeps others from it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from security_support import OTHER, OURS, SECONDS, Person, needs_namespaces, needs_root

import multiverso as mv
from multiverso.errors import StartupError, WaitTimeoutError
from multiverso.runtime import Node, Session, join
from multiverso.runtime.discovery.environment import discover, socket_name
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages, trust

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}

# -- who is the node ----------------------------------------------------------------------------------------------

TAKES_THE_NAME = """
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
become()
server.bind("\\0" + args[0])
server.listen(5)
say("mine", os.getpid())
client, _ = server.accept()
say("got", len(client.recv(100)))
"""


@needs_root
def test_a_job_is_not_taken_over_by_who_took_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    key = discover(SLURM).key
    assert key is not None
    with Person(TAKES_THE_NAME, socket_name(key, trust.user_secret())) as thief:
        mine, pid = thief.hear()
        assert mine == "mine"
        with pytest.raises(StartupError, match=f"process {pid} of user {OTHER} holds .* nothing was sent") as caught:
            join(SLURM)
        assert not isinstance(caught.value, WaitTimeoutError)
        assert thief.hear() == ["got", 0]


@needs_root
def test_what_a_controller_says_is_its_node_is_checked_too() -> None:
    """Platoon's workers attach to an address that they are told."""
    with Person(TAKES_THE_NAME, f"multiverso-test-{os.getpid()}") as thief:
        thief.hear()
        with pytest.raises(StartupError, match=f"of user {OTHER}"):
            Session(f"multiverso-test-{os.getpid()}")
        assert thief.hear() == ["got", 0]


def test_the_name_cannot_be_made_from_what_others_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for home in ("one", "two"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / home))
        secret = trust.user_secret()
        assert trust.user_secret() == secret
        assert (tmp_path / home / "multiverso" / "secret").stat().st_mode & 0o777 == 0o600
        names.add(socket_name("slurm|71|0|0", secret))
    assert len(names) == 2


def test_two_first_processes_make_one_secret(tmp_path: Path) -> None:
    text = "from multiverso.wire import trust\nsys.stdin.readline()\nsay(trust.user_secret())"
    people = [Person(text, XDG_STATE_HOME=str(tmp_path)) for _ in range(3)]
    try:
        for person in people:
            person.tell()
        assert len({person.hear()[0] for person in people}) == 1
    finally:
        for person in people:
            person.__exit__()
    assert os.listdir(tmp_path / "multiverso") == ["secret"]


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    trust.user_secret()
    (tmp_path / "multiverso" / "secret").chmod(0o644)
    with pytest.raises(StartupError, match="not safe from other users"):
        trust.user_secret()


def test_a_secret_that_was_cut_short_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    trust.user_secret()
    os.truncate(tmp_path / "multiverso" / "secret", 5)
    with pytest.raises(StartupError, match="damaged"):
        trust.user_secret()


def test_without_a_home_the_job_starts_under_a_name_that_can_be_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="secret cannot be kept"):
        trust.user_secret()
    environ = SLURM | {"SLURM_JOB_ID": f"{os.getpid()}-homeless"}
    with join(environ) as session:
        assert session.address == socket_name(f"slurm|{environ['SLURM_JOB_ID']}|0|0", "")


# -- who is a worker ----------------------------------------------------------------------------------------------


@needs_root
def test_another_user_gets_nothing_from_a_node() -> None:
    text = """
become()
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client.connect("\\0" + args[0])
try:
    client.send(json.dumps({"do": "attach", "id": 1, "protocol": 1, "consistency": {}}).encode())
    said = client.recv(1000)
except OSError:
    said = b""
say(len(said))
files = []
for name in os.listdir("/proc/%d/fd" % args[1]) if os.access("/proc/%d/fd" % args[1], os.R_OK) else []:
    files.append(name)
say(files)
for place in ("mem", "environ", "map_files"):
    try:
        os.listdir(f"/proc/{args[1]}/{place}") if place == "map_files" else open(f"/proc/{args[1]}/{place}", "rb")
        say(place)
    except PermissionError:
        say("refused")
"""
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, [1, 2, 3], session=session)
        with Person(text, node.address, os.getpid()) as stranger:
            assert stranger.hear() == [0]
            assert stranger.hear() == [[]]
            assert [stranger.hear() for _ in range(3)] == [["refused"]] * 3
        np.testing.assert_array_equal(table.get(), [1, 2, 3])
        assert node.live_workers() == [0]


CONNECTS_AGAIN_AND_AGAIN = """
become()
said = False
while True:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.connect("\\0" + args[0])
    except ConnectionRefusedError:
        time.sleep(0.001)
    if not said:
        said = True
        say("connecting")
    client.close()
"""


@needs_root
def test_who_connects_in_a_loop_keeps_no_worker_from_starting() -> None:
    text = """
from multiverso.runtime import Session
with Session(args[0], args[1]) as session:
    session.barrier()
    say(session.worker_id)
"""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(2))
        for _ in range(2):
            stranger = stack.enter_context(Person(CONNECTS_AGAIN_AND_AGAIN, node.address))
            assert stranger.hear() == ["connecting"]
        workers = [stack.enter_context(Person(text, node.address, i)) for i in range(2)]
        assert [worker.hear() for worker in workers] == [[0], [1]]


def test_a_full_queue_is_waited_for_and_said_when_it_stays_full() -> None:
    """The listener takes nobody until half of those who wait have given up."""
    name = f"test-full-{os.getpid()}"  # not what `multiverso top` looks for, which would take a place in the queue
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = []
    with server:
        server.bind("\0" + name)
        server.listen(1)
        try:
            while True:
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect("\0" + name)
        except BlockingIOError:
            pass
        with pytest.raises(WaitTimeoutError, match="could not be reached in time: too many"):
            NodeLink.to(name, 0.0)
        taken, _ = server.accept()
        with taken, messages.connect(name, SECONDS) as client:
            assert client.gettimeout() is None
            assert not any(client.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
        for connection in waiting:
            connection.close()


# -- where users have no numbers ------------------------------------------------------------------------------------

NODE_IN_A_NAMESPACE = """
from security_support import enter_unmapped_namespace
from multiverso.runtime.node.node import Node
become()
enter_unmapped_namespace()
with Node(1, secret="a" * 64) as node:
    say(node.address)
    sys.stdin.readline()
"""
ASKS_FROM_A_NAMESPACE = """
from security_support import enter_unmapped_namespace
from multiverso.errors import MultiversoError
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire import messages
become()
enter_unmapped_namespace()
deadline = time.monotonic() + 60
def status(link):
    return "workers" in link.ask({"do": "status"}, deadline, "the status")[0]["status"]
link = NodeLink(messages.connect(args[0], 60))
say(messages.peer(link.connection)[1] == os.geteuid())
for request in ({"do": "status"}, {"do": "attach"}, {"do": "prove", "proof": "x"}):
    try:
        say(link.ask(request, deadline, "an answer")[0])
    except MultiversoError as error:
        say(str(error))
link.ask({"do": "challenge", "nonce": ""}, deadline, "a challenge")
for wrong in (None, "", "x" * 64, ["x"]):
    try:
        say(link.ask({"do": "prove", "proof": wrong}, deadline, "an answer")[0])
    except MultiversoError as error:
        say(str(error))
link.close()
for secret in ("b" * 64, "a" * 64):
    try:
        link = NodeLink.to(args[0], deadline, secret)
        say(status(link))
        link.close()
    except MultiversoError as error:
        say(str(error))
"""


@needs_root
@needs_namespaces
def test_where_all_users_look_alike_the_secret_is_asked_for() -> None:
    with Person(NODE_IN_A_NAMESPACE, uid=OURS) as node:
        (address,) = node.hear()
        with Person(ASKS_FROM_A_NAMESPACE, address, uid=OTHER) as asker:
            assert asker.hear() == [True]  # which is what a check of numbers alone would go by
            for _ in range(2):
                assert "not proven" in asker.hear()[0]
            assert "ask for a challenge" in asker.hear()[0]
            for _ in range(4):
                assert "does not know the job's secret" in asker.hear()[0]
            assert "does not know this job's secret" in asker.hear()[0]
            assert asker.hear() == [True]
        node.tell()


def test_a_proof_is_worth_nothing_elsewhere() -> None:
    said = ("secret", "node", "address", ("a", "b"), (1, 2))
    others: list[Any] = [
        ("other", "node", "address", ("a", "b"), (1, 2)),
        ("secret", "worker", "address", ("a", "b"), (1, 2)),
        ("secret", "node", "elsewhere", ("a", "b"), (1, 2)),
        ("secret", "node", "address", ("b", "a"), (1, 2)),
        ("secret", "node", "address", ("a", "b"), (1, 3)),
        ("secret", "node", "address", ("a", "b"), (3, 2)),
    ]
    assert len({trust.proof(*said), *(trust.proof(*other) for other in others)}) == 7


# -- what the node runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "-c", "-m", "PYTHONPATH"])
def test_the_node_runs_no_code_of_the_directory_that_the_job_is_in(tmp_path: Path, how: str) -> None:
    (tmp_path / "work").mkdir()
    for name in ("queue", "selectors", "struct", "traceback"):
        (tmp_path / "work" / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')\n")
    (tmp_path / "work" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('site')\n")
    text = f"""
import sys
work = {str(tmp_path / "work")!r}
there = [place for place in sys.path if place in ("", work)]
sys.path[:] = [place for place in sys.path if place not in there]
import multiverso as mv
import multiverso.runtime.joining, multiverso.tables, multiverso.kernels, numba
sys.path[:0] = there
open({str(tmp_path / "ran")!r}, "w").close()  # what this process has run is its own business
mv.init()
print(mv.workers_num(), flush=True)
mv.shutdown()
"""
    (tmp_path / "work" / "train.py").write_text(text)
    arguments = {"script": ["train.py"], "-c": ["-c", text], "-m": ["-m", "train"], "PYTHONPATH": ["train.py"]}[how]
    environ = {**os.environ, **SLURM, "SLURM_JOB_ID": f"{os.getpid()}-{how}", "MULTIVERSO_NODE_STDERR": "1"}
    if how == "PYTHONPATH":
        environ["PYTHONPATH"] = os.pathsep.join(["", str(tmp_path / "work")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path / "work",
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert (tmp_path / "ran").read_text() == ""


def test_the_node_finds_a_package_that_only_its_worker_has_on_its_path(tmp_path: Path) -> None:
    import multiverso

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "multiverso").symlink_to(Path(multiverso.__file__).parent)
    text = f"""
import sys
sys.path.insert(0, {str(tmp_path / "elsewhere")!r})
import multiverso as mv
assert mv.__file__.startswith({str(tmp_path)!r})
mv.init()
print(mv.workers_num(), flush=True)
mv.shutdown()
"""
    environ = {**os.environ, **SLURM, "SLURM_JOB_ID": f"{os.getpid()}-elsewhere"}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def test_the_secret_goes_through_the_environment_to_the_workers_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, os, sys\n"
        "import multiverso as mv\n"
        "print(json.dumps([os.environ['MULTIVERSO_SECRET'], os.environ['MULTIVERSO_NODE'], sys.argv]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "multiverso.cli", "run", "-n", "1", str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    secret, address, _ = json.loads(done.stdout[done.stdout.index('["') :])
    assert len(secret) == 64
    assert secret not in address
