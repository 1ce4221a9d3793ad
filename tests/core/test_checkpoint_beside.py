"""`multiverso.checkpoint`: saved beside the training, resumed whole, by as many workers or others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import bits, let_die, outcome, together, wait_for

import multiverso as mv
from multiverso.checkpoints import Parts, background_writer, beginning, board, generations, periodic
from multiverso.checkpoints.loading import Role, role_of
from multiverso.checkpoints.manifests import Generation, read_generations
from multiverso.checkpoints.stores import Remote, open_store
from multiverso.errors import ClosedError, SnapshotError
from multiverso.kernels import waits
from multiverso.layout import words as at
from multiverso.params import SharedParams
from multiverso.runtime import Node, Session
from multiverso.updaters import momentum


class Killed(Exception):
    """Ends a worker in the middle."""


def train(session: Session, place: Any, steps: int, dies_at: int = -1, own: Any = None, **options: Any) -> Any:
    """Trains for so many steps in all; returns what it went on from, and what it ended with."""
    table = mv.ArrayTableHandler(50, updater="momentum", session=session)
    shared = SharedParams([np.zeros(7)], rule=mv.rules.easgd(0.25), session=session)
    options = {"every": 10, "resume": True, **options}
    try:
        with mv.checkpoint(place, shared, session=session, **options) as checkpoint:
            found = checkpoint.restore()
            random = np.random.default_rng(session.worker_id)
            step = 0
            if found is not None:
                step, random.bit_generator.state = found["step"], found["random"]
            while step < steps:
                table.add(random.normal(size=50))
                table.get()
                shared.arrays[0] += random.normal(size=7)
                shared.exchange()
                step += 1
                if step == dies_at:
                    raise Killed
                state = {"step": step, "random": random.bit_generator.state, **(own or {})}
                checkpoint.step(lambda state=state: state)
    except Killed:
        return found
    return found, bits(table.get()), bits(shared.arrays[0]), [bits(a) for a in shared.centre()]


def test_a_synchronous_run_that_is_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = together(lambda s: train(s, tmp_path / "whole", 43), 2, sync=True)
    assert together(lambda s: train(s, tmp_path / "half", 43, dies_at=27), 2, sync=True) == [None, None]
    resumed = together(lambda s: train(s, tmp_path / "half", 43), 2, sync=True)
    assert [found["step"] for found, *_ in resumed] == [20, 20]
    assert [end for _, *end in resumed] == [end for _, *end in whole]
    generations = read_generations(open_store(tmp_path / "half"))
    assert [g.number for g in generations] == [3, 4], "two are kept, and numbers go on"
    assert sorted(os.listdir(tmp_path / "half")) == ["generation-3", "generation-4", "manifest.json"]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("fails", ["own", "disk"])
def test_after_a_failure_of_one_worker_the_parts_are_of_one_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, culprit: int
) -> None:
    write = background_writer.write_part

    def broken(store: Any, generation: Any, me: int, *part: Any) -> Any:
        if fails == "disk" and (generation.number, me) == (2, culprit):
            raise OSError("the disk is full")
        return write(store, generation, me, *part)

    monkeypatch.setattr(background_writer, "write_part", broken)

    def work(session: Session) -> int:
        table = mv.ArrayTableHandler(3, session=session)
        errors = 0
        with mv.checkpoint(tmp_path, every=2, keep=9, session=session) as checkpoint:
            for step in range(1, 9):
                table.add(np.ones(3))
                table.get()
                bad = fails == "own" and step == 4 and session.worker_id == culprit
                try:
                    checkpoint.step(3 if bad else {"step": step})  # type: ignore[arg-type]
                except (TypeError, SnapshotError):
                    errors += 1
        return errors

    def read(session: Session) -> Any:
        mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, resume=True, session=session) as checkpoint:
            return checkpoint.restore()

    errors = together(work, 2, sync=True)
    assert errors[culprit] == 1
    # What the first worker gives up it removes, maybe while the other one writes there, which fails, too.
    assert errors[1 - culprit] == 0 or (fails, culprit) == ("disk", 0)
    assert [g.number for g in read_generations(open_store(tmp_path))] == [1, 3, 4]
    assert together(read, 2) == [{"step": 8}] * 2


@pytest.mark.parametrize("workers", [1, 3])
def test_an_asynchronous_run_is_resumed_by_other_workers(tmp_path: Path, workers: int) -> None:
    def save(session: Session) -> Any:
        table = mv.ArrayTableHandler(5, dtype="int64", name="n/m", session=session)
        keyed = mv.KeyedTable(2, session=session)
        with mv.checkpoint(open_url(tmp_path), every=3, keep=1, session=session) as checkpoint:
            assert checkpoint.restore() is None
            for _ in range(10):
                table.add([1] * 5)
                checkpoint.step({"me": session.worker_id})
            keyed.add([[1, 2]], [session.worker_id])
            session.barrier()
            checkpoint.save({"me": session.worker_id, "last": True})
        return session.barrier()

    def load(session: Session) -> Any:
        table = mv.ArrayTableHandler(5, dtype="int64", name="n/m", session=session)
        keyed = mv.KeyedTable(2, session=session)
        with mv.checkpoint(tmp_path, resume=True, session=session) as checkpoint:
            own = checkpoint.restore()
        session.barrier()
        return own, checkpoint.newcomer, table.get().tolist(), keyed.get([0, 1]).tolist()

    together(save, 2)
    for me, (own, newcomer, values, rows) in enumerate(together(load, workers)):
        assert (own["me"], newcomer) == (me % 2, me >= 2)
        assert values == [20] * 5
        assert rows == [[1, 2], [1, 2]]
    assert len(read_generations(open_store(tmp_path))) == 1


def test_a_checkpoint_with_a_quorum_has_what_no_round_has_taken_up(tmp_path: Path) -> None:
    def work(session: Session, resume: bool) -> list[float]:
        table = mv.ArrayTableHandler(2, session=session)
        with mv.checkpoint(tmp_path, resume=resume, session=session) as checkpoint:
            checkpoint.restore()
            if not resume:
                table.add([1, 1])
                table.get()
                table.add([10, 20])  # not read before the end of the run
                session.barrier()
                checkpoint.save()
                session.barrier()
        return [float(x) for x in table.get()] if resume else []

    options = {"sync": True, "quorum": 2, "grace_seconds": 1000}
    together(partial(work, resume=False), 2, **options)
    assert together(partial(work, resume=True), 2, **options) == [[22.0, 42.0]] * 2


def test_a_copy_beside_rounds_has_values_and_states_of_one() -> None:
    def work(session: Session) -> None:
        updater = momentum(1.0, momentum=0.0)  # the last delta is its state
        table: Any = mv.ArrayTableHandler(3, updater=updater, dtype="float64", session=session)
        deltas, find_states = iter(range(1, 100)), table._states

        def train() -> None:
            table.add(np.full(3, float(next(deltas))))
            table.get()

        def after_two_rounds() -> Any:
            if next(deltas) < 10:
                train()
                train()
            return find_states()

        train()
        table._states = after_two_rounds
        copy = table.copied()
        table._states = find_states
        now = table.copied()
        for one, other in zip((copy.values, *copy.states), (now.values, *now.states), strict=True):
            np.testing.assert_array_equal(one, other)

    together(work, 1, sync=True, quorum=1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_with_a_quorum_is_resumed(tmp_path: Path, workers: int) -> None:
    """Workers that are in different rounds are saved beside training, and continue each from its own step."""

    def train(session: Session, steps: int, resume: bool) -> Any:
        table = mv.ArrayTableHandler(5, dtype="int64", session=session)
        shared = SharedParams([np.zeros(3)], session=session)
        with mv.checkpoint(tmp_path, shared, every=4, resume=resume, session=session) as checkpoint:
            own = checkpoint.restore() or {"step": 0}
            for step in range(own["step"] + 1, steps + 1):
                shared.arrays[0] += 1
                table.add([1] * 5)
                table.get()
                shared.exchange()
                if session.worker_id:
                    time.sleep(0.002)  # the first one is not in step with it
                checkpoint.step({"step": step})
            session.barrier()
            checkpoint.save({"step": steps})
            session.barrier()  # who closes before the first one has begun to save has its last part saved
        return own["step"], checkpoint.newcomer, table.snapshot().tolist(), shared.centre()[0].tolist()

    options = {"sync": True, "quorum": 1}
    for _, _, values, centre in together(partial(train, steps=10, resume=False), 2, **options):
        assert (values, centre) == ([20] * 5, [20.0] * 3)
    found = together(partial(train, steps=14, resume=True), workers, **options)
    for me, (step, newcomer, values, centre) in enumerate(found):
        assert (step, newcomer) == (10, me >= 2)
        assert (values, centre) == ([20 + 4 * workers] * 5, [20.0 + 4 * workers] * 3)


def test_a_synchronous_checkpoint_has_a_keyed_table_of_its_step(tmp_path: Path) -> None:
    """It was written beside the training, with whatever rounds had passed by then."""

    def work(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=mv.updaters.adagrad(0.1), session=session)
        with mv.checkpoint(tmp_path, session=session) as checkpoint:
            for step in range(60):
                table.add([[1, 2]] * 2, [0, 1 + step])
                rows = table.get(range(70))
                if step == 9:
                    checkpoint.save({"rows": rows})
        return rows.tolist()

    def read(session: Session) -> Any:
        table = mv.KeyedTable(2, updater=mv.updaters.adagrad(0.1), session=session)
        with mv.checkpoint(tmp_path, resume=True, session=session) as checkpoint:
            saved = checkpoint.restore()["rows"]
        return saved.tolist(), table.get(range(70)).tolist()

    last = together(work, 2, sync=True)
    for saved, loaded in together(read, 2, sync=True):
        assert saved == loaded != last[0]


def added_by(session: Session, place: Path, steps: int) -> Any:
    """Adds at each step, and reads at the begin of the next one, as embeddings do; returns the tables at the end."""
    table = mv.ArrayTableHandler(3, updater=mv.updaters.adagrad(0.1), session=session)
    matrix = mv.MatrixTableHandler(2, 2, session=session)
    keyed = mv.KeyedTable(
        2, updater=mv.updaters.chain(mv.updaters.clip(norm=2.0), mv.updaters.adagrad(0.1)), session=session
    )
    with mv.checkpoint(place, every=5, session=session) as checkpoint:
        own = checkpoint.restore()
        for step in range(own["step"] if own else 0, steps):
            table.get(), matrix.get(), keyed.get([0, 1])
            for part in range(2):
                table.add([session.worker_id + 0.1 * step] * 3)
                matrix.add([[step, part]], [part])
                keyed.add([[1, 2]], [part + session.worker_id])
            checkpoint.step({"step": step + 1})
    return [t.tolist() for t in (table.get(), matrix.get(), keyed.get([0, 1, 2]))]


@pytest.mark.parametrize("others", [1, 2, 3])
def test_a_synchronous_checkpoint_has_what_no_round_has_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """What workers had added since their last read was lost."""
    whole = together(lambda s: added_by(s, tmp_path / "whole", 5), 2, sync=True)
    together(lambda s: added_by(s, tmp_path / "cut", 5), 2, sync=True)
    monkeypatch.setenv("MULTIVERSO_RESUME", "1")
    assert together(lambda s: added_by(s, tmp_path / "cut", 5), others, sync=True) == [whole[0]] * others
    if others == 2:
        monkeypatch.delenv("MULTIVERSO_RESUME")
        longer = together(lambda s: added_by(s, tmp_path / "longer", 9), 2, sync=True)
        monkeypatch.setenv("MULTIVERSO_RESUME", "1")
        assert together(lambda s: added_by(s, tmp_path / "cut", 9), 2, sync=True) == longer


def test_a_mean_that_fewer_workers_cannot_finish_is_refused(tmp_path: Path) -> None:
    def work(session: Session, resume: bool) -> Any:
        table = mv.ArrayTableHandler(3, updater="mean", session=session)
        with mv.checkpoint(tmp_path, resume=resume, session=session) as checkpoint:
            if resume:
                with pytest.raises(SnapshotError, match="as many again"):
                    checkpoint.restore()
                return table.get().tolist()
            table.add([1.0] * 3)
            checkpoint.save()
        return table.get().tolist()

    assert together(lambda s: work(s, False), 2, sync=True) == [[1.0] * 3] * 2
    assert together(lambda s: work(s, True), 1, sync=True) == [[0.0] * 3]


def open_url(place: Path) -> str:
    return f"file://{place}"


def test_other_file_systems_are_reached_through_fsspec(alone: Session, tmp_path: Path) -> None:
    table = mv.ArrayTableHandler(4, session=alone)
    with mv.checkpoint("memory://runs/a", session=alone) as checkpoint:
        for value in (1, 2, 3):
            table.set([value] * 4)
            wait_for(lambda: checkpoint.save({"value": value}))  # noqa: B023  # until the one before is written
    store = open_store("memory://runs/a")
    assert [g.number for g in read_generations(store)] == [2, 3]
    assert store.names() == ["generation-2", "generation-3", "manifest.json", "manifest.json.new"]
    store.write("manifest.json", b'{"format": "multi')  # killed in the middle of it
    table.set([9] * 4)
    with mv.checkpoint("memory://runs/a", resume=True, session=alone) as checkpoint:
        assert checkpoint.restore() == {"value": 3}
        assert table.get().tolist() == [3] * 4
    with pytest.raises(ValueError, match="nonsense"):
        mv.checkpoint("nonsense://there", session=alone)
    with pytest.raises(ValueError, match="give it as a string"):
        mv.checkpoint(Path("memory://runs/a"), session=alone)
    assert isinstance(open_store(f"simplecache::file://{tmp_path}"), Remote)


def test_a_password_in_a_url_is_not_shown() -> None:
    assert str(open_store("memory://me:p@ss:w@host:22/run@7")) == "memory://me:...@host:22/run@7"
    assert str(open_store("memory://bucket/run:a@7")) == "memory://bucket/run:a@7"


def test_a_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = open_store("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.make()
    assert (str(store), os.listdir(tmp_path / "run")) == ("run", [])


def damage(place: Path, number: int) -> None:
    path = place / f"generation-{number}" / "order-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_what_is_damaged_is_not_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    together(lambda s: train(s, tmp_path, 20), 2, sync=True)
    damage(tmp_path, 2)
    assert [found["step"] for found in together(lambda s: train(s, tmp_path, 20, dies_at=15), 2, sync=True)] == [10] * 2
    said = capfd.readouterr().err
    assert f"{tmp_path}: generation-2/order-1.safetensors is damaged, or another file" in said
    assert "going back to generation-1, which is whole" in said
    damage(tmp_path, 1)

    def refused(session: Session) -> Any:
        table = mv.ArrayTableHandler(50, 7.0, updater="momentum", session=session)
        shared = SharedParams([np.zeros(7)], rule=mv.rules.easgd(0.25), session=session)
        with mv.checkpoint(tmp_path, shared, resume=True, session=session) as checkpoint:
            return outcome(checkpoint.restore), table.get().tolist()

    for error, values in together(refused, 2, sync=True):
        assert isinstance(error, SnapshotError)
        assert values == [7.0] * 50


def test_a_run_is_not_gone_on_from_unless_that_is_wanted(
    alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> Any:
        with mv.checkpoint(tmp_path, session=alone) as checkpoint:
            return checkpoint.restore()

    mv.ArrayTableHandler(4, session=alone)
    with mv.checkpoint(tmp_path, session=alone) as checkpoint:
        assert checkpoint.restore() is None
        assert checkpoint.save({"a": 1})
    with pytest.raises(ClosedError):
        checkpoint.save()
    for names, found in (
        ({}, "holds a run already .*--resume"),
        ({"MULTIVERSO_RESUME": "0", "MULTIVERSO_RESTARTS": "0"}, "holds a run already"),
        ({"MULTIVERSO_RESUME": "1"}, None),
        ({"MULTIVERSO_RESTARTS": "2"}, None),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, None),
        ({"SLURM_RESTART_COUNT": "1"}, None),
    ):
        with monkeypatch.context() as patch:
            for name, text in names.items():
                patch.setenv(name, text)
            if found is not None:
                with pytest.raises(SnapshotError, match=found):
                    begin()
            else:
                assert begin() == {"a": 1}
    assert mv.restarts() == 0


def test_a_resumed_run_is_not_written_over_by_a_program_that_restores_nothing(alone: Session, tmp_path: Path) -> None:
    """It began again at its first step, and replaced what it should have continued from, without a word."""
    mv.ArrayTableHandler(4, session=alone)
    with mv.checkpoint(tmp_path, session=alone) as checkpoint:
        checkpoint.save({"step": 7})  # at a first start there is nothing to restore
    with mv.checkpoint(tmp_path, session=alone, resume=True) as checkpoint:
        checkpoint.save({"step": 8})  # nor later in the same job
    before = (tmp_path / "manifest.json").read_bytes()
    with (
        Node(1) as node,
        Session(node.address) as later,
        mv.checkpoint(tmp_path, every=1, session=later, resume=True) as checkpoint,
    ):
        for early in (checkpoint.step, checkpoint.save):
            with pytest.raises(SnapshotError, match=r"has not called restore\(\)"):
                early({"step": 1})
        assert (tmp_path / "manifest.json").read_bytes() == before
        with pytest.raises(SnapshotError, match=r"make tables, models and managers before it is loaded"):
            checkpoint.restore()
        table = mv.ArrayTableHandler(4, session=later)
        assert checkpoint.restore() == {"step": 8}
        table.add([1.0] * 4)
        assert checkpoint.step({"step": 9})


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "a\0b"])
def test_a_place_that_cannot_be_written_to_is_refused(alone: Session, place: str) -> None:
    with pytest.raises(SnapshotError, match="nothing can be saved in"):
        mv.checkpoint(place, session=alone)


def test_a_resumed_run_with_nothing_saved_says_so(
    alone: Session, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mv.checkpoint(tmp_path / "mistyped", session=alone, resume=True):
        pass
    assert f"{tmp_path}/mistyped holds no saved run to resume from" in capfd.readouterr().err
    with mv.checkpoint(tmp_path / "new", session=alone):
        pass
    assert "resume" not in capfd.readouterr().err


def test_what_makes_no_sense_is_refused(alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "_LOCK_SECONDS", 0.05)
    with pytest.raises(TypeError, match=r"number of steps \(int\) or a datetime.timedelta"):
        mv.checkpoint(tmp_path, every=60.0, session=alone)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep is a whole number, 1 or more; got 0"):
        mv.checkpoint(tmp_path, keep=0, session=alone)
    with pytest.raises(TypeError, match="list is not a manager"):
        mv.checkpoint(tmp_path, [], session=alone)  # type: ignore[arg-type]
    (error,) = together(
        lambda s: outcome(lambda: mv.checkpoint(tmp_path, every=timedelta(seconds=1), session=s)), 1, sync=True
    )
    assert "saved after a round: give a number of steps" in str(error)
    shared = SharedParams([np.zeros(3)], session=alone)
    with mv.checkpoint(tmp_path, session=alone) as checkpoint:
        with pytest.raises(SnapshotError, match=r"has a checkpoint already"):
            mv.checkpoint(tmp_path / "other", session=alone)
        with pytest.raises(SnapshotError, match=r"give its manager to multiverso\.checkpoint"):
            checkpoint.save()
        with Node(1) as node, Session(node.address) as other, pytest.raises(SnapshotError, match="another job is"):
            mv.checkpoint(tmp_path, session=other)
    with mv.checkpoint(tmp_path, shared, session=alone) as checkpoint:
        with pytest.raises(TypeError, match=r"own\['f'\] is <built-in function len>"):
            checkpoint.save({"f": len})
        with pytest.raises(TypeError, match="own is a dictionary"):
            checkpoint.save([1])  # type: ignore[arg-type]
        assert checkpoint.save({"good": 1})
    assert len(read_generations(open_store(tmp_path))) == 1


def test_who_has_left_stays_part_of_the_run(tmp_path: Path) -> None:
    def save(session: Session) -> None:
        mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, keep=1, session=session) as checkpoint:
            wait_for(lambda: checkpoint.save({"me": session.worker_id}))
        if session.worker_id == 1:
            session.shutdown()
            return
        wait_for(lambda: session.live_workers() == [0])
        with mv.checkpoint(tmp_path, keep=1, resume=True, session=session) as checkpoint:
            checkpoint.save({"me": "still 0"})

    def load(session: Session) -> Any:
        mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, resume=True, session=session) as checkpoint:
            return checkpoint.restore()

    together(save, 2)
    assert together(load, 2) == [{"me": "still 0"}, {"me": 1}]


@pytest.mark.parametrize("sync", [True, False])
def test_a_checkpoint_without_a_lost_workers_part_is_not_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sync: bool
) -> None:
    """Also where the loss is known before the others' parts are waited for: an older part must not stand in for it."""

    def save(session: Session) -> None:
        mv.ArrayTableHandler(3, session=session)
        checkpoint = mv.checkpoint(tmp_path, session=session)
        wait_for(lambda: checkpoint.save({"step": 1}))
        wait_for(lambda: len(read_generations(open_store(tmp_path), missing_ok=True)) == 1)
        if session.worker_id == 1:
            let_die(session)
            assert over.wait(20)  # this process lives on, and would hand over at its end
            return
        wait_for(lambda: session.control.liveness(1) == at.LOST)
        assert checkpoint.save({"step": 2})
        checkpoint.close()
        over.set()

    over = threading.Event()
    together(save, 2, sync=sync)
    assert [g.number for g in read_generations(open_store(tmp_path))] == [1]
    assert "generation-2 is not kept: worker 1 was lost" in capfd.readouterr().err


