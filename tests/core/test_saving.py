"""Saved tables: what was saved comes back, and nothing else is taken."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from core_support import Worker, bits, together, wait_for
from safetensors.numpy import load_file, save_file

import multiverso as mv
from multiverso import files
from multiverso.errors import SnapshotError, WaitTimeoutError
from multiverso.runtime import Node, Session
from multiverso.tables import collection, saving
from multiverso.tables.collection import load_all, save_all
from multiverso.updaters import Updater


def _counting() -> Updater:
    def apply(values, delta, state, stride, hyper, count):  # type: ignore[no-untyped-def]
        for i in range(count):
            state[i] += 1
            values[i] += delta[i] * state[i]

    return Updater("counting", apply, states=1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_an_array_comes_back(alone: Session, tmp_path: Path, dtype: str) -> None:
    table = mv.ArrayTableHandler(5, range(5), dtype=dtype, session=alone)
    table.save(tmp_path / "a")
    table.add([1] * 5)
    table.load(tmp_path / "a")
    np.testing.assert_array_equal(table.get(), range(5))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("mode", [{}, {"sync": True}, {"staleness": 1}])
def test_the_updaters_state_comes_back_too(tmp_path: Path, mode: dict[str, Any]) -> None:
    updater = _counting()
    with Node(1) as node, Session(node.address, **mode) as session:
        table = mv.MatrixTableHandler(2, 3, updater=updater, session=session)
        for _ in range(3):
            table.add(np.ones((2, 3)))
            table.get()
        table.save(tmp_path / "m")
        expected = table.snapshot()
        assert (expected == 6).all()
    with Node(1) as node, Session(node.address, **mode) as session:
        table = mv.MatrixTableHandler(2, 3, updater=updater, session=session)
        table.load(tmp_path / "m")
        np.testing.assert_array_equal(table.get(), expected)
        table.add(np.ones((2, 3)))
        assert (table.get() == 10).all()  # the fourth add counts four times


def test_states_are_saved_under_their_names_and_begin_as_they_say(alone: Session, tmp_path: Path) -> None:
    states = (mv.updaters.State("mean"), mv.updaters.State("square", initial=0.1))
    updater = replace(_counting(), states=states)
    table = mv.ArrayTableHandler(3, updater=updater, session=alone)
    table.save(tmp_path / "t")
    saved = load_file(tmp_path / "t")
    assert sorted(saved) == ["state.mean", "state.square", "values"]
    assert saved["state.square"].tolist() == [np.float32(0.1)] * 3
    other = mv.ArrayTableHandler(3, updater=replace(updater, states=states[::-1]), session=alone)
    with pytest.raises(SnapshotError, match="state_names"):
        other.load(tmp_path / "t")


def test_a_table_that_was_saved_before_states_had_names_is_loaded(alone: Session, tmp_path: Path) -> None:
    table = mv.ArrayTableHandler(3, updater=mv.updaters.nesterov(), session=alone)
    header = {**table.spec.as_message(), "states": 1}
    arrays = {"values": np.arange(3, dtype="f4"), "state.0": np.ones(3, "f4")}
    metadata = {"format": "multiverso table 1", "table": json.dumps(header), "version": "1"}
    save_file(arrays, tmp_path / "old", metadata=metadata)
    table.load(tmp_path / "old")
    table.save(tmp_path / "new")
    assert load_file(tmp_path / "new")["state.momentum"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("names", [("a", "a"), ("", "b"), (None,)])
def test_states_have_a_name_each(names: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="a name each"):
        replace(_counting(), states=tuple(map(mv.updaters.State, names)))


def test_any_tool_can_read_the_file(alone: Session, tmp_path: Path) -> None:
    table = mv.MatrixTableHandler(2, 3, range(6), name="w", session=alone)
    table.add(np.ones((2, 3)))
    table.save(tmp_path / "w.safetensors")
    from safetensors import safe_open

    np.testing.assert_array_equal(load_file(tmp_path / "w.safetensors")["values"], [[1, 2, 3], [4, 5, 6]])
    with safe_open(os.fspath(tmp_path / "w.safetensors"), framework="numpy") as file:
        header = file.metadata()
    assert header["version"] == "1"
    assert json.loads(header["table"])["updater"] == "add"


def test_bits_survive(alone: Session, tmp_path: Path) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, np.float32(1e-45)], "f4")
    table = mv.ArrayTableHandler(5, values, session=alone)
    table.save(tmp_path / "a")
    table.add(np.ones(5))
    table.load(tmp_path / "a")
    assert bits(table.get()) == bits(values)


def _not_ours(path: Path) -> None:
    save_file({"values": np.zeros(3, "f4")}, path)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _cut_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _without_values(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="numpy") as file:
        header = file.metadata()
    save_file({"other": np.zeros(3, "f4")}, path, metadata=header)


def _of_another_dtype(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="numpy") as file:
        header = file.metadata()
    save_file({"values": np.zeros(3, "f8")}, path, metadata=header)


def _with_an_unreadable_spec(path: Path) -> None:
    save_file({"values": np.zeros(3, "f4")}, path, metadata={"format": "multiverso table 1", "table": "{"})


def _with_a_name_that_is_none(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="numpy") as file:
        header = file.metadata()
    spec = json.dumps({**json.loads(header["table"]), "name": ""})
    save_file({"values": np.zeros(3, "f4")}, path, metadata={**header, "table": spec})


@pytest.mark.parametrize(
    "damage",
    [
        _not_ours,
        _truncated,
        _cut_in_the_header,
        _empty,
        _without_values,
        _of_another_dtype,
        _with_an_unreadable_spec,
        _with_a_name_that_is_none,
        Path.unlink,
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_changes(
    alone: Session, tmp_path: Path, damage: Any
) -> None:
    table = mv.ArrayTableHandler(3, [1, 2, 3], session=alone)
    path = tmp_path / "a"
    table.save(path)
    damage(path)
    table.add([1, 1, 1])
    with pytest.raises(SnapshotError, match=str(path)):
        table.load(path)
    np.testing.assert_array_equal(table.get(), [2, 3, 4])


OTHERS: dict[str, Any] = {
    "shape": lambda s: mv.ArrayTableHandler(4, session=s),
    "kind": lambda s: mv.MatrixTableHandler(1, 3, session=s),
    "dtype": lambda s: mv.ArrayTableHandler(3, dtype="int32", session=s),
    "updater": lambda s: mv.ArrayTableHandler(3, updater="sgd", session=s),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_does_not_fit_is_refused(alone: Session, tmp_path: Path, what: str) -> None:
    mv.ArrayTableHandler(3, [1, 2, 3], session=alone).save(tmp_path / "a")
    other = OTHERS[what](alone)
    before = bits(other.snapshot())
    with pytest.raises(SnapshotError, match=f"holds a table of {what}.*nothing was changed"):
        other.load(tmp_path / "a")
    assert bits(other.snapshot()) == before


def test_all_tables_of_a_job(tmp_path: Path) -> None:
    def make(session: Session) -> list[Any]:
        return [
            mv.ArrayTableHandler(3, session=session),
            mv.MatrixTableHandler(2, 2, dtype="int64", session=session),
            mv.ArrayTableHandler(2, name="b", session=session),
        ]

    def train(session: Session) -> Any:
        tables = make(session)
        for table in tables:
            table.add(np.full(table.shape, 1 + session.worker_id))
        session.barrier()
        if session.worker_id == 0:
            save_all(session, tmp_path)
        session.barrier()

    def go_on(session: Session) -> Any:
        tables = make(session)
        if session.worker_id == 1:
            load_all(session, tmp_path)
        session.barrier()
        return [table.get().tolist() for table in tables]

    together(train, 2)
    assert together(go_on, 2) == [[[3.0] * 3, [[3, 3], [3, 3]], [3.0, 3.0]]] * 2


def test_other_tables_than_were_saved_change_nothing(alone: Session, tmp_path: Path) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    save_all(alone, tmp_path)
    table.add([1, 1, 1])
    mv.ArrayTableHandler(3, name="new", session=alone)
    with pytest.raises(SnapshotError, match=r"holds the tables \['order:1'\].*'name:new'"):
        load_all(alone, tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SnapshotError, match="not the manifest"):
        load_all(alone, tmp_path)
    with pytest.raises(SnapshotError, match="not the manifest"):
        save_all(alone, tmp_path)
    with pytest.raises(SnapshotError, match="holds no saved tables"):
        load_all(alone, tmp_path / "nowhere")
    np.testing.assert_array_equal(table.get(), [1, 1, 1])


def test_all_fit_or_none_is_loaded(alone: Session, tmp_path: Path) -> None:
    tables = [mv.ArrayTableHandler(3, session=alone) for _ in range(2)]
    save_all(alone, tmp_path)
    for table in tables:
        table.add([1, 1, 1])
    last = next(tmp_path.glob("table-2-*"))
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(SnapshotError):
        load_all(alone, tmp_path)
    assert all((table.get() == 1).all() for table in tables)


CRASH = """
import multiverso.tables.collection
with Session(node, worker_id) as s:
    tables = [mv.ArrayTableHandler(1000, n, session=s) for n in (1, 2, 3)]
    multiverso.tables.collection.save_all(s, sys.argv[3])
    for t in tables:
        t.add(np.full(1000, 10))
    stage, calls = os.environ["CRASH"], 0
    def crash(*a, **k):
        global calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(*a, **k)
    owner, name = (os, "fsync") if stage == "written" else (os, "replace")
    kept = getattr(owner, name)
    setattr(owner, name, crash)
    say("crashing")
    multiverso.tables.collection.save_all(s, sys.argv[3])
