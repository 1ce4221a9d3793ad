"""All tables of a job saved together: by several savers, by some that are stopped or interrupted, over older saves."""

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
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from core_support import Worker, together, wait_for

import multiverso as mv
from multiverso.errors import SnapshotError, WaitTimeoutError
from multiverso.files import opening as files
from multiverso.params import SharedParams
from multiverso.runtime import Node, Session
from multiverso.tables import saving
from multiverso.tables.save_all import load_all, save_all


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
import multiverso.tables.save_all
with Session(node, worker_id) as s:
    tables = [mv.ArrayTableHandler(1000, n, session=s) for n in (1, 2, 3)]
    multiverso.tables.save_all.save_all(s, sys.argv[3])
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
    multiverso.tables.save_all.save_all(s, sys.argv[3])
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
    table, keyed = mv.ArrayTableHandler(3, session=alone), mv.KeyedTable(2, session=alone)
    (tmp_path / "file").touch()
    for path in (tmp_path / "no such folder" / "table", tmp_path / "file" / "table", tmp_path, tmp_path / ("x" * 250)):
        for save in (table.save, keyed.save):
            with pytest.raises(SnapshotError, match=f"^{path} cannot be written: ") as caught:
                save(path)
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.filename == str(path)
    assert os.listdir(tmp_path) == ["file"]
    for place in (tmp_path / "file", tmp_path / "file" / "folder", "/proc/nothing"):
        for save in (partial(save_all, alone), keyed.save_increment):
            with pytest.raises(SnapshotError) as caught:
                save(place)
            assert isinstance(caught.value.__cause__, OSError)


def test_a_failed_save_leaves_nothing(alone: Session, tmp_path: Path, monkeypatch: Any) -> None:
    keyed, shared = mv.KeyedTable(2, session=alone), SharedParams([np.zeros(3)], session=alone)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for save in (partial(save_all, alone), keyed.save_increment, shared.save):
        with pytest.raises(SnapshotError, match="No space"):
            save(tmp_path)
    assert os.listdir(tmp_path) == []


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


def test_savers_that_came_while_another_saved_share_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with files.locked(tmp_path / ".lock", 1), pytest.raises(WaitTimeoutError, match=f"saves to {tmp_path}"):
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
    modules = (files.__file__, sys.modules[save_all.__module__].__file__, saving.__file__)
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


@pytest.mark.parametrize("by", [None, 3, {}, {"node": None}, {"node": "", "began_ns": "x"}, {"began_ns": 2**70}])
def test_a_save_replaces_one_whose_writer_cannot_be_read(alone: Session, tmp_path: Path, by: Any) -> None:
    table = mv.ArrayTableHandler(3, session=alone)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "multiverso tables 1", "tables": {}, "by": by}))
    save_all(alone, tmp_path)
    load_all(alone, tmp_path)
    assert (table.get() == 0).all()