@pytest.mark.parametrize("sync", [True, False])
def test_a_checkpoint_without_the_part_of_a_worker_that_raised_is_not_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], sync: bool
) -> None:
    """Its error ends the job only a moment later. What it had handed over before counts, and so does the next try."""

    def save(session: Session) -> None:
        mv.ArrayTableHandler(3, session=session)
        with contextlib.suppress(Killed), mv.checkpoint(tmp_path, keep=3, session=session) as checkpoint:
            wait_for(lambda: checkpoint.save({"step": 1}))
            if session.worker_id == 1:
                raise Killed
            wait_for(lambda: session.control.checkpoint(1) % 8 == board.ABANDONED)
            assert checkpoint.save({"step": 2})
        session.barrier()
        if session.worker_id == 1:
            return
        wait_for(lambda: session.live_workers() == [0])
        with mv.checkpoint(tmp_path, keep=3, resume=True, session=session) as checkpoint:
            assert checkpoint.save({"step": 3})

    together(save, 2, sync=sync)
    kept = read_generations(open_store(tmp_path))
    assert [(g.number, g.workers) for g in kept] == [(1, [0, 1]), (2, [0] if sync else [0, 1])], "of both"
    assert "generation-2 is not kept: worker 1 ended with an error" in capfd.readouterr().err


