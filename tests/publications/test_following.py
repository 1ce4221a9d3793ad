"""Publications of another host: bit for bit, through cuts and deaths, one copy a host.

Another host is a process here with another state directory: sockets of the first one have names that it cannot know.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multiverso as mv
from multiverso.errors import StartupError, WaitTimeoutError
from multiverso.publications.differences import apply, difference
from multiverso.publications.tensors import Layout, Tensor, check_layout
from multiverso.watching.jobs import look_at

SECONDS = 60.0
TOKEN = secrets.token_hex()
# Says version, step and checksums of each version that it gets, until that of the text "end".
READER = """
    import os, sys
    import multiverso as mv
    encrypted = sys.argv[4] == "encrypted"
    name, address, token = sys.argv[1:4]
    with mv.subscribe(name, address=address, token=token, encrypted=encrypted, timeout_seconds=60) as sub:
        seen, text = 0, ""
        while text != "end":
            with sub.wait(seen) as snapshot:
                snapshot.verify()
                seen, text = snapshot.version, snapshot.text
                print(seen, snapshot.step, *snapshot.checksums.values(), int(sub.follows), flush=True)
"""


def model() -> dict[str, Any]:
    """Weights of several dtypes and odd sizes, the largest of more than one chunk."""
    random = np.random.default_rng(0)
    return {
        "half": random.integers(0, 1 << 16, (1 << 22) + 5, dtype=np.uint16).view(np.float16),
        "float": random.normal(size=(100, 30)).astype(np.float32),
        "int8": np.ones(7, np.int8),
        "complex": np.zeros(5, np.complex128),
        "none": np.zeros((0, 3)),
    }


def step_of(weights: dict[str, Any], number: int) -> None:
    """Changes a few numbers, as a step of training does."""
    random = np.random.default_rng(number)
    weights["half"].view(np.uint16)[random.integers(0, weights["half"].size, 5000)] ^= 1
    weights["float"] += 1e-3
    weights["complex"][number % 5] += 1j


@contextmanager
def other_host(
    folder: Path, name: str, address: tuple[str, int], encrypted: str = "encrypted"
) -> Iterator[subprocess.Popen[str]]:
    """A program on another host that reads every version that it can get."""
    command = [sys.executable, "-c", textwrap.dedent(READER), name, f"{address[0]}:{address[1]}", TOKEN, encrypted]
    environ = {**os.environ, "XDG_STATE_HOME": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> tuple[int, int, list[int], bool]:
    """Version, step and checksums of the next version that a reader has got, and whether it follows by itself."""
    assert process.stdout is not None
    version, step, *sums, follows = map(int, process.stdout.readline().split())
    return version, step, sums, bool(follows)


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"of-test-{os.urandom(8).hex()}"


def cut(ways: list[socket.socket]) -> None:
    """Ends all connections through a `relay`."""
    for end in ways:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay(to: tuple[str, int]) -> Iterator[tuple[tuple[str, int], list[socket.socket]]]:
    """Passes bytes on to an address; its connections may be cut."""
    listener = socket.create_server(("127.0.0.1", 0))
    ways: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def take() -> None:
        with suppress(OSError):
            while True:
                incoming, _ = listener.accept()
                try:
                    outgoing = socket.create_connection(to)
                except ConnectionRefusedError:  # between two publishers
                    incoming.close()
                    continue
                ways.extend((incoming, outgoing))
                for ends in ((incoming, outgoing), (outgoing, incoming)):
                    threads.append(threading.Thread(target=pump, args=ends))
                    threads[-1].start()

    taking = threading.Thread(target=take)
    taking.start()
    try:
        yield listener.getsockname(), ways
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        taking.join()
        cut(ways)
        for thread in threads:
            thread.join()
        for end in (*ways, listener):
            end.close()


@pytest.mark.parametrize("encrypted", ["encrypted", "plain"])
def test_another_host_has_every_version_bit_for_bit_in_few_bytes(name: str, tmp_path: Path, encrypted: str) -> None:
    weights = model()
    whole = sum(array.nbytes for array in weights.values())
    with mv.Publication(name, like=weights) as publication:
        address = publication.forward(token=TOKEN, address="127.0.0.1", encrypted=encrypted == "encrypted")
        with pytest.raises(StartupError, match="forwarded at"):
            publication.forward(token=TOKEN)
        publication.publish(weights, step=0)
        with other_host(tmp_path, name, address, encrypted) as reader, mv.subscribe(name) as subscription:
            assert said(reader)[:2] == (1, 0)
            forwarder = publication._forwarder
            assert forwarder is not None
            first = forwarder.sent_bytes
            assert first == whole
            for number in range(1, 6):
                step_of(weights, number)
                version = publication.publish(
                    weights, step=number, text="end" if number == 5 else "", wait_seconds=SECONDS
                )
                with subscription.latest() as snapshot:
                    sums = [*snapshot.checksums.values()]
                assert said(reader) == (version, number, sums, True)
            assert 0 < forwarder.sent_bytes - first < 5 * 0.03 * whole
            assert publication._slots._status()["sent_bytes"] == forwarder.sent_bytes, "which the job's page shows"
            assert reader.wait(SECONDS) == 0


def test_a_reader_whose_first_version_takes_long_says_how_far_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multiverso.saying._FIRST_SECONDS", 0.0)
    weights = model()
    with mv.Publication(name, like=weights) as publication:
        host, port = publication.forward(token=TOKEN, address="127.0.0.1", encrypted=False)
        publication.publish(weights)
        with mv.subscribe(name, address=f"{host}:{port}", token=TOKEN, encrypted=False, timeout_seconds=60) as reader:
            reader.latest().release()
    assert f"multiverso: receiving version 1 of {name!r}: " in capsys.readouterr().err


def test_readers_of_a_host_share_one_copy_and_another_goes_on_where_it_ends(name: str, tmp_path: Path) -> None:
    weights = model()
    with mv.Publication(name, like=weights) as publication:
        address = publication.forward(token=TOKEN, address="127.0.0.1")
        publication.publish(weights, step=0)
        with other_host(tmp_path, name, address) as first:
            assert said(first)[3], "it follows"
            with other_host(tmp_path, name, address) as second:
                assert said(second)[:2] == (1, 0)
                publication.publish(weights, step=1, wait_seconds=SECONDS)
                seen = [said(first), said(second)]
                assert [(version, step, follows) for version, step, _, follows in seen] == [(2, 1, True), (2, 1, False)]
                assert publication.readers == 1
                first.kill()
                first.wait()
                publication.publish(weights, step=2, text="end", wait_seconds=SECONDS)
                version, step, *_, follows = said(second)
                assert (version, step, follows) == (3, 2, True)
                assert second.wait(SECONDS) == 0


def test_cut_connections_are_made_again_and_no_version_is_mixed(name: str, tmp_path: Path) -> None:
    weights = model()
    with mv.Publication(name, like=weights, slots=4) as publication, mv.subscribe(name) as subscription:
        address = publication.forward(token=TOKEN, address="127.0.0.1")
        sums: dict[int, list[int]] = {}

        def publish(step: int, text: str = "") -> None:
            step_of(weights, step)
            version = publication.publish(weights, step=step, text=text, wait_seconds=SECONDS)
            with subscription.latest() as snapshot:
                assert snapshot.version == version
                sums[version] = [*snapshot.checksums.values()]

        publish(0)
        with relay(address) as (through, ways), other_host(tmp_path, name, through) as reader:
            seen = said(reader)
            for number in range(1, 9):
                cut(ways)
                publish(number, "end" if number == 8 else "")
                if number % 2 == 0:
                    while seen[1] < number:
                        seen = said(reader)
                        assert seen[2] == sums[seen[0]], f"version {seen[0]} is not what was published"
            assert reader.wait(SECONDS) == 0
            assert len(ways) >= 8


@pytest.mark.parametrize("more", [{"w": np.ones((10, 10)), "another": np.ones(3)}, {"w": np.ones(100)}])
def test_versions_go_on_with_the_next_publisher_of_the_first_host(
    name: str, tmp_path: Path, port: int, more: dict[str, Any]
) -> None:
    weights = {"w": np.zeros(100)}
    publisher = mv.Publication(name, like=weights)
    address = publisher.forward(port, token=TOKEN, address="127.0.0.1")
    for step in range(3):
        publisher.publish(weights, step=step)
    with other_host(tmp_path, name, address) as reader:
        assert said(reader)[:2] == (3, 2)
        publisher.close()
        with mv.Publication(name, like=more) as following:
            following.forward(port, token=TOKEN, address="127.0.0.1")
            following.publish(more, step=7, text="end")
            version, step, *_ = said(reader)
            assert version > 3
            assert step == 7
            assert reader.wait(SECONDS) == 0


# A job on two hosts: worker 0 publishes, then worker 1, whose state directory is another one, as on another machine.
JOB = """
    import os, subprocess, sys
    name, reader, place = sys.argv[1:]
    here = int(os.environ["MULTIVERSO_WORKER_ID"])
    os.environ["XDG_STATE_HOME"] = f"{place}/{here}"
    import numpy as np
    import multiverso as mv
    from multiverso.errors import StartupError
    mv.init(timeout_seconds=60)
    weights = {"w": np.arange(5.0)}
    for turn in range(3):  # both at once, one after another where that one has closed it
        try:
            both = mv.Publication(f"{name}-of-both", like=weights)
            print("first", flush=True)
            mv.barrier()
            both.close()
        except StartupError as error:
            print("second", f"on another host of this job (127.0.0.1:" in str(error), flush=True)
            mv.barrier()
        mv.barrier()
    command = [sys.executable, "-c", reader, name]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2 * here)]
    for publisher in (0, 1):
        publication = mv.Publication(name, like=weights) if here == publisher else None
        for step in range(3):
            if publication is not None:
                publication.publish(weights, step=10 * publisher + step)
            mv.barrier()
            for reader in readers:
                print(reader.stdout.readline(), end="", flush=True)
            mv.barrier()
        if publication is not None:
            publication.close()
        mv.barrier()  # the next one begins when this one is no longer there
    assert [reader.wait(60) for reader in readers] == [0] * 2 * here
    mv.shutdown()