"""


@pytest.mark.parametrize("stage", ["written", "replaced"])
def test_a_crash_in_the_middle_leaves_the_save_before(tmp_path: Path, stage: str) -> None:
    with Node(1, on_lost="continue") as node:
        with Worker(node, 0, CRASH.replace("sys.argv[3]", repr(str(tmp_path))), CRASH=stage) as worker:
            assert worker.hear() == ["crashing"]
            assert worker.end() == -signal.SIGKILL
        assert node.wait(30)
    left = len(os.listdir(tmp_path))
    assert left > 4  # three tables, the manifest, and what the crash left
    with Node(1) as node, Session(node.address) as session:
        tables = [mv.ArrayTableHandler(1000, session=session) for _ in range(3)]
        load_all(session, tmp_path)
        assert [table.get()[0] for table in tables] == [1, 2, 3]
        save_all(session, tmp_path)  # which also removes what the crash left
        assert len(os.listdir(tmp_path)) == 4
        load_all(session, tmp_path)
        assert [table.get()[-1] for table in tables] == [1, 2, 3]


def test_a_save_that_cannot_be_names_the_path_that_was_given(alone: Session, tmp_path: Path) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    (tmp_path / "file").touch()
    for path in (
        tmp_path / "no such folder" / "table",
        tmp_path / "file" / "table",
        tmp_path,
        tmp_path / ("x" * 250),
    ):
        with pytest.raises(OSError) as caught:
            table.save(path)
        assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_save_leaves_nothing(alone: Session, tmp_path: Path, monkeypatch: Any) -> None:
    mv.ArrayTableHandler(3, session=alone)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        save_all(alone, tmp_path)
    assert os.listdir(tmp_path) == []


# -- several savers, and savers that are stopped -----------------------------------------------------------------


def _manifest_and_tables(place: Path) -> list[str]:
    """What a directory may hold: the manifest, and what it lists."""
    manifest = json.loads((place / "manifest.json").read_text())
    return sorted(["manifest.json", *manifest["tables"].values()])


def test_all_workers_save_to_one_directory_while_it_is_loaded(tmp_path: Path) -> None:
    done = threading.Event()

    def work(session: Session) -> None:
        tables = [mv.ArrayTableHandler(1000, 7, session=session) for _ in range(2)]
        session.barrier()
        if session.worker_id == 0:
            save_all(session, tmp_path)
            session.barrier()
            while not done.is_set():
                load_all(session, tmp_path)
        else:
            session.barrier()
            for _ in range(8):
                save_all(session, tmp_path)
            done.set()
        assert all((table.snapshot() == 7).all() for table in tables)

    together(work, 4)
    assert sorted(os.listdir(tmp_path)) == _manifest_and_tables(tmp_path)


def _open_files(path: Path) -> int:
    """How often this process has a file open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            found += os.readlink(f"/proc/self/fd/{name}") == str(path)
    return found