def test_who_has_left_takes_no_step_of_a_round_again(tmp_path: Path) -> None:
    """Worker 1 has less data, and leaves after 15 steps; it was saved after 10, and the others after 20 of 30."""

    def work(session: Session, whole: bool) -> Any:
        me = session.worker_id
        table = mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, every=10, resume=True, session=session) as checkpoint:
            own = checkpoint.restore()
            step = own["step"] if own else 0
            while step < (15 if me == 1 else 30 if whole else 25):
                table.add(np.eye(3)[me])
                table.get()
                step += 1
                checkpoint.step({"step": step})
        return None if me == 1 else table.get().tolist()

    together(lambda session: work(session, False), 3, sync=True)
    assert read_generations(open_store(tmp_path))[-1].workers == [0, 2]
    assert together(lambda session: work(session, True), 3, sync=True) == [[30, 15, 30], None, [30, 15, 30]]


@pytest.mark.parametrize(
    ("saved", "live", "roles"),
    [
        ([0, 1, 2], [0, 1, 2], [(0, False, []), (1, False, []), (2, False, [])]),
        ([0, 2], [0, 1, 2], [(0, False, []), (2, True, []), (2, False, [])]),
        ([0, 1], [0, 2], [(0, False, []), (1, False, [])]),
        ([0, 1, 2, 3], [0, 1], [(0, False, [2]), (1, False, [3])]),
        ([0, 1, 2, 3], [0, 3], [(0, False, [1]), (3, False, [2])]),
        ([1], [0, 1, 2], [(1, True, []), (1, False, []), (1, True, [])]),
    ],
)
def test_each_worker_resumes_its_own_state_or_one_that_nobody_else_has(
    saved: list[int], live: list[int], roles: list[Any]
) -> None:
    generation = Generation(1, [], dict.fromkeys(saved, ""))
    assert [role_of(generation, live, me) for me in live] == [Role(*role) for role in roles]


