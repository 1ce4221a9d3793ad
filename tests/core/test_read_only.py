"""Tables read from outside their job: right, never torn, and over when the job is."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import multiverso as mv
from multiverso.errors import NodeLostError, NoSuchTableError, StartupError, WaitTimeoutError
from multiverso.layout.keyed import at
from multiverso.memory.words import load64, store64
from multiverso.runtime import Node, Session
from multiverso.tables import read_only

ROUNDS = 60


def test_rows_by_key_are_what_the_workers_see() -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(3, session=session, name="users", initial="normal", seed=5, admission=2)
        keys = np.arange(-2000, 2000) * 7919  # several segments
        for _ in range(2):
            table.add(np.ones((keys.size, 3)), keys)
        table.add(np.ones(3), 1)  # a candidate
        asked = np.array([[7919, 1], [-(2**63), 2**63 - 1]])
        with mv.attach_read_only("users", node.address) as seen:
            assert (seen.dim, seen.dtype, seen.name) == (3, np.float32, "users")
            np.testing.assert_array_equal(seen.get(keys), table.get(keys))
            np.testing.assert_array_equal(seen.get(asked), table.get(asked))
            out = np.zeros((keys.size, 3), "f4")
            assert seen.get(keys, out) is out
            table.add(np.ones((keys.size, 3)), keys)
            np.testing.assert_array_equal(seen.get(keys), out + 1)
            table.remove(keys)
            np.testing.assert_array_equal(seen.get(keys), table.get(keys))
            assert not np.array_equal(seen.get(keys), out + 1)
            before = load64(seen._segment.address + at.EPOCH), table.stats()
            seen.get(keys)
            assert (load64(seen._segment.address + at.EPOCH), table.stats()) == before, "nobody notices"
        with pytest.raises(NodeLostError, match="attach again"):
            seen.get(1)


def test_a_row_is_its_own_key_s_and_whole_while_keys_come_and_go() -> None:
    keys = np.arange(1, 301)
    numbers = keys[:, np.newaxis] * np.ones(24)
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(24, dtype="float64", session=session, name="moving")
        over = threading.Event()

        def work() -> None:
            random = np.random.default_rng(0)
            try:
                for _ in range(ROUNDS):
                    table.add(numbers, keys)
                    gone = random.permutation(keys)[:150]
                    table.remove(gone)  # their rows go to other keys
                    table.add(numbers[:50], keys[:50])
            finally:
                over.set()

        with mv.attach_read_only("moving", node.address) as seen:
            worker = threading.Thread(target=work)
            worker.start()
            number = 0
            while not over.is_set() or number == 0:
                rows = seen.get(keys)
                assert (rows == rows[:, :1]).all(), "a torn row"
                assert (rows[:, 0] % keys == 0).all(), "another key's row"
                number += 1
            worker.join()
            np.testing.assert_array_equal(seen.get(keys), table.get(keys))


def test_memory_that_is_lent_cannot_be_written_to() -> None:
    with Node(1) as node, Session(node.address) as session:
        mv.KeyedTable(3, session=session, name="users")
        with mv.attach_read_only("users", node.address) as seen:
            start = f"{seen._segment.address:x}-"
            rows = [row for row in Path("/proc/self/maps").read_text().splitlines() if row.startswith(start)]
            assert [row.split()[1] for row in rows] == ["r--s"]


def test_who_reads_is_told_that_the_job_is_over() -> None:
    node = Node(1)
    session = Session(node.address)
    table = mv.KeyedTable(2, session=session, name="users")
    closed = mv.KeyedTable(2, session=session, name="closed")
    table.add([1, 2], 3)
    first, gone = (mv.attach_read_only(name, node.address) for name in ("users", "closed"))
    assert first.get(3).tolist() == [1, 2]
    closed.close()
    # its place may be the next table's, whose values then stand where the header was
    mv.ArrayTableHandler(20_000, np.full(20_000, 1e30), session=session)
    with pytest.raises(NodeLostError, match="closed"):
        gone.get(3)
    session.shutdown()
    again = Session(node.address)  # fresh memory
    with pytest.raises(NodeLostError, match="users"):
        first.get(3)
    mv.KeyedTable(2, session=again, name="users")
    keyed = mv.attach_read_only("users", node.address)
    assert keyed.get(3).tolist() == [0, 0]
    again.shutdown()
    node.close()
    with pytest.raises(NodeLostError, match="ended"):
        keyed.get(3)
    for seen in (keyed, gone, first):
        seen.close()
    with pytest.raises(StartupError, match="no node"):
        mv.attach_read_only("users", node.address)


@pytest.mark.parametrize("sync", [False, True])
def test_arrays_and_matrices_are_published_in_any_mode(sync: bool) -> None:
    name = f"of-test-{os.urandom(8).hex()}"
    with Node(1) as node, Session(node.address, sync=sync) as session:
        table = mv.MatrixTableHandler(10, 3, np.arange(30), session=session, name="dense")
        with pytest.raises(NoSuchTableError, match=r"no keyed table named 'dense' .*can be published"):
            mv.attach_read_only("dense", node.address)
        like = {"dense": table.get()}
        with mv.Publication(name, like=like) as publication, mv.subscribe(name, timeout_seconds=60) as seen:
            table.add(np.ones((10, 3)))
            publication.publish({"dense": table.get()})
            np.testing.assert_array_equal(seen.latest()["dense"], table.get())


def test_a_row_that_stays_held_is_a_timeout_and_others_are_not() -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.KeyedTable(1, session=session, name="held")
        keys = np.arange(1000)
        table.add(np.ones((1000, 1)), keys)  # rows of a line each: 256 of them under a word
        base = table._memory.address
        word = base + table._memory.word("ROW_WORDS")
        value = load64(word)
        with mv.attach_read_only("held", node.address, timeout_seconds=60) as seen:
            seen._timeout_seconds = 0.2
            store64(word, value | 1)
            with pytest.raises(WaitTimeoutError, match="stopped or killed"):
                seen.get(keys)
            assert seen.get(keys[-1]).tolist() == [1]
            store64(word, value)
            assert seen.get(keys).sum() == 1000


def test_one_job_that_does_not_answer_leaves_the_others_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def asked(address: str, name: str, until: float, seconds: float) -> None:
        shares.append(until - began)
        raise WaitTimeoutError("stopped")

    monkeypatch.delenv("MULTIVERSO_NODE", raising=False)
    monkeypatch.setattr(read_only, "node_addresses", lambda: list("abcd"))
    monkeypatch.setattr(read_only, "_attach", asked)
    began = time.monotonic()
    with pytest.raises(StartupError, match="no job of this user"):
        mv.attach_read_only("users", timeout_seconds=800)
    assert [round(share / 100) for share in shares] == [2, 3, 4, 8]


def test_another_program_that_listens_under_such_a_name_hinders_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"nonsense-{os.getpid()}"  # not such a name: tests beside this one look for nodes, too
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.send(b"1")
                connection.recv(1)

        other = threading.Thread(target=answer)
        other.start()
        with Node(1) as node, Session(node.address) as session:
            monkeypatch.setattr(read_only, "node_addresses", lambda: [name, node.address])
            mv.KeyedTable(3, name="there", session=session)
            with mv.attach_read_only("there", timeout_seconds=60) as seen:
                assert seen.dim == 3
        other.join(30)


def test_the_table_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' jobs beside it are asked, too, and some of their nodes are stopped: this takes its time."""
    name, long = f"found-{os.getpid()}", 100.0
    with Node(1) as node, Session(node.address) as session, Node(1) as other:
        with pytest.raises(StartupError, match=name):
            mv.attach_read_only(name, timeout_seconds=long)
        mv.KeyedTable(2, session=session, name=name)
        with mv.attach_read_only(name, timeout_seconds=long) as seen:
            assert seen.get(1).tolist() == [0, 0]
        with Session(other.address) as second:
            mv.KeyedTable(2, session=second, name=name)
            with pytest.raises(StartupError, match="2 jobs"):
                mv.attach_read_only(name, timeout_seconds=long)
            monkeypatch.setenv("MULTIVERSO_NODE", node.address)
            mv.attach_read_only(name).close()
