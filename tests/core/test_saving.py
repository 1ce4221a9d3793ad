"""Saved tables: what was saved comes back, and nothing else is taken."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import bits
from safetensors.numpy import load_file, save_file

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.files.opening import sha256_of, write_whole
from multiverso.files.parsing import tensors
from multiverso.runtime import Node, Session
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
def test_what_cannot_be_read_is_refused_and_nothing_changes(alone: Session, tmp_path: Path, damage: Any) -> None:
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


def test_a_pipe_is_no_saved_table(alone: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    table = mv.ArrayTableHandler(3, session=alone)
    with pytest.raises(SnapshotError, match="not a plain file"):
        table.load(tmp_path / "pipe")


def test_a_number_is_no_path_to_load_from(alone: Session) -> None:
    """It would be a file that is open here, and be closed."""
    table = mv.ArrayTableHandler(3, session=alone)
    with open(os.devnull) as file:
        with pytest.raises(SnapshotError, match="PathLike"):
            table.load(file.fileno())  # type: ignore[arg-type]
        assert os.fstat(file.fileno())


def test_what_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multiverso.saying._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("multiverso.saying._NEXT_SECONDS", 0.0)
    monkeypatch.setattr("multiverso.files.opening._SLICE_BYTES", 1000)
    monkeypatch.setattr("multiverso.files.opening._LARGE_BYTES", 4000)
    monkeypatch.setattr("multiverso.files.opening._READ_BYTES", 1000)
    content = os.urandom(5500)
    for pieces in (content, [content[:10], memoryview(content)[10:]]):
        write_whole(tmp_path / "large", pieces)
        assert (tmp_path / "large").read_bytes() == content
    assert sha256_of(tmp_path / "large") == hashlib.sha256(content).hexdigest()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5 + 6 + 5  # slices, less the last
    assert re.fullmatch(r"multiverso: writing .*/large: 0\.0 of 0\.0 GB, about 0 s left", said[0])
    assert "reading" in said[-1]
    write_whole(tmp_path / "small", b"a" * 999)
    monkeypatch.setattr("multiverso.files.parsing._SLICE_BYTES", 1000)
    monkeypatch.setattr("multiverso.files.parsing._LARGE_BYTES", 8000)
    saved = {"many": np.arange(1100.0).reshape(550, 2), "none": np.empty((0, 3)), "one": np.array(7)}
    save_file(saved, tmp_path / "tensors")
    capsys.readouterr()
    with tensors(tmp_path / "tensors", "one of ours") as (_, read):
        for name, array in read().items():
            assert (array.dtype, bits(array)) == (saved[name].dtype, bits(saved[name]))
    assert re.search(r"reading .*/tensors: 0\.0 of 0\.0 GB, about 0 s left", capsys.readouterr().err)
    assert capsys.readouterr().err == ""
    with (tmp_path / "closed").open("w") as closed:
        pass
    for nobody in (None, closed):  # a save does not fail because nobody can read how far it is
        monkeypatch.setattr("sys.stderr", nobody)
        write_whole(tmp_path / "large", content[::-1])
        assert (tmp_path / "large").read_bytes() == content[::-1]