def test_shutdown_waits_for_what_was_handed_over(tmp_path: Path) -> None:
    def save(session: Session) -> None:
        mv.ArrayTableHandler(3, session=session)
        checkpoint = mv.checkpoint(tmp_path, session=session)
        wait_for(lambda: checkpoint.save({"a": 1}))

    together(save, 2)
    assert len(read_generations(open_store(tmp_path))[0].common) == 2


def test_what_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the slow one's worker waits for the leader, which gives up on those who have handed nothing over."""
    gave_up, write = threading.Event(), background_writer.write_part

    def slowly(store: Any, generation: Any, me: int, *part: Any) -> Any:
        assert me == 0 or gave_up.wait(20)
        return write(store, generation, me, *part)

    monkeypatch.setattr(background_writer, "write_part", slowly)
    monkeypatch.setattr(periodic, "_STUCK_SECONDS", 0.05)

    def save(session: Session) -> None:
        mv.ArrayTableHandler(3, session=session)
        checkpoint = mv.checkpoint(tmp_path, session=session)
        wait_for(lambda: checkpoint.save({"me": session.worker_id}))
        if session.worker_id == 0:
            told = threading.Thread(target=lambda: gave_up.set() if checkpoint._writer.giving_up.wait(20) else None)
            told.start()
            checkpoint.close()
            told.join()
        session.barrier()

    together(save, 2)
    assert [g.workers for g in read_generations(open_store(tmp_path))] == [[0, 1]]


