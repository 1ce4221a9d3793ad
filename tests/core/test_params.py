"""Parameter managers of no framework: what a user is told, and calls that were interrupted more than once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from core_support import together

import multiverso as mv
from multiverso.params import SharedParams
from multiverso.runtime import Session

STEPS = {
    "nothing": lambda shared: None,
    "exchange": lambda shared: shared.exchange(),
    "step": lambda shared: shared.step(),
    "sync": lambda shared: shared.sync(shared.values()),
    "centre": lambda shared: shared.centre(),
}


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_manager_that_never_exchanged_says_so_at_the_end(
    what: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(session: Session) -> None:
        STEPS[what](SharedParams([np.zeros(3, np.float32)], session=session))

    together(work, workers)
    told = capfd.readouterr().err.splitlines()
    expected = workers if what == "nothing" and workers > 1 else 0
    assert len([line for line in told if "never exchanged" in line]) == expected


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "options", [{"every": 3}, {"rule": mv.rules.downpour(push=10, fetch=10)}, {}], ids=["every", "rule", "each"]
)
def test_a_finished_manager_has_what_all_have_learned(options: dict[str, Any], sync: bool) -> None:
    """Whatever is pending: of `every`, of a rule's intervals, of rows."""

    def work(session: Session) -> Any:
        arrays, matrix = [np.zeros(3, np.float32)], np.zeros((8, 2), np.float32)
        shared = SharedParams(arrays, matrices=[matrix], session=session, **options)
        for step in range(25):
            shared.arrays[0] += 1
            if (rows := shared.by_rows[0]) is not None:
                rows.read(np.array([step % 4]), touch=True)
            shared.matrices[0][step % 4] += 1
            shared.step()
            if session.worker_id == 1 and not sync:
                time.sleep(0.001)
        shared.finish(shared.exchange)
        return shared.arrays[0].tolist(), shared.matrices[0].sum()

    assert together(work, 2, sync=sync) == [([50.0] * 3, 100.0)] * 2


def test_training_that_continues_after_a_finish_that_raised_is_finished_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(session: Session) -> Any:
        shared = SharedParams([np.zeros(3, np.float32)], every=4, session=session)
        shared.arrays[0] += 1
        barrier = session.barrier
        monkeypatch.setattr(session, "barrier", lambda: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            shared.finish(shared.exchange)
        monkeypatch.setattr(session, "barrier", barrier)
        shared.arrays[0] += 1
        shared.step()
        assert shared.ending == 0
        shared.finish(shared.exchange)
        return shared.arrays[0].tolist()

    assert together(work, 2) == [[4.0] * 3] * 2


class Stop(Exception):
    pass


def test_what_was_learned_between_two_interruptions_and_the_repetition_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is interrupted, and so is the copying of what it had taken."""

    def work(session: Session) -> Any:
        shared = SharedParams([np.zeros(3, np.float32)], session=session)
        values = shared.values()
        values[0] = values[0] + 1
        exchange, array = shared._exchange, np.array

        def stop(*args: Any) -> Any:
            raise Stop

        monkeypatch.setattr(shared, "_exchange", stop)
        monkeypatch.setattr(np, "array", stop)
        with pytest.raises(Stop):
            shared.sync(values)
        monkeypatch.setattr(shared, "_exchange", exchange)
        monkeypatch.setattr(np, "array", array)
        return shared.sync([values[0] + 10])[0].tolist()  # training went on, in new arrays

    assert together(work, 1) == [[11.0] * 3]