def test_savers_that_came_while_another_saved_share_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (replaced.append(Path(b).name), replace(a, b)))

    def work(session: Session) -> None:
        table = mv.ArrayTableHandler(3, session=session)
        table.add([1, 1, 1])
        save_all(session, tmp_path)

    with ThreadPoolExecutor(1) as pool:
        with files.locked(tmp_path / ".lock", 1):
            workers = pool.submit(together, work, 3)
            wait_for(lambda: _open_files(tmp_path / ".lock") == 1 + 3)
        workers.result()
    assert replaced.count("manifest.json") == 1
    assert sorted(os.listdir(tmp_path)) == _manifest_and_tables(tmp_path)
    with Node(1) as node, Session(node.address) as session:
        table = mv.ArrayTableHandler(3, session=session)
        load_all(session, tmp_path)
        np.testing.assert_array_equal(table.get(), [3, 3, 3])


def test_a_save_is_not_left_out_because_of_an_older_one(alone: Session, tmp_path: Path) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    for expected in (1, 2):
        table.add([1, 1, 1])
        save_all(alone, tmp_path)
        table.add([1, 1, 1])
        load_all(alone, tmp_path)
        assert (table.get() == expected).all()
    mv.ArrayTableHandler(3, session=alone)
    save_all(alone, tmp_path)
    assert len(os.listdir(tmp_path)) == 3