def test_nobody_is_given_up_for_a_moment_or_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(session: Session) -> Any:
        mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, session=session) as checkpoint:
            said = []
            for kind, seconds in ((at.FOR_BARRIER, 1000.0), (at.FOR_LOCK, 0.0), (at.FOR_BARRIER, 0.0)):
                session.barrier()
                monkeypatch.setattr(periodic, "_STUCK_SECONDS", seconds)
                if session.worker_id == 1:
                    waits.begin_wait.compiled()(session.control.address, 1, kind, 0, 0, 0)
                    ready.set()
                    assert looked.wait(20)
                    looked.clear()
                    waits.finish_wait.compiled()(session.control.address, 1)
                else:
                    assert ready.wait(20)
                    ready.clear()
                    said.append(checkpoint._all_wait())
                    looked.set()
            monkeypatch.setattr(periodic, "_STUCK_SECONDS", 1.0)
            return said

    ready, looked = threading.Event(), threading.Event()
    assert together(work, 2)[0] == [False, False, True]


class Frozen:
    """A manager of a model that has frozen parameters, and nothing else."""

    def __init__(self) -> None:
        self.got: Any = None

    def collect_parts(self) -> Parts:
        return Parts({}, {"frozen": np.arange(9.0)})

    def check_parts(self, parts: Parts) -> None:
        pass

    def apply_parts(self, parts: Parts) -> None:
        self.got = parts.common["frozen"].tolist()

    def saved_tables(self) -> dict[str, Any]:
        return {}


