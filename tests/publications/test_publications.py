"""Versions of a model: whole or not at all, through deaths of readers and publishers, and refused in words."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from click import unstyle

import multiverso as mv
from multiverso.cli.top import Job, render
from multiverso.errors import (
    ClosedError,
    DtypeMismatchError,
    OutOfMemoryError,
    ShapeMismatchError,
    SnapshotError,
    StartupError,
    WaitTimeoutError,
)
from multiverso.memory import heap
from multiverso.page.metrics import metrics_of
from multiverso.publications import files
from multiverso.publications.publication import History
from multiverso.runtime import Node
from multiverso.watching.jobs import look_at
from multiverso.watching.snapshot import Observer

SECONDS = 60.0
WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int8)}

# Reads version after version, and says each that is not whole: every number of a version is its own.
READER = """
    import sys
    import numpy as np
    import multiverso as mv
    subscription = mv.subscribe(sys.argv[1], timeout_seconds=60)
    print("ready", flush=True)
    seen, wrong, number = 0, 0, 0
    while True:
        with subscription.latest() as snapshot:
            assert snapshot.version >= seen, (snapshot.version, seen)
            seen, number = snapshot.version, number + 1
            wrong += any((array != snapshot.step).any() for array in snapshot.values())
            if snapshot.text == "end":
                break
    print(number, wrong, flush=True)
"""
# Publishes the versions that its standard input asks for; one that asks for "on" goes on for ever.
PUBLISHER = """
    import sys
    import numpy as np
    import multiverso as mv
    def model(step):
        return {"a": np.full(50_000, step, np.float64), "b": np.full((3, 1000), step, np.int32)}
    with mv.Publication(sys.argv[1], like=model(0)) as publication:
        print("ready", flush=True)
        step = 0
        for line in sys.stdin:
            while True:
                step += 1
                version = publication.publish(model(step), step=step, text=line.strip(), wait_seconds=60)
                if line != "on\\n":
                    break
            print(version, flush=True)
