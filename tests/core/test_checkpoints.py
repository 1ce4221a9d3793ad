"""A job's state in a directory: it comes back whole, or nothing is changed, whatever happens in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import Worker, bits, outcome, together, wait_for

import multiverso as mv
from multiverso.checkpoints import random_state, set_random_state, worker_folder
from multiverso.checkpoints.trees import as_bytes, read_tree, write_tree
from multiverso.errors import SnapshotError
from multiverso.files.opening import sha256_of
from multiverso.params import Model, SharedParams
from multiverso.runtime import Node, Session
from multiverso.tables.save_all import load_all, save_all

TREES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x"], 3: (1, ("b", [])), "empty": {}, "bytes": b"\0\xff", "long": 2**200},
    "odd numbers": [float("inf"), -0.0, 1e-300, 0.1],
    "random state": np.random.default_rng(3).bit_generator.state,
    "python's random state": __import__("random").Random(1).getstate(),
    "numpy's old random state": np.random.RandomState(1).get_state(),
    "a name twice": {"x": {"y": np.arange(3)}, "x/y": np.arange(4)},
}


@pytest.mark.parametrize("name", TREES)
def test_plain_state_comes_back(tmp_path: Path, name: str) -> None:
    (tmp_path / "tree").write_bytes(as_bytes(TREES[name]))
    assert repr(read_tree(tmp_path / "tree")) == repr(TREES[name])


def test_a_nan_and_every_dtype_come_back(tmp_path: Path) -> None:
    kinds = "?bBhHiIlLqQefdFDg"
    arrays = [np.array([[0, 1, 3]] * 2).astype(kind) for kind in kinds]
    arrays += [np.array(np.nan), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T, np.arange(3, dtype=">i4")]
    scalars = [np.float32(0.1), np.int64(-1), np.bool_(True), np.complex64(1j)]
    (tmp_path / "tree").write_bytes(as_bytes([float("nan"), *arrays, *scalars]))
    nan, *found = read_tree(tmp_path / "tree")
    assert np.isnan(nan)
    for saved, value in zip([*arrays, *scalars], found, strict=True):
        assert type(value) is type(saved)
        assert value.dtype == saved.dtype.newbyteorder("=")
        np.testing.assert_array_equal(value, saved)
    assert all(value.flags.writeable for value in found[: len(arrays)])


class Pair(tuple):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [0, {"f": len}]}, r"^a\[1\]\['f'\] is <built-in function len>"),
        ({"a": Pair((1, 2))}, "^a is .*Pair"),
        ({"a": {(1, 2): 3}}, r"^a has the key \(1, 2\)"),
        ({"a": np.array(["x"])}, "^a is an array of <U1"),
        ({"a": np.array([len])}, "^a is an array of object"),
        ({"a": np.ma.masked_array([1], [True])}, "^a is masked_array"),
        ({"a": 1j}, "^a is 1j"),
    ],
)
def test_what_is_no_plain_state_is_refused_by_its_place(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        as_bytes(value)
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        as_bytes(loop)


def _train(shared: SharedParams, session: Session, steps: int) -> None:
    for _ in range(steps):
        for array in shared.arrays + shared.statistics:
            array += session.worker_id + 1
        shared.step()


def _make(session: Session, rule: Any = None, size: int = 5) -> SharedParams:
    arrays = [np.zeros((2, size), "f4"), np.zeros(3, "f8")]
    return SharedParams(arrays, [np.zeros(2, "f4")], rule=rule, every=2, session=session)


def _all(shared: SharedParams) -> list[bytes]:
    return [bits(array) for array in shared.arrays + shared.statistics + shared.centre()]


MODES: dict[str, dict[str, Any]] = {"async": {}, "sync": {"sync": True}, "bounded": {"staleness": 0}}


@pytest.mark.parametrize("mode", MODES)
def test_each_worker_gets_back_what_was_its_own(tmp_path: Path, mode: str) -> None:
    def first(session: Session) -> Any:
        shared = _make(session, mv.rules.easgd(0.3))
        _train(shared, session, 5)
        session.barrier()
        before = _all(shared)
        shared.save(tmp_path / "deep" / "er", {"me": session.worker_id})
        return before, _all(shared)

    def second(session: Session) -> Any:
        shared = _make(session, mv.rules.easgd(0.3))
        _train(shared, session, 3)  # into a job that has moved on
        own = shared.load(tmp_path / "deep" / "er")
        now = _all(shared)
        session.barrier()
        return own, now, shared.step()

    saved = together(first, 2, **MODES[mode])
    loaded = together(second, 2, **MODES[mode])
    for me, ((before, after), (own, now, due)) in enumerate(zip(saved, loaded, strict=True)):
        assert before == after == now
        assert own == {"me": me}
        assert due, "five steps were done, and every second exchanges"
    assert saved[0] != saved[1]


def test_what_was_staged_in_a_round_is_saved_with_it(tmp_path: Path) -> None:
    def train(session: Session, load: bool) -> Any:
        shared = _make(session, mv.rules.downpour(push=1, fetch=3))
        if load:
            shared.load(tmp_path)
        else:
            _train(shared, session, 8)  # 4 exchanges: one is pushed and not fetched
            shared.save(tmp_path)
        _train(shared, session, 4)
        return _all(shared)

    went_on = together(lambda session: train(session, False), 2, sync=True)
    resumed = together(lambda session: train(session, True), 2, sync=True)
    assert went_on == resumed
    assert went_on[0][-3:] == went_on[1][-3:]


def test_nothing_there(alone: Session, tmp_path: Path) -> None:
    shared = _make(alone)
    assert shared.load(tmp_path / "none", missing_ok=True) is None
    assert worker_folder(alone, tmp_path / "none") is None
    with pytest.raises(SnapshotError, match="holds no saved state"):
        shared.load(tmp_path / "none")


def test_a_live_managers_tables_are_not_loaded_behind_its_back(alone: Session, tmp_path: Path) -> None:
    shared = SharedParams([np.zeros(3, "f4")], rule=mv.rules.easgd(0.5), session=alone)
    save_all(alone, tmp_path)
    shared.arrays[0] += 2
    shared.exchange()
    before = _all(shared)
    with pytest.raises(SnapshotError, match=r"moved by the rule easgd\(0.5\).*manager\.load\(directory\)"):
        load_all(alone, tmp_path)
    assert _all(shared) == before
    del shared
    load_all(alone, tmp_path)  # nobody has anything of its own any more


def _other_rule(session: Session) -> SharedParams:
    return _make(session, mv.rules.asgd())


def _other_size(session: Session) -> SharedParams:
    return _make(session, mv.rules.easgd(0.5), 6)


def _fewer(session: Session) -> SharedParams:
    return SharedParams([np.zeros(3, "f8")], session=session)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_other_rule, "by the rule 'easgd'"),
        (_other_size, "was saved where this model has float32"),
        (_fewer, "another model"),
    ],
)
def test_another_model_is_refused_and_nothing_changes(tmp_path: Path, make: Any, words: str) -> None:
    with Node(1) as node, Session(node.address) as session:
        _make(session, mv.rules.easgd(0.5)).save(tmp_path)
    with Node(1) as node, Session(node.address) as session:
        other = make(session)
        _train(other, session, 2)
        before = _all(other)
        with pytest.raises(SnapshotError, match=words) as told:
            other.load(tmp_path)
        assert "not as it was saved" not in str(told.value)  # it is not damaged
        assert _all(other) == before
        if make is _fewer:
            with pytest.raises(SnapshotError, match="another model"):
                other.save(tmp_path)


RULES = {
    "asgd": mv.rules.asgd(),
    "easgd": mv.rules.easgd(0.2),
    "downpour": mv.rules.downpour(push=1, fetch=3),
    "model averaging": mv.rules.model_averaging(),
    "local sgd": mv.rules.local_sgd(),
}


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("rule", RULES)
def test_more_or_fewer_workers_go_on(
    tmp_path: Path, rule: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def save(session: Session) -> Any:
        shared = _make(session, RULES[rule])
        _train(shared, session, 7)  # three exchanges, and a step that is not exchanged
        shared.save(tmp_path, {"me": session.worker_id})
        return shared.arrays + shared.statistics, shared.centre()

    def load(session: Session) -> Any:
        shared = _make(session, RULES[rule])
        own = shared.load(tmp_path)
        found = [array.copy() for array in shared.arrays + shared.statistics], shared.centre()
        due = shared.step()
        _train(shared, session, 12)  # they are in step: no round is waited for in vain
        return own, shared.newcomer, found, due, [bits(array) for array in shared.centre()]

    saved = together(save, 3, sync=True)
    loaded = together(load, workers, sync=True)
    for me, (own, newcomer, (local, centre), due, _) in enumerate(loaded):
        assert [bits(array) for array in centre] == [bits(array) for array in saved[0][1]]
        assert newcomer == (me >= 3)
        assert own == {"me": me % 3}
        assert list(map(bits, local)) == list(map(bits, centre if newcomer else saved[me][0]))
        assert due, "seven steps were done, and every second exchanges"
    assert len({str(end) for *_, end in loaded}) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "was saved by" in line]
    by = f"multiverso: {tmp_path} was saved by 3 workers (0, 1, 2), "
    if workers == 5:
        begins = "it begins from the shared values, and gets as own what worker {} had handed over"
        assert sorted(said) == [
            f"{by}so worker {me} has nothing of its own there: {begins.format(me - 3)}" for me in (3, 4)
        ]
    else:
        left = {1: "1 worker (0) resumed: what was worker 1, 2's", 2: "2 workers (0, 1) resumed: what was worker 2's"}
        assert said == [f"{by}and {left[workers]} own is left out"]


def test_what_was_contributed_to_a_round_counts_with_fewer_workers(tmp_path: Path) -> None:
    def work(session: Session, load: bool) -> Any:
        shared = _make(session, mv.rules.downpour(push=1, fetch=3))
        if load:
            shared.load(tmp_path)
        else:
            _train(shared, session, 2)  # one exchange: it is pushed, and the round is open
            shared.save(tmp_path)
        for _ in range(4):  # nothing new; the second exchange from here fetches
            shared.step()
        return _all(shared)[-3:]

    went_on = together(lambda session: work(session, False), 3, sync=True)
    for workers in (1, 2):
        assert together(lambda session: work(session, True), workers, sync=True) == went_on[:workers]


def test_a_mean_of_a_half_done_round_is_not_taken_of_fewer_workers(tmp_path: Path) -> None:
    seldom = replace(mv.rules.local_sgd(), name="seldom", pull_every=2)

    def save(session: Session) -> None:
        shared = _make(session, seldom)
        _train(shared, session, 2)
        shared.save(tmp_path)

    def load(session: Session) -> Any:
        shared = _make(session, seldom)
        before = _all(shared)
        error = outcome(lambda: shared.load(tmp_path))
        return error, before == _all(shared)

    together(save, 2, sync=True)
    [(error, unchanged)] = together(load, 1, sync=True)
    assert isinstance(error, SnapshotError)
    assert "the rule 'seldom' takes the mean of what workers contribute to a round" in str(error)
    assert unchanged
    together(lambda session: _make(session, seldom).load(tmp_path), 3, sync=True)


def test_random_numbers_of_a_newcomer_are_its_own() -> None:
    kept = random_state()
    drawn = []
    try:
        for apart in (None, 4, 5, 4):
            set_random_state(kept, apart)
            drawn.append((random.random(), np.random.random()))
    finally:
        set_random_state(kept)
    assert drawn[1] == drawn[3]
    assert len({number for pair in drawn for number in pair}) == 6


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_worker_cannot_save_is_saved_by_none(tmp_path: Path, bad: int) -> None:
    def save(session: Session) -> Any:
        shared = _make(session)
        shared.save(tmp_path, {"good": 1})
        me = session.worker_id
        return outcome(lambda: shared.save(tmp_path, {"bad": len} if me == bad else {})), shared.load(tmp_path)

    results = together(save, 2)
    assert isinstance(results[bad][0], TypeError)
    assert isinstance(results[1 - bad][0], SnapshotError)
    assert f"worker {bad} raised TypeError: own['bad'] is <built-in function len>" in str(results[1 - bad][0])
    assert [own for _, own in results] == [{"good": 1}] * 2


def test_who_is_left_goes_on_as_a_job_of_as_many(tmp_path: Path) -> None:
    """Workers 0 and 2 have saved, as 1 was gone; the next job has 0 and 1."""

    def save(session: Session) -> Any:
        shared = _make(session)
        if session.worker_id == 1:
            session.shutdown()
        else:
            wait_for(lambda: session.live_workers() == [0, 2])
            shared.save(tmp_path, {"me": session.worker_id}, files=lambda folder: (folder / "f").touch())

    def load(session: Session) -> Any:
        found = worker_folder(session, tmp_path)
        own = _make(session).load(tmp_path)
        return own, found is not None and (found[0] / "f").exists(), found is not None and found[1]

    together(save, 3)
    assert together(load, 2) == [({"me": 0}, True, False), ({"me": 2}, True, False)]


def test_own_is_a_dictionary(alone: Session, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"own is a dictionary of state.*got list"):
        _make(alone).save(tmp_path, [1])  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["manifest", "format", "part", "table"])
def test_what_is_damaged_is_refused_by_all(tmp_path: Path, damage: str) -> None:
    def work(session: Session) -> Any:
        shared = _make(session)
        shared.save(tmp_path)
        _train(shared, session, 2)
        session.barrier()
        before = _all(shared)
        if session.worker_id == 0:
            name = {"part": "worker-1.safetensors", "table": "table-0-parameters.safetensors"}.get(damage)
            manifest = tmp_path / "manifest.json"
            if damage == "format":
                manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "multiverso tables 1"}))
            else:
                path = tmp_path / "generation-1" / name if name else manifest
                path.write_bytes(path.read_bytes()[:-9])
        session.barrier()
        return outcome(lambda: shared.load(tmp_path)), before == _all(shared)

    for error, same in together(work, 2):
        assert isinstance(error, SnapshotError)
        assert same


@pytest.mark.parametrize("state", [[], 5, {}, {"own": 1, "managers": []}, {"own": {}, "managers": 3}, "unread"])
def test_a_workers_state_of_another_shape_is_refused(state: Any, alone: Session, tmp_path: Path) -> None:
    """Its hash was right, and what it held a TypeError or a KeyError."""
    mv.ArrayTableHandler(3, name="t", session=alone)
    with mv.checkpoint(tmp_path, session=alone) as checkpoint:
        checkpoint.save({"step": 1})
    path, manifest = tmp_path / "generation-1" / "worker-0.safetensors", tmp_path / "manifest.json"
    state = {**read_tree(path), "unread": {"t9": [1]}} if state == "unread" else state
    write_tree(path, state)
    record = json.loads(manifest.read_text())
    record["generations"][-1]["hashes"][path.name] = sha256_of(path)
    manifest.write_text(json.dumps(record))
    with (
        mv.checkpoint(tmp_path, resume=True, session=alone) as checkpoint,
        pytest.raises(SnapshotError, match="not as it was saved"),
    ):
        checkpoint.restore()


def test_a_directory_that_is_somebody_elses_is_left_alone(alone: Session, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SnapshotError, match="not the manifest"):
        _make(alone).save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["manifest.json"]


def test_two_jobs_do_not_save_to_one_directory_at_once(alone: Session, tmp_path: Path) -> None:
    def other(folder: Path) -> None:
        words = "another job is saving"
        with Node(1) as node, Session(node.address) as session, pytest.raises(SnapshotError, match=words):
            _make(session).save(tmp_path)

    _make(alone).save(tmp_path, files=other)
    assert json.loads((tmp_path / "manifest.json").read_text())["number"] == 1


def test_what_is_common_is_written_once_and_kept(tmp_path: Path) -> None:
    from multiverso.checkpoints import Parts

    def work(session: Session) -> Any:
        shared = _make(session)
        frozen = {"w": np.full(1000, session.worker_id // 2)}  # workers 0 and 1 alike, 2 not
        loaded: list[Any] = []
        shared.model = Model(
            read=lambda: Parts(None, frozen), write=lambda _, parts: loaded.append(parts.common["w"][0])
        )
        inodes = []
        for _ in range(2):
            shared.save(tmp_path)
            (newest,) = tmp_path.glob("generation-*")
            inodes.append({path.name: path.stat().st_ino for path in newest.glob("common-*")})
            session.barrier()
        shared.load(tmp_path)
        return inodes, loaded

    for me, (inodes, loaded) in enumerate(together(work, 3)):
        assert len(inodes[0]) == 2
        assert inodes[0] == inodes[1], "the second save has linked them"
        assert loaded == [me // 2]


KILLED = """
from multiverso.params import SharedParams
from multiverso.checkpoints import generations, saving
with Session(node, worker_id) as s:
    shared = SharedParams([np.ones(4, "f4")], rule=mv.rules.easgd(0.5), session=s)
    shared.save(FOLDER, {"save": 1})
    owner, name, nth = WHERE
    def crash(*a, **k):
        global nth
        nth -= 1
        if nth == 0 and worker_id == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return kept(*a, **k)
    kept = getattr(owner, name)
    setattr(owner, name, crash)
    shared.arrays[0] += 1
    try:
        shared.save(FOLDER, {"save": 2})
    except mv.errors.WorkerLostError:
        say("lost")
    else:
        say("saved")