def test_what_is_damaged_is_not_linked_to_as_if_it_were_whole(alone: Session, tmp_path: Path) -> None:
    manager = Frozen()
    with mv.checkpoint(tmp_path, manager, session=alone) as checkpoint:
        checkpoint.save()
        wait_for(lambda: not checkpoint.is_writing)
        (common,) = (tmp_path / "generation-1").glob("common-*")
        content = bytearray(common.read_bytes())
        content[-1] ^= 1
        common.write_bytes(content)
        checkpoint.save()
    assert len(list(tmp_path.glob("generation-*/common-*"))) == 2
    with (
        mv.checkpoint(tmp_path, manager, resume=True, session=alone) as checkpoint,
        pytest.raises(SnapshotError, match=r"generation-2/common-.* is damaged"),
    ):
        checkpoint.restore()
    assert manager.got is None


def test_a_store_that_fails_in_the_middle_of_the_manifest_loses_nothing(
    alone: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(store: Remote, name: str, content: bytes) -> None:
        store.write(f"{name}.new", content)
        store.write(name, content[:30])
        raise OSError("connection reset")

    table = mv.ArrayTableHandler(4, session=alone)
    with mv.checkpoint("memory://runs/b", keep=1, session=alone) as checkpoint:
        checkpoint.save({"value": 1})
        wait_for(lambda: not checkpoint.is_writing)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "replace", replace)
            table.set([2] * 4)
            checkpoint.save({"value": 2})
            wait_for(lambda: not checkpoint.is_writing)
        with pytest.raises(SnapshotError, match="connection reset"):
            checkpoint.step()
    table.set([9] * 4)
    with mv.checkpoint("memory://runs/b", resume=True, session=alone) as checkpoint:
        assert checkpoint.restore() == {"value": 2}
    assert table.get().tolist() == [2] * 4