"""


@contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that has said that it is ready."""
    command = [sys.executable, "-c", textwrap.dedent(source), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], text: str) -> int:
    """Has a publisher publish, and returns the version."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.fixture
def name() -> str:
    """A name that no other test has."""
    return f"of-test-{os.urandom(8).hex()}"


def test_readers_have_what_was_published_as_it_was(name: str) -> None:
    model: dict[str, Any] = {
        "nested": {"list": [np.float64(2.5), np.zeros((2, 0, 3), np.uint16)], "tuple": (np.array(True),)},
        **{
            dtype: np.arange(7).astype(dtype)
            for dtype in ("int8", "uint64", "float16", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
        },
        "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "big-endian": np.arange(5, dtype=">f4"),
    }
    with mv.Publication(name, like=model) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        assert publication.publish(model, step=-3, text="näive") == 1
        with subscription.latest() as snapshot:
            snapshot.verify()
            assert (snapshot.version, snapshot.step, snapshot.text) == (1, -3, "näive")
            assert len(snapshot) == len(snapshot.checksums) == 12
            assert snapshot["nested.list.0"].shape == ()
            assert snapshot["nested.list.1"].shape == (2, 0, 3)
            assert snapshot["bfloat16"].dtype == ml_dtypes.bfloat16
            for key in ("int8", "uint64", "float16", "complex64", "bfloat16", "transposed", "big-endian"):
                np.testing.assert_array_equal(snapshot[key], model[key])
        assert publication.publish(model) == 2
        assert subscription.latest().step is None


def test_arrays_are_the_memory_itself_and_cannot_be_written_to(name: str) -> None:
    with mv.Publication(name, like=WEIGHTS) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(WEIGHTS)
        with subscription.latest() as one, subscription.latest() as other:
            assert np.shares_memory(one["w"], other["w"])
            with pytest.raises(ValueError, match="read-only"):
                one["w"][0, 0] = 1.0
        program = f"""
            import ctypes, sys
            import multiverso as mv
            snapshot = mv.subscribe({name!r}, timeout_seconds=60).latest()
            print("ready", flush=True)
            ctypes.memset(snapshot["w"].ctypes.data, 1, 4)
        """
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=SECONDS)
        assert (ended.stdout, ended.returncode) == (b"ready\n", -signal.SIGSEGV)


def test_a_publisher_never_waits_for_readers_unless_it_wants_to(name: str) -> None:
    with (
        mv.Publication(name, like=WEIGHTS, slots=2) as publication,
        mv.subscribe(name, timeout_seconds=SECONDS) as subscription,
    ):
        publication.publish(WEIGHTS)
        kept = subscription.latest()
        assert publication.publish(WEIGHTS) == 2
        assert publication.publish(WEIGHTS) is None
        assert publication.publish(WEIGHTS, wait_seconds=0.01) is None
        assert publication.left_out == 2
        array = kept["w"]
        kept.release()
        with pytest.raises(ClosedError, match="released"):
            kept["w"]
        assert publication.publish(WEIGHTS) is None, "an array of it is still there"
        threading.Timer(0.05, lambda held: held.clear(), [[array]]).start()
        del array
        assert publication.publish(WEIGHTS, wait_seconds=SECONDS) == 3


def test_a_reader_keeps_as_many_snapshots_as_there_are_pins_and_is_told_of_more(name: str) -> None:
    with mv.Publication(name, like=WEIGHTS) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(WEIGHTS)
        kept = [subscription.latest() for _ in range(120)]
        with pytest.raises(ClosedError, match="120 snapshots"):
            subscription.latest()
        del kept
        assert subscription.latest().version == 1


@pytest.mark.parametrize("slots", [2, 3])
def test_every_version_is_whole(name: str, slots: int) -> None:
    def model(step: int) -> dict[str, Any]:
        return {"a": np.full(50_000, step, np.float64), "b": np.full((3, 1000), step, np.int32)}

    with (
        mv.Publication(name, like=model(0), slots=slots) as publication,
        program(READER, name) as one,
        program(READER, name) as other,
    ):
        for step in range(1, 400):
            publication.publish(model(step), step=step)
        publication.publish(model(400), step=400, text="end", wait_seconds=SECONDS)
        for reader in (one, other):
            assert reader.stdout is not None
            number, wrong = map(int, reader.stdout.readline().split())
            assert number > 0
            assert wrong == 0


def test_a_killed_readers_pin_falls_and_a_stopped_one_keeps_one_slot(name: str) -> None:
    holder = """
        import sys
        import multiverso as mv
        snapshot = mv.subscribe(sys.argv[1], timeout_seconds=60).latest()
        print("ready", flush=True)
        sys.stdin.read()
    """
    with mv.Publication(name, like=WEIGHTS, slots=3) as publication:
        publication.publish(WEIGHTS)
        with program(holder, name) as reader:
            os.kill(reader.pid, signal.SIGSTOP)
            assert [publication.publish(WEIGHTS) for _ in range(20)] == list(range(2, 22))
            with program(holder, name) as second:
                assert publication.publish(WEIGHTS) == 22
                assert publication.publish(WEIGHTS) is None, "each keeps one, and one is current"
                second.kill()
                second.wait()
                assert publication.publish(WEIGHTS, wait_seconds=SECONDS) == 23
        assert publication.left_out == 1


def test_a_publisher_that_is_killed_in_the_middle_has_published_nothing(name: str) -> None:
    with mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        seen = 0
        for _ in range(3):
            with program(PUBLISHER, name) as publisher:
                assert publisher.stdin is not None
                publisher.stdin.write("on\n")
                publisher.stdin.flush()
                for _ in range(20):
                    with subscription.wait(seen) as snapshot:
                        assert snapshot.version > seen
                        seen = snapshot.version
                        whole(snapshot)
                publisher.kill()
                publisher.wait()
                with subscription.latest() as snapshot:
                    assert snapshot.version >= seen, "the last version stays"
                    seen = snapshot.version
                    whole(snapshot)
                    snapshot.verify()


def whole(snapshot: mv.Snapshot) -> None:
    for array in snapshot.values():
        assert (array == snapshot.step).all()


def test_the_next_publisher_of_a_name_goes_on_with_higher_versions(name: str) -> None:
    with mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        with program(PUBLISHER, name) as first:
            versions = [ask(first, "one") for _ in range(5)]
            assert versions == [1, 2, 3, 4, 5]
            with pytest.raises(StartupError, match=f"process {first.pid} .* publishes"):
                mv.Publication(name, like=WEIGHTS)
            assert subscription.latest().version == 5
        with mv.Publication(name, like=WEIGHTS) as second:
            number = second.publish(WEIGHTS)
            assert number in (1, 6), "6 where the reader has been there first"
            with subscription.wait(5) as snapshot:
                assert snapshot.version == 6, "the same again, under a number that no reader has had"
                assert set(snapshot) == {"w", "b"}
            assert second.publish(WEIGHTS) == 7
            assert subscription.wait(6).version == 7
            assert second.accepts(number, lag=1)
            assert second.accepts(6, lag=1)
            assert not second.accepts(6, lag=0)
            for version, lag in ((None, 1), (1, -1), (1, "a")):
                with pytest.raises(ValueError, match="is a whole number, 0 or more"):
                    second.accepts(version, lag)  # type: ignore[arg-type]
            assert not any(second.accepts(version, lag=100) for version in (0, 2, 5, 8))


def test_samples_are_accepted_by_what_has_been_published_since() -> None:
    history = History()
    assert not history.accepts(1, 10)
    assert [history.next() for _ in range(3)] == [1, 2, 3]
    assert [lag for lag in range(4) if history.accepts(1, lag)] == [2, 3]
    assert not history.rise_above(2)
    assert history.rise_above(9)
    assert history.next() == 10
    assert history.rise_above(12)
    assert history.next(same=True) == 13, "what is current stays, with another number"
    assert history.accepts(10, 0)
    assert history.accepts(13, 0)
    assert history.accepts(3, 1)
    assert not history.accepts(3, 0)
    assert not any(history.accepts(version, 100) for version in (0, 4, 9, 11, 12, 14))


def test_waiting_ends_with_a_version_or_at_the_deadline(name: str) -> None:
    with mv.subscribe(name, timeout_seconds=0.05) as subscription:
        with pytest.raises(WaitTimeoutError, match="nobody of this user publishes it on this host"):
            subscription.latest()
        with mv.Publication(name, like=WEIGHTS) as publication:
            while subscription._attachment is None:
                with pytest.raises(WaitTimeoutError):
                    subscription.latest()
            with pytest.raises(WaitTimeoutError, match="its publisher has published nothing yet"):
                subscription.latest()
            with pytest.raises(StartupError, match=f"this process publishes '{name}' already: close"):
                mv.Publication(name, like=WEIGHTS)
            threading.Timer(0.05, publication.publish, [WEIGHTS]).start()
            assert subscription.wait(0, timeout_seconds=SECONDS).version == 1
            with pytest.raises(WaitTimeoutError, match=r"newer than 1: the newest is \d$"):
                subscription.wait(1)
        assert subscription.latest().version == 1
        while subscription._attachment is not None and subscription._attachment.connected:
            threading.Event().wait(0.01)  # the thread that follows it has not seen it yet
        with pytest.raises(WaitTimeoutError, match="publisher is gone"):
            subscription.wait(1, timeout_seconds=0.3)
    with pytest.raises(ClosedError, match="is closed"):
        subscription.latest()


def test_a_publishers_memory_goes_when_the_next_one_is_read_and_no_snapshot_is_left(name: str) -> None:
    with mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        with mv.Publication(name, like=WEIGHTS) as publication:
            publication.publish(WEIGHTS)
            kept = subscription.latest()
        before = weakref.ref(subscription._attachment)
        with mv.Publication(name, like=WEIGHTS) as publication:
            publication.publish(WEIGHTS)
            subscription.wait(kept.version).release()
            assert before() is not None
            assert kept["w"].sum() == 15
            kept.release()
            del kept
            until = time.monotonic() + SECONDS
            while before() is not None:
                assert time.monotonic() < until, "the memory of the first publisher is still there"
                time.sleep(0.01)


def test_snapshots_outlive_their_subscription_and_their_publisher(name: str) -> None:
    publication = mv.Publication(name, like=WEIGHTS, slots=2)
    subscription = mv.subscribe(name, timeout_seconds=SECONDS)
    publication.publish(WEIGHTS)
    snapshot = subscription.latest()
    subscription.close()
    publication.publish(WEIGHTS)
    assert publication.publish(WEIGHTS) is None, "it is kept after the subscription, too"
    publication.close()
    np.testing.assert_array_equal(snapshot["w"], WEIGHTS["w"])


def test_the_memory_goes_with_the_last_that_refers_to_it(name: str) -> None:
    large = {"w": np.ones(4 << 20, np.float32)}

    def mapped() -> int:
        rows = Path("/proc/self/maps").read_text().splitlines()
        ranges = [row.split()[0].split("-") for row in rows if "memfd:multiverso-publication" in row]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    before = mapped()
    gc.disable()  # as soon as nothing refers to it, not when cycles are looked for
    try:
        with mv.Publication(name, like=large) as publication:
            with mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
                publication.publish(large)
                snapshot = subscription.latest()
            assert mapped() > before + large["w"].nbytes
        del publication, subscription
        assert mapped() > before
        np.testing.assert_array_equal(snapshot["w"], large["w"])
        (thread,) = [one for one in threading.enumerate() if one.name == "multiverso-reader"]
        del snapshot
        thread.join(SECONDS)  # it held the life lock for the snapshot
        del thread
        assert mapped() == before
    finally:
        gc.enable()


def test_a_forked_child_leaves_its_parents_pins_alone_and_is_refused(name: str) -> None:
    with (
        mv.Publication(name, like=WEIGHTS, slots=2) as publication,
        mv.subscribe(name, timeout_seconds=SECONDS) as subscription,
    ):
        publication.publish(WEIGHTS)
        snapshot = subscription.latest()
        holds, forked = threading.Event(), threading.Event()

        def publish_meanwhile() -> None:
            with publication._lock:
                holds.set()
                forked.wait(SECONDS)

        publishing = threading.Thread(target=publish_meanwhile)
        publishing.start()
        holds.wait(SECONDS)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(ClosedError, match="child"):
                    subscription.latest()
                with pytest.raises(ClosedError, match="child"):
                    publication.publish(WEIGHTS)
                del snapshot
                gc.collect()
                publication.close()
                subscription.close()
                code = 0
            finally:
                os._exit(code)
        forked.set()
        publishing.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert publication.publish(WEIGHTS) == 2
        assert publication.publish(WEIGHTS) is None, "the parent still has version 1"
        np.testing.assert_array_equal(snapshot["w"], WEIGHTS["w"])
        assert subscription.latest().version == 2


def test_a_ticket_gives_another_process_the_very_version_that_is_kept(name: str) -> None:
    other = """
        import sys
        import multiverso as mv
        subscription = mv.subscribe(sys.argv[1], timeout_seconds=60)
        print("ready", flush=True)
        for line in sys.stdin:
            ticket, seconds = line.split()
            try:
                with subscription.redeem(ticket, timeout_seconds=float(seconds)) as snapshot:
                    print(snapshot.version, snapshot.step, snapshot["w"].sum(), flush=True)
            except Exception as error:
                print(type(error).__name__, error, flush=True)
    """
    with (
        mv.Publication(name, like=WEIGHTS) as publication,
        mv.subscribe(name, timeout_seconds=SECONDS) as subscription,
        program(other, name) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None

        def redeemed(ticket: str, seconds: float = SECONDS) -> str:
            process.stdin.write(f"{ticket} {seconds}\n")
            process.stdin.flush()
            return process.stdout.readline()

        publication.publish(WEIGHTS, step=7)
        with subscription.latest() as kept:
            for _ in range(5):
                publication.publish({**WEIGHTS, "w": WEIGHTS["w"] + 1}, wait_seconds=SECONDS)
            ticket = kept.ticket
            assert redeemed(ticket) == "1 7 15.0\n"
            sixth = subscription.latest()
            assert publication.publish(WEIGHTS) == 7, "that process has let it go"
            assert redeemed(ticket) == "1 7 15.0\n"
        assert redeemed(ticket) == f"SnapshotError nobody keeps version 1 of {name!r} any more; in memory: 6, 7\n"
        sixth.release()
        assert redeemed("nonsense").startswith("SnapshotError 'nonsense' is no ticket")
        assert redeemed("1-11", 0.2).startswith("WaitTimeoutError waited 0.2 s for the publisher of version 1")
        with pytest.raises(ClosedError, match="released"):
            kept.ticket


def test_a_jobs_publications_are_shown_where_the_job_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Node(1) as node:
        monkeypatch.setenv("MULTIVERSO_NODE", node.address)
        with mv.Publication(name, like=WEIGHTS) as publication, mv.subscribe(name) as subscription:
            publication.publish(WEIGHTS, step=7)
            with subscription.latest():
                publication.publish(WEIGHTS, step=8)
                status = look_at(node.address)
            shown = {"name": name, "readers": 1, "version": 2, "step": 8, "left_out": 0, "sent_bytes": 0}
            shown |= {"oldest_version": 1, "oldest_pid": os.getpid()}
            assert [shown | {"memory_bytes": publication._slots.nbytes, "host": None}] == status["publications"]
            assert re.search(rf"{name} +2 +8 +1 +1 +0 ", unstyle(render([Job().see(status)])))
            assert f'multiverso_publication_readers{{publication="{name}"}} 1.0' in metrics_of(Observer().see(status))
        assert look_at(node.address)["publications"] == []


def test_without_vllm_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from multiverso import vllm

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.32 \(pip install vllm"):
        vllm.register()
    vllm.plugin()
    assert "needs vLLM 0.32" in caplog.text


def test_one_slot_is_for_what_is_published_once(name: str) -> None:
    big = {"w": np.ones(1 << 20, np.float32)}
    with mv.Publication(name, like=big, slots=1) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as reader:
        assert big["w"].nbytes < publication._slots.nbytes < 1.1 * big["w"].nbytes
        assert publication.publish(big, step=1) == 1
        assert publication.publish({"w": big["w"] + 1}) is None
        assert (publication.version, publication.left_out) == (1, 1)
        with reader.latest() as snapshot:
            snapshot.verify()
            assert (snapshot.step, snapshot["w"].sum()) == (1, 1 << 20)


def test_a_third_slot_takes_memory_only_when_readers_keep_two(name: str) -> None:
    big = {"w": np.ones(1 << 20, np.float32)}
    with mv.Publication(name, like=big) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        taken = [publication._slots.nbytes]
        for _ in range(5):
            publication.publish(big)
        kept = subscription.latest()
        publication.publish(big)
        taken.append(publication._slots.nbytes)
        publication.publish(big)
        taken.append(publication._slots.nbytes)
        assert kept.version == 5
        assert subscription.latest().version == 7
    assert taken[0] == taken[1]
    assert taken[2] >= taken[1] + big["w"].nbytes


def test_a_slot_more_is_not_taken_of_memory_that_others_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"w": np.ones(16 << 20, np.float32)}
    with mv.Publication(name, like=big) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(big)
        with subscription.latest():
            publication.publish(big)
            with monkeypatch.context() as patch:
                patch.setattr(heap, "free_memory", lambda: 1 << 20)
                assert publication.publish(big) is None, "the system would end some process to make room"
            assert publication.left_out == 1
            assert publication.publish(big) == 3


def test_tensors_with_gaps_are_copied_one_after_another(name: str) -> None:
    with_gaps = {letter: np.arange(1 << 21, dtype=np.float32)[::2] for letter in "abcdef"}
    model = {**with_gaps, "tied to a": with_gaps["a"], "swapped": np.arange(5, dtype=">i4")}
    with mv.Publication(name, like=model) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        tracemalloc.start()
        publication.publish(model)
        (_, peak), _ = tracemalloc.get_traced_memory(), tracemalloc.stop()
        with subscription.latest() as snapshot:
            snapshot.verify()
            assert len(snapshot.layout.tensors) == len(model) - 1
            for key, value in model.items():
                np.testing.assert_array_equal(snapshot[key], value)
    assert peak < 2 * with_gaps["a"].nbytes


@pytest.mark.parametrize("arguments", [("",), ("x" * 201,), (7,)])
def test_names_are_checked(arguments: tuple[Any]) -> None:
    with pytest.raises(ValueError, match="a text of 1 to 200 characters"):
        mv.Publication(*arguments, like=WEIGHTS)
    with pytest.raises(ValueError, match="a text of 1 to 200 characters"):
        mv.subscribe(*arguments)


@pytest.mark.parametrize(
    ("like", "error", "words"),
    [
        ({}, ValueError, "nothing to publish"),
        ({"a": "text"}, TypeError, "'a' is 'text'"),
        ({"a": None}, TypeError, "'a' is None"),
        ({"a": np.array(["text"])}, TypeError, "arrays of numbers"),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, ValueError, "two tensors are called 'a.b'"),
    ],
)
def test_what_cannot_be_published_is_refused(name: str, like: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mv.Publication(name, like=like)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda model: model.pop("b"), ShapeMismatchError, "it lacks 'b'"),
        (lambda model: model.update(c=np.ones(1)), ShapeMismatchError, "it has 'c'"),
        (
            lambda model: model.update(b=np.ones(4, np.int8)),
            ShapeMismatchError,
            r"'b': int8 \(3,\); got the shape \(4,\)",
        ),
        (lambda model: model.update(b=np.ones(3)), DtypeMismatchError, "'b': int8 .*; got float64"),
        (lambda model: model.update(tied=np.ones(2)), ShapeMismatchError, "were one tensor"),
    ],
)
def test_another_model_is_refused_and_nothing_is_published(
    name: str, change: Callable[[dict[str, Any]], object], error: type[Exception], words: str
) -> None:
    tied = np.ones(2)
    model = {**WEIGHTS, "tied": tied, "same": tied}
    with mv.Publication(name, like=model) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(model)
        with subscription.latest() as snapshot:
            assert np.shares_memory(snapshot["tied"], snapshot["same"])
        change(model)
        with pytest.raises(error, match=words):
            publication.publish(model)
        assert publication.version == 1
        targets = {key: np.array(value) for key, value in model.items()}
        if "tied" not in words and "one tensor" not in words:
            with pytest.raises(error):
                subscription.load_into(targets)


def test_more_bad_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for slots in (0, 9, 2.0, True):
        with pytest.raises(ValueError, match="from 1 to 8"):
            mv.Publication(name, like=WEIGHTS, slots=slots)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(heap, "free_memory", lambda: 1 << 20)
        large = {"w": np.zeros(32 << 20, np.uint8)}
        with pytest.raises(OutOfMemoryError, match=r"67 MB does not fit: 1 MB .*narrower dtype"):
            mv.Publication(name, like=large)
    publication = mv.Publication(name, like=WEIGHTS)
    for text in ("x" * 5000, None, "\ud800"):
        with pytest.raises(ValueError, match=r"4032 bytes at most|surrogates"):
            publication.publish(WEIGHTS, text=text)  # type: ignore[arg-type]
    for step in (1.5, "1", 1 << 63):
        with pytest.raises(ValueError, match="step"):
            publication.publish(WEIGHTS, step=step)  # type: ignore[arg-type]
    for port in (-1, 65536, "80"):
        with pytest.raises(ValueError, match="port is"):
            publication.forward(port, token="x" * 20)  # type: ignore[arg-type]
    assert publication.version == 0
    with pytest.raises(ValueError, match="a timeout is a number"):
        publication.publish(WEIGHTS, wait_seconds=-1)
    publication.close()
    publication.close()
    with pytest.raises(ClosedError, match="is closed"):
        publication.publish(WEIGHTS)


def test_arrays_are_loaded_into_in_place(name: str) -> None:
    with mv.Publication(name, like=WEIGHTS) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(WEIGHTS)
        mine = {key: np.zeros_like(value) for key, value in WEIGHTS.items()}
        assert subscription.load_into(mine) == 1
        for key, value in WEIGHTS.items():
            np.testing.assert_array_equal(mine[key], value)
        mine["b"].flags.writeable = False
        with pytest.raises(DtypeMismatchError, match="cannot be written to"):
            subscription.load_into(mine)
        with pytest.raises(TypeError, match="cannot be written to"):
            subscription.load_into({"w": np.float32(1), "b": np.int8(1)} | {"w": mine["w"], "b": memoryview(b"abc")})


def test_versions_are_saved_as_files_that_others_read(name: str, tmp_path: Path) -> None:
    tied = np.arange(4, dtype=np.float64)
    model = {**WEIGHTS, "half": np.ones(3, ml_dtypes.bfloat16), "one": tied, "two": tied}
    path = tmp_path / "model.safetensors"
    with mv.Publication(name, like=model) as publication, mv.subscribe(name, timeout_seconds=SECONDS) as subscription:
        publication.publish(model, step=5, text="best")
        with subscription.latest() as snapshot:
            snapshot.save(path)
            with pytest.raises(SnapshotError, match="cannot be written"):
                snapshot.save(tmp_path / "missing" / "model")
    found = safetensors.numpy.load_file(path)
    assert set(found) == {"w", "b", "half", "one"}
    np.testing.assert_array_equal(found["w"], WEIGHTS["w"])
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    assert (metadata["version"], metadata["step"], metadata["text"], metadata["two"]) == ("1", "5", "best", "one")
    dtypes = {key: leaf.dtype for key, leaf in files.leaves_in(path).items()}
    assert dtypes == {"w": "float32", "b": "int8", "half": "bfloat16", "one": "float64", "two": "float64"}


def test_a_file_is_served_by_the_command_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(WEIGHTS, path)
    command = [sys.executable, "-m", "multiverso", "publish", str(path), "--name", name]
    with (
        mv.subscribe(name, timeout_seconds=SECONDS) as subscription,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
    ):
        with subscription.latest() as snapshot:
            np.testing.assert_array_equal(snapshot["w"], WEIGHTS["w"])
            assert snapshot.text == str(path)
        assert server.stdout is not None
        assert f"{path} is published as {name!r}" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=SECONDS)
        assert server.returncode in (130, -signal.SIGINT)
    path.write_bytes(b"nonsense")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert refused.returncode == 2
    assert "multiverso: " in refused.stderr
    assert "is no safetensors file" in refused.stderr


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(100), "b": np.ones((3, 4), np.float32)}, path)
    content = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for turn in range(300):
        spoilt = bytearray(content)
        if turn % 3 == 0:
            del spoilt[random.integers(len(spoilt)) :]
        for _ in range(3 if turn % 3 else 0):
            spoilt[random.integers(0, 160)] = random.integers(256)
        path.write_bytes(spoilt)
        try:
            assert all(leaf.nbytes <= len(spoilt) for leaf in files.leaves_in(path).values())
        except SnapshotError:
            refused += 1
    assert refused > 150


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's number, which only root may")
def test_another_users_process_gets_nothing(name: str) -> None:
    stranger = """
        import os, sys
        from multiverso.errors import StartupError
        from multiverso.publications.attachment import Attachment
        from multiverso.kernels import publications
        publications.pin.compiled()
        os.setgid(65534)
        os.setuid(65534)
        try:
            Attachment(sys.argv[1], 0, 1e18)
        except StartupError as error:
            print("ready", flush=True)
            sys.stdin.read()
    """
    from multiverso.wire import publications as names

    with mv.Publication(name, like=WEIGHTS) as publication:
        with program(stranger, names.address(name, "")):
            assert publication.readers == 0
        assert publication.publish(WEIGHTS) == 1


# Raises exceptions at random moments of reads and publishes, and looks after each what is left of it. A process of its
# own: the alarm's timer is pytest's.
STORM = """
    import gc, random, signal, sys
    import numpy as np
    import multiverso as mv

    class Alarm(Exception):
        pass

    def ring(number, frame):
        global armed
        while frame is not None and armed:
            if "multiverso" in frame.f_code.co_filename:
                armed = False
                raise Alarm
            frame = frame.f_back

    armed = False
    gc.disable()  # an exception in a callback of a collection is printed, and lost

    def whole(snapshot):
        assert all((array == snapshot.step).all() for array in snapshot.values())

    def read():
        with reader.latest() as snapshot:
            whole(snapshot)

    def publish(step):
        for array in model.values():
            array[...] = step
        return publication.publish(model, step=step)

    signal.signal(signal.SIGALRM, ring)
    model = {"a": np.zeros(3000), "b": np.zeros(5, np.int8)}
    interrupted = {read: 0, publish: 0}
    with mv.Publication(sys.argv[1], like=model, slots=2) as publication, mv.subscribe(sys.argv[1]) as reader:
        publish(0)
        read()
        for _ in range(300):
            for what in interrupted:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-4))
                try:
                    armed = True
                    for step in range(1, 30):
                        what() if what is read else what(step)
                except Alarm:
                    interrupted[what] += 1
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            read()
            reader.latest().verify()
            assert not reader._attachment.pinned, "an exception has left a pin"
            assert publish(0) is not None
    print(*interrupted.values())
"""


def test_exceptions_at_any_moment_leave_no_pin_and_no_half_of_a_version(name: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(STORM), name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert min(map(int, ended.stdout.split())) > 0, "no alarm came in the middle of a call"