"""
READER_IN_A_JOB = """
import sys
import multiverso as mv
with mv.subscribe(sys.argv[1], timeout_seconds=60) as subscription:
    seen = step = 0
    while step < 12:
        with subscription.wait(seen) as snapshot:
            snapshot.verify()
            assert snapshot.version > seen
            seen, step = snapshot.version, snapshot.step
            print("step", step, subscription.follows, flush=True)
"""


def test_readers_on_other_hosts_of_a_job_need_no_address(name: str, tmp_path: Path) -> None:
    """One of them receives it for all there; when a worker of their own host publishes, they read that."""
    program = tmp_path / "job.py"
    program.write_text(textwrap.dedent(JOB))
    command = [sys.executable, "-m", "multiverso", "run", "--hosts", "2", "-n", "2", program]
    done = subprocess.run(
        [*command, name, READER_IN_A_JOB, tmp_path], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split()[-2:] for line in done.stdout.splitlines()]
    assert sorted(line[-1] for line in lines[:6]) == ["True"] * 3 + ["first"] * 3, "one of two that begin at once"
    said = lines[6:]
    assert [step for step, _ in said] == [str(step) for step in (0, 1, 2, 10, 11, 12) for _ in range(2)]
    assert sorted(follows for _, follows in said[2:4]) == ["False", "True"]
    assert [follows for _, follows in said[-2:]] == ["False", "False"]


@pytest.mark.parametrize("seed", [1, 2])
def test_readers_have_the_newest_version_whatever_ends_and_begins(
    name: str, tmp_path: Path, port: int, seed: int
) -> None:
    """Publishers with the same tensors or others, readers of two hosts, and connections that are cut."""
    drawn = random.Random(seed)
    steps = itertools.count(1)
    step, others = 0, False
    reading: dict[subprocess.Popen[str], int] = {}  # with the step that each has come to

    def publisher() -> mv.Publication:
        begun = mv.Publication(name, like=weights(), slots=2)
        begun.forward(port, token=TOKEN, address="127.0.0.1", encrypted=False)
        return begun

    def weights() -> dict[str, Any]:
        return {"w": np.full(1000, step), "more": np.ones(3)} if others else {"w": np.full((10, 100), step)}

    publication = publisher()
    with relay(("127.0.0.1", port)) as (through, ways), ExitStack() as readers:
        for _ in range(12):
            event = drawn.choice(("none", "publisher", "publisher", "cut", "reader", "reader", "killed"))
            if event == "publisher":
                publication.close()
                others = drawn.random() < 0.5
                publication = publisher()
            elif event == "cut":
                cut(ways)
            elif event == "reader" and len(reading) < 3:
                host = tmp_path / drawn.choice("ab")
                reading[readers.enter_context(other_host(host, name, through, "plain"))] = 0
            elif event == "killed" and reading:
                killed = drawn.choice(list(reading))
                killed.kill()
                del reading[killed]
            step = next(steps)
            publication.publish(weights(), step=step, wait_seconds=SECONDS)
            if drawn.random() < 0.7:
                for reader, its in reading.items():
                    while its < step:
                        its = said(reader)[1]
                    reading[reader] = its
        publication.close()


def test_strangers_are_refused_and_readers_are_told_why(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = {"w": np.zeros(100)}
    with mv.Publication(name, like=weights) as publication:
        host, port = publication.forward(token=TOKEN, address="127.0.0.1")
        publication.publish(weights)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        place = f"{host}:{port}"
        with mv.subscribe(name, address=place, token="x" * 64) as subscription:
            assert f"{place}: " in why_not(subscription)
        assert publication.readers == 0
    with mv.subscribe(name, address=place, token=TOKEN) as subscription:
        assert "refused" in why_not(subscription).partition(f"{place}: ")[2]


def why_not(subscription: Any) -> str:
    """What a reader that gets nothing is told, once its follower has tried."""
    while not (subscription._follower and subscription._follower.trouble):
        with pytest.raises(WaitTimeoutError):
            subscription.latest(0.1)
    with pytest.raises(WaitTimeoutError) as told:
        subscription.latest(0.1)
    return str(told.value)


def test_a_reader_that_has_a_version_is_told_why_there_is_no_newer_one(name: str) -> None:
    weights = {"w": np.zeros(100)}
    with mv.Publication(name, like=weights) as publication:
        host, port = publication.forward(token=TOKEN, address="127.0.0.1")
        publication.publish(weights)
        with mv.subscribe(name, address=f"{host}:{port}", token=TOKEN, timeout_seconds=SECONDS) as subscription:
            subscription.latest().release()
            publication.close()
            while not (subscription._follower and subscription._follower.trouble):
                with pytest.raises(WaitTimeoutError, match="the newest is 1"):
                    subscription.wait(1, 0.1)
            with pytest.raises(WaitTimeoutError, match=rf"the newest is 1 \({host}:{port}: .*\)"):
                subscription.wait(1, 0.1)


def test_an_address_is_that_publication_and_no_other_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {}
    with ExitStack() as end:
        for job, number in (("one", 1.0), ("another", 2.0)):
            monkeypatch.setenv("MULTIVERSO_NODE", job)
            publication = end.enter_context(mv.Publication(name, like={"w": np.zeros(2)}))
            host, port = publication.forward(token=TOKEN, address="127.0.0.1", encrypted=False)
            where[number] = f"{host}:{port}"
            publication.publish({"w": np.full(2, number)})
        readers = [
            end.enter_context(mv.subscribe(name, address=address, token=TOKEN, encrypted=False, timeout_seconds=60))
            for address in where.values()
        ]
        for reader, number in zip(readers, where, strict=True):
            with reader.latest() as snapshot:
                assert snapshot["w"].tolist() == [number, number]
        nobody = mv.subscribe(name, address="127.0.0.1:1", token=TOKEN, encrypted=False, timeout_seconds=0.5)
        with nobody, pytest.raises(WaitTimeoutError, match=r"127\.0\.0\.1:1"):
            nobody.latest()
    with pytest.raises(ValueError, match="got both"):
        mv.subscribe(name, "job", address="127.0.0.1:1", token=TOKEN)


@pytest.mark.parametrize("address", ["", "here", "here:", ":1", "here:99999", "here:x"])
def test_addresses_and_tokens_are_checked(name: str, address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        mv.subscribe(name, address=address, token=TOKEN)
    with pytest.raises(ValueError, match="16 characters"):
        mv.subscribe(name, address="here:1", token="short")


@given(st.data())
def test_a_difference_makes_the_new_version_of_the_old_one(data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8]))
    count = data.draw(st.integers(1, 2000))
    random = np.random.default_rng(data.draw(st.integers(0, 100)))
    old = random.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy()
    changed = random.random(new.size) < data.draw(st.sampled_from([0.0, 0.001, 0.1, 0.9]))
    new[changed] ^= random.integers(0, 256, np.count_nonzero(changed), dtype=np.uint8)
    body = difference(old, new, itemsize)
    if body is not None:
        assert len(body) < new.size
        apply(old, body, itemsize)
        np.testing.assert_array_equal(old, new)


def test_a_difference_of_a_small_tensor_is_not_larger_than_the_tensor() -> None:
    old = np.arange(12, dtype=np.uint8)
    new = old.copy()
    new[4] = 200  # one of six numbers: 3 bytes, and more than 12 with all that stands around them
    assert difference(old, new, 2) is None


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]), st.integers(0, 60))
def test_what_is_no_difference_is_refused(spoilt: bytes, itemsize: int, place: int) -> None:
    old = np.zeros(800, np.uint8)
    new = old.copy()
    new[::97] = 3
    body = difference(old, new, itemsize)
    assert body
    for nonsense in (spoilt, body[:place] + spoilt + body[place:], body[: -1 - place]):
        to = old.copy()
        with suppress(ValueError):
            apply(to, nonsense, itemsize)
        assert to.size == 800


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [Tensor([], "int8", [8], 8192, 8)],
        [Tensor(["a"], "int8", [8], 0, 8)],
        [Tensor(["a"], "int8", [8], 8192 + 1, 8)],
        [Tensor(["a"], "int8", [8], 1 << 20, 8)],
        [Tensor(["a"], "int8", [-8], 8192, 8)],
        [Tensor(["a"], "int8", [3], 8192, 8)],
        [Tensor(["a"], "int8", [0], 8192, 8)],
        [Tensor(["a"], "int8", [8], 8192, 8), Tensor(["a"], "int8", [8], 8192 + 64, 8)],
        [Tensor(["a"], "int8", [80], 8192, 80), Tensor(["b"], "int8", [8], 8192 + 64, 8)],
    ],
)
def test_layouts_that_do_not_fit_are_refused(tensors: list[Tensor]) -> None:
    check_layout(Layout([Tensor(["a"], "int8", [8], 8192, 8)], 1 << 20))
    with pytest.raises(ValueError, match=r"layout|lie in a slot"):
        check_layout(Layout(tensors, 1 << 20))


def publish_and_look(name: str) -> None:
    """In a worker of each of two hosts: the second one publishes, both read, and see both."""
    mv.init()
    publication = None
    if mv.worker_id() == 1:
        publication = mv.Publication(name, like={"weights": np.zeros(4)})
        publication.publish({"weights": np.ones(4)}, step=5)
    with mv.subscribe(name, job=os.environ["MULTIVERSO_NODE"], timeout_seconds=SECONDS) as subscription:
        subscription.latest().release()
        wanted = [("host-0", 1, 5), ("host-1", 1, 5)]
        deadline = time.monotonic() + SECONDS
        while sorted(map(shown, look_at(os.environ["MULTIVERSO_NODE"])["publications"])) != wanted:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        mv.barrier()
    if publication is not None:
        publication.close()
    mv.shutdown()


def shown(status: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(status[what] for what in ("host", "version", "step"))


def test_publications_of_all_hosts_are_shown_on_each() -> None:
    mv.run(publish_and_look, 2, (f"on-hosts-{secrets.token_hex(8)}",), hosts=2)