def test_who_waits_for_another_saver_has_a_deadline(alone: Session, tmp_path: Path) -> None:
    mv.ArrayTableHandler(3, session=alone)
    patience = alone.timeout_seconds
    with (
        files.locked(tmp_path / ".lock", 1),
        pytest.raises(WaitTimeoutError, match=f"saves to {tmp_path}"),
    ):
        alone.timeout_seconds = 0.05
        save_all(alone, tmp_path)
    assert os.listdir(tmp_path) == []
    alone.timeout_seconds = patience
    save_all(alone, tmp_path)


def test_a_lock_that_a_killed_saver_left_stops_nobody(alone: Session, tmp_path: Path) -> None:
    mv.ArrayTableHandler(3, session=alone)
    (tmp_path / ".lock").touch()
    save_all(alone, tmp_path)
    assert sorted(os.listdir(tmp_path)) == _manifest_and_tables(tmp_path)


def test_without_a_lock_only_the_save_before_is_removed(
    alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files cannot be locked another host's saver may be at work: what it has written stays."""
    table = mv.ArrayTableHandler(3, [1, 2, 3], session=alone)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        save_all(alone, tmp_path)
    others = tmp_path / f"table-1-{'0' * 12}.safetensors"
    others.touch()
    save_all(alone, tmp_path)
    others.unlink()
    (tmp_path / ".lock").unlink()
    assert sorted(os.listdir(tmp_path)) == _manifest_and_tables(tmp_path)
    load_all(alone, tmp_path)
    np.testing.assert_array_equal(table.get(), [1, 2, 3])


# a file that was just opened is closed when nobody knows it any more, which says so
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_an_interrupt_at_any_moment_leaves_a_save_that_is_whole(
    alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes when the new save already counts, and in the cleaning up after another error."""
    table = mv.ArrayTableHandler(3, session=alone)
    save_all(alone, tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand of them take their time
    modules = (files.__file__, collection.__file__, saving.__file__)
    steps = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal steps
        code = frame.f_code
        if code.co_filename not in modules or code.co_name == "__del__":  # where Python drops an interrupt
            return None
        steps -= event == "line"
        if steps == 0:
            raise KeyboardInterrupt
        return trace

    for stop in itertools.count(1):
        table.add([1, 1, 1])
        steps = stop
        sys.settrace(trace)
        try:
            save_all(alone, tmp_path)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        table.add([1, 1, 1])
        load_all(alone, tmp_path)
        values = table.get()
        assert (values == values[0]).all()
        save_all(alone, tmp_path)  # which is stopped by nothing that was left, and removes it
        assert sorted(os.listdir(tmp_path)) == _manifest_and_tables(tmp_path)
        if steps > 0:
            break
    assert stop > 100


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{",
        "null",
        "[]",
        "[" * 100_000,
        '"multiverso tables 1"',
        '{"format": null}',
        '{"format": "multiverso tables 1"}',
        '{"format": "multiverso tables 1", "tables": null}',
        '{"format": "multiverso tables 1", "tables": []}',
        '{"format": "multiverso tables 1", "tables": {"order:1": null}}',
        '{"format": "multiverso tables 1", "tables": {"order:1": 7}}',
        '{"format": "multiverso tables 1", "tables": {"order:1": ["table-1-0123456789ab.safetensors"]}}',
        '{"format": "multiverso tables 1", "tables": {"order:1": "/etc/passwd"}}',
        '{"format": "multiverso tables 1", "tables": {"order:1": "../table-1-0123456789ab.safetensors"}}',
        '{"format": "multiverso tables 1", "tables": {"order:1": "table-1-0123456789ab.safetensors"}}',
        b"\xff\xfe",
        b'{"format": "multiverso tables 1", "tables": {"order:1": NaN}}',
        None,
    ],
)
def test_a_damaged_manifest_is_a_clear_error(alone: Session, tmp_path: Path, manifest: Any) -> None:
    table = mv.ArrayTableHandler(3, [1, 2, 3], session=alone)
    path = tmp_path / "manifest.json"
    if manifest is None:
        os.mkfifo(path)
    else:
        path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
    with pytest.raises(SnapshotError, match=str(tmp_path)):
        load_all(alone, tmp_path)
    np.testing.assert_array_equal(table.get(), [1, 2, 3])


@pytest.mark.parametrize(
    "by", [None, 3, {}, {"node": None}, {"node": "", "began_ns": "x"}, {"began_ns": 2**70}]
)
def test_a_save_replaces_one_whose_writer_cannot_be_read(alone: Session, tmp_path: Path, by: Any) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": "multiverso tables 1", "tables": {}, "by": by})
    )
    save_all(alone, tmp_path)
    load_all(alone, tmp_path)
    assert (table.get() == 0).all()


def test_a_pipe_is_no_saved_table(alone: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    table = mv.ArrayTableHandler(3, session=alone)
    with pytest.raises(SnapshotError, match="not a plain file"):
        table.load(tmp_path / "pipe")
