"""Snapshots of keyed tables: one of everything, then what has changed; and what other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import bits, together

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.runtime import Node, Session

ADAGRAD = mv.updaters.adagrad(0.1)


def _state(table: mv.KeyedTable) -> tuple[bytes, bytes]:
    """Keys and rows, values and updater state, to the last bit."""
    content = table._content(0)
    return bits(content.keys), bits(content.rows)


def _copy(session: Session, directory: Path, **options: Any) -> mv.KeyedTable:
    copy = mv.KeyedTable(4, updater=ADAGRAD, initial="normal", session=session, **options)
    copy.load(directory)
    return copy


def test_base_and_increments_are_the_table_bit_for_bit(alone: Session, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = mv.KeyedTable(4, updater=ADAGRAD, initial="normal", session=alone)
    made = []
    for turn in range(6):
        keys = random.integers(0, 4000, 700)
        table.add(random.normal(size=(700, 4)), keys)
        table.remove(random.integers(0, 4000, 50 * turn))
        table.add(random.normal(size=(40, 4)), random.integers(0, 4000, 40))  # some of them come again
        made.append(table.save_increment(tmp_path))
        assert _state(_copy(alone, tmp_path)) == _state(table)
    assert [s.number for s in made] == [1, 2, 3, 4, 5, 6]
    assert [s.parent for s in made] == [None, 1, 2, 3, 4, 5]
    assert made[-1].removed > 0
    last = table.save_increment(tmp_path)
    assert (last.keys, last.removed) == (0, 0)
    assert _state(_copy(alone, tmp_path)) == _state(table)
    whole = table.save_increment(tmp_path, whole=True)
    assert whole.parent is None
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["manifest.json", whole.file]
    assert _state(_copy(alone, tmp_path)) == _state(table)


def test_what_changes_while_snapshots_are_made_is_in_one_of_them(tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        table = mv.KeyedTable(4, updater=ADAGRAD, initial="normal", name="t", session=session)
        random = np.random.default_rng(session.worker_id)
        for _ in range(8):
            if session.worker_id == 0:
                table.save_increment(tmp_path)
            else:
                for _ in range(10):
                    table.add(random.normal(size=(100, 4)), random.integers(0, 3000, 100))
                    table.remove(random.integers(0, 3000, 20))
        session.barrier()
        if session.worker_id == 0:
            table.save_increment(tmp_path)
            copy = _copy(session, tmp_path, name="copy")
            return _state(copy) == _state(table), len(table) > 1000
        return None

    assert together(work, workers=3)[0] == (True, True)


def test_an_increment_is_as_large_as_what_was_touched(alone: Session, tmp_path: Path) -> None:
    table = mv.KeyedTable(16, session=alone)
    keys = np.arange(50_000)
    table.add(np.ones((50_000, 16)), keys)
    base = table.save_increment(tmp_path)
    table.add(np.ones((500, 16)), np.random.default_rng(0).choice(keys, 500, replace=False))
    part = table.save_increment(tmp_path)
    assert part.keys == 500
    assert part.nbytes <= 0.015 * base.nbytes


def test_another_run_begins_with_everything(tmp_path: Path) -> None:
    for turn in (1, 2):
        with Node(1) as node, Session(node.address) as session:
            table = mv.KeyedTable(2, session=session)
            if turn == 2:
                table.load(tmp_path)
                assert table.get([1, 2, 3]).tolist() == [[1, 1], [2, 2], [0, 0]]
            table.add(np.array([[1, 1], [2, 2]]), [1, 2])
            assert table.save_increment(tmp_path).parent is None
            table.add(np.array([[0, 0]]), [1])
            assert table.save_increment(tmp_path).parent == 2 * turn - 1


def test_what_another_table_or_run_has_saved_is_not_removed(tmp_path: Path) -> None:
    place = tmp_path / "snapshots"
    with Node(1) as node, Session(node.address) as session:
        users, items = (mv.KeyedTable(2, name=name, session=session) for name in ("users", "items"))
        users.add([[1, 1]], [1])
        users.save_increment(place)
        with pytest.raises(SnapshotError, match=r"another table or of another run.*whole=True"):
            items.save_increment(place)
        assert users.save_increment(place).parent == 1
    with Node(1) as node, Session(node.address) as session:  # has forgotten to load
        users = mv.KeyedTable(2, name="users", session=session)
        with pytest.raises(SnapshotError, match="load them first"):
            users.save_increment(place)
        again = mv.KeyedTable(
            2, name="users", session=session
        )  # as another worker's: it need not be the one that saves
        again.load(place)
        assert users.get([1]).tolist() == [[1, 1]]
        assert [users.save_increment(place).parent for _ in range(2)] == [None, 3]
        items = mv.KeyedTable(2, name="items", session=session)
        assert items.save_increment(place, whole=True).keys == 0


def test_when_a_key_was_used_is_kept(alone: Session, tmp_path: Path) -> None:
    eviction = mv.Eviction(idle_ticks=5)
    table = mv.KeyedTable(1, eviction=eviction, session=alone)
    table.add([[1.0]], [1])
    for _ in range(3):
        table.tick()
    table.add([[1.0]], [2])
    table.save(tmp_path / "t")
    copy = mv.KeyedTable(1, eviction=eviction, session=alone)
    copy.load(tmp_path / "t")
    assert copy.ticks == 3
    assert copy.tick(seconds=60) == 0
    assert copy.tick(seconds=60) == 1
    assert copy.contains([1, 2]).tolist() == [False, True]


def test_gaps_and_damage_are_refused_and_change_nothing(alone: Session, tmp_path: Path) -> None:
    table = mv.KeyedTable(4, updater=ADAGRAD, initial="normal", session=alone)
    for turn in range(3):
        table.add(np.ones((10, 4)), np.arange(turn, turn + 10))
        table.save_increment(tmp_path)
    other = mv.KeyedTable(4, updater=ADAGRAD, initial="normal", session=alone)
    other.add(np.ones((1, 4)), [77])
    before = _state(other)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    first, second, third = (tmp_path / s["file"] for s in manifest["snapshots"])

    def refused(match: str) -> None:
        with pytest.raises(SnapshotError, match=match):
            other.load(tmp_path)
        assert _state(other) == before

    def with_manifest(change: Any, match: str) -> None:
        changed = json.loads(json.dumps(manifest))
        change(changed)
        (tmp_path / "manifest.json").write_text(json.dumps(changed))
        refused(match)
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    with_manifest(lambda m: m["snapshots"].pop(1), "gap")
    with_manifest(lambda m: m["snapshots"].pop(0), "gap")
    with_manifest(lambda m: m["snapshots"].reverse(), "gap")
    with_manifest(lambda m: m.update(format="x"), "not the manifest")
    with_manifest(lambda m: m["snapshots"][0].pop("sha256"), "cannot be read")
    with_manifest(lambda m: m["snapshots"][0].update(file="../t"), r"gap|cannot be read")
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("damaged")
    second.write_bytes(third.read_bytes())
    refused("another file")
    second.unlink()
    refused("missing")
    second.write_bytes(content)
    other.load(tmp_path)
    assert _state(other) == _state(table)
    assert first.exists()
    with pytest.raises(SnapshotError, match="dim"):
        mv.KeyedTable(3, updater=ADAGRAD, session=alone).load(tmp_path)
    with pytest.raises(SnapshotError, match="no snapshots"):
        other.load(tmp_path.parent)
    with pytest.raises(SnapshotError, match="is no directory"):
        other.save_increment(first)


def test_it_is_exported_for_others(alone: Session, tmp_path: Path) -> None:
    table = mv.KeyedTable(2, session=alone)
    table.add([[1.5, 2], [3, 4], [5, 6]], [30, -1, 7])
    assert table.export(tmp_path / "t.npz") == 3
    with np.load(tmp_path / "t.npz") as file:
        assert file["keys"].tolist() == [-1, 7, 30]
        assert file["values"].tolist() == [[3, 4], [5, 6], [1.5, 2]]
    table.export(tmp_path / "t.vec", name={30: "dog", -1: "cat", 7: "tree"}.__getitem__)
    assert (tmp_path / "t.vec").read_text() == "3 2\ncat 3.0 4.0\ntree 5.0 6.0\ndog 1.5 2.0\n"
    table.export(tmp_path / "t.txt")
    assert (tmp_path / "t.txt").read_text().splitlines()[1] == "-1 3.0 4.0"
    with pytest.raises(ValueError, match="no spaces"):
        table.export(tmp_path / "t.vec", name=lambda key: "two words")
    with pytest.raises(ValueError, match="suffix"):
        table.export(tmp_path / "t.csv")
    empty = mv.KeyedTable(2, session=alone)
    assert empty.export(tmp_path / "e.npz") == 0
    for place in ("/proc/t.npz", "/dev/null/t.txt", tmp_path / "missing" / "t.vec"):
        with pytest.raises(SnapshotError, match=f"{place} cannot be written: "):
            table.export(place)


def test_it_is_exported_to_parquet(alone: Session, tmp_path: Path) -> None:
    table = mv.KeyedTable(2, session=alone)
    table.add([[1, 2], [3, 4]], [5, -6])
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        with pytest.raises(ModuleNotFoundError, match="pip install pyarrow"):
            table.export(tmp_path / "t.parquet")
        return
    table.export(tmp_path / "t.parquet")
    read = parquet.read_table(tmp_path / "t.parquet").to_pydict()
    assert read == {"key": [-6, 5], "values": [[3.0, 4.0], [1.0, 2.0]]}


def test_rows_of_new_keys_that_begin_otherwise_are_said(alone: Session, tmp_path: Path) -> None:
    mv.KeyedTable(2, initial="normal", seed=1, session=alone).save(tmp_path / "t")
    with pytest.warns(UserWarning, match=r"do not begin as they did.*'seed': 1} there.*'seed': 2} here"):
        mv.KeyedTable(2, initial="normal", seed=2, session=alone).load(tmp_path / "t")