def test_folders_of_others_are_not_taken_for_what_a_crash_has_left(alone: Session, tmp_path: Path) -> None:
    shared = SharedParams([np.zeros(3)], session=alone)
    theirs = tmp_path / "generation-7" / "genomes.npy"
    theirs.parent.mkdir()
    theirs.write_text("a week of evolution")
    for save in (lambda: mv.checkpoint(tmp_path, shared, session=alone), lambda: shared.save(tmp_path)):
        with pytest.raises(SnapshotError, match=r"generation-7 holds 'genomes\.npy'"):
            save()
        assert theirs.read_text() == "a week of evolution"
    theirs.rename(theirs.with_name("worker-0.json"))  # half of a first save
    shared.save(tmp_path)
    assert not theirs.parent.exists()


def test_ctrl_c_behind_the_manifest_does_not_take_the_save_away(
    alone: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedParams([np.zeros(3)], session=alone)
    shared.save(tmp_path, {"step": 1})
    write = generations.write_generations

    def interrupted(*arguments: Any) -> None:
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(generations, "write_generations", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shared.save(tmp_path, {"step": 2})
    assert shared.load(tmp_path) == {"step": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a small disk")
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("this container may not mount a small disk")

    def work(session: Session) -> Any:
        mv.ArrayTableHandler(3, session=session)
        with mv.checkpoint(tmp_path, session=session) as checkpoint:
            wait_for(lambda: checkpoint.save({"good": session.worker_id}))
            wait_for(lambda: (tmp_path / "manifest.json").exists())
            large = np.zeros(200_000 if session.worker_id == 1 else 1, np.uint8)
            if session.worker_id == 1:  # for the other's part there is room
                wait_for(lambda: (tmp_path / "generation-2" / "worker-0.json").exists())
            wait_for(lambda: checkpoint.save({"large": np.concatenate([large, large])}))
            return outcome(checkpoint.close)

    try:
        errors = together(work, 2)
        assert errors[0] is None
        assert "No space left on device" in str(errors[1])
        assert [g.number for g in read_generations(open_store(tmp_path))] == [1]
        said = capfd.readouterr().err
        assert "generation-2 is not kept: worker 1 could not write its part" in said
        assert (
            {"generation-1", "manifest.json"}
            <= {*os.listdir(tmp_path)}
            <= {*(".lock", "generation-1", "generation-2", "manifest.json")}
        )  # the other worker may have left before its part was removed
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("where", ["begin", "say", "write", "in the queue"])
def test_ctrl_c_at_the_hand_over_keeps_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Session, where: str
) -> None:
    """What was to be written next never came: `close` waited for it for the session's time."""
    checkpoint = mv.checkpoint(tmp_path, every=None, session=alone)
    checkpoint.save({"step": 1})
    wait_for(lambda: not checkpoint.is_writing)
    target: Any = checkpoint._board if where == "say" else checkpoint._writer
    name = "write" if where == "in the queue" else where
    real = getattr(target, name)
    calls: list[Any] = []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) > 1 or where in ("begin", "in the queue"):  # it has happened, and nobody knows so
            real(*arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(target, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"step": 2})
    wait_for(lambda: not checkpoint.is_writing)
    newest = read_generations(open_store(tmp_path))[-1].number
    assert newest == (2 if where == "in the queue" else 1), "whole or not at all"
    checkpoint.save({"step": 3})
    checkpoint.close()
    assert read_generations(open_store(tmp_path))[-1].number == 3