"""


@pytest.mark.parametrize(
    ("where", "victim", "found"),
    [
        ("os, 'fsync', 1", 0, 1),  # the leader, with a part half written
        ("os, 'fsync', 1", 1, 1),  # the other one
        ("generations, 'write_generations', 1", 0, 1),  # all parts are there, the manifest is not
        ("saving, 'remove_others', 2", 0, 2),  # the manifest is, and so is the old generation
    ],
)
def test_a_kill_in_the_middle_leaves_one_whole_save(tmp_path: Path, where: str, victim: int, found: int) -> None:
    text = KILLED.replace("FOLDER", repr(str(tmp_path))).replace("WHERE", where).replace("VICTIM", str(victim))
    with Node(2) as node, Worker(node, 0, text) as first, Worker(node, 1, text) as second:
        workers = [first, second]
        assert workers[victim].end() == -signal.SIGKILL
        assert workers[1 - victim].hear() == ["lost"]
        assert workers[1 - victim].end() == 0

    def resume(session: Session) -> Any:
        shared = SharedParams([np.zeros(4, "f4")], rule=mv.rules.easgd(0.5), session=session)
        own = shared.load(tmp_path)
        value = shared.arrays[0].tolist()
        shared.save(tmp_path, {"save": 3})
        return own, value, shared.load(tmp_path)

    for own, value, again in together(resume, 2):
        assert own == {"save": found}
        assert value == [float(found)] * 4
        assert again == {"save": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"generation-{found + 1}", "manifest.json"]


def test_a_lost_worker_ends_a_save_also_where_the_job_goes_on(tmp_path: Path) -> None:
    text = KILLED.replace("FOLDER", repr(str(tmp_path))).replace("WHERE", "os, 'fsync', 1").replace("VICTIM", "1")
    text = text.replace("WorkerLostError", "SnapshotError")
    with Node(2, on_lost="continue") as node, Worker(node, 0, text) as first, Worker(node, 1, text) as second:
        assert second.end() == -signal.SIGKILL
        assert first.hear() == ["lost"]
    assert json.loads((tmp_path / "manifest.json").read_text())["number"] == 1
    assert not (tmp_path / "generation-2").exists()
