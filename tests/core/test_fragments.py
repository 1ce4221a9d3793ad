"""Parameters in fragments that take turns: which is merged when, to which bits, and what is left at the end."""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import bits, outcome, together

import multiverso as mv
from multiverso.params import SharedParams
from multiverso.runtime import Session

SIZES = (5, 2, 4)  # 11 numbers: fragments of unequal sizes, with bounds inside of arrays
RULES = [None, mv.rules.model_averaging(), mv.rules.local_sgd(), mv.rules.easgd(0.3)]


def change(session: Session, step: int, size: int) -> Any:
    return np.random.default_rng((session.worker_id, step)).normal(size=size).astype(np.float32)


def train(session: Session, shared: SharedParams, steps: range) -> list[bytes]:
    seen = []
    for step in steps:
        moved, start = change(session, step, sum(SIZES)), 0
        for array in shared.arrays:
            array += moved[start : start + array.size]
            start += array.size
        shared.step()
        seen.append(bits(np.concatenate(shared.arrays)))
    return seen


def in_fragments(session: Session, rule: Any, fragments: int, every: int = 12) -> SharedParams:
    arrays = [np.zeros(size, np.float32) for size in SIZES]
    return SharedParams(arrays, every=every, fragments=fragments, rule=rule, session=session)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_each_fragment_has_the_bits_of_arrays_that_are_exchanged_at_its_steps(rule: Any, fragments: int) -> None:
    def work(session: Session) -> Any:
        return train(session, in_fragments(session, rule, fragments), range(40))

    def apart(session: Session) -> Any:
        parts = np.array_split(np.zeros(sum(SIZES), np.float32), fragments)
        shared = [mv.rules.share(part, rule, session=session) for part in parts]
        seen = []
        for step in range(40):
            moved = np.array_split(change(session, step, sum(SIZES)), fragments)
            for number, part in enumerate(parts):
                part += moved[number]
                if (step + 1) % 12 == (number + 1) * 12 // fragments % 12:
                    shared[number].exchange(part)
            seen.append(bits(np.concatenate(parts)))
        return seen

    seen = together(work, 3, sync=True)
    assert seen == together(apart, 3, sync=True)
    assert seen == together(work, 3, sync=True, quorum=2, grace_seconds=1000)


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"staleness": 2}], ids=str)
@pytest.mark.parametrize("stopped_at", [None, 3, 4])
def test_nothing_is_lost_at_the_end(
    options: dict[str, Any], stopped_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last step was stopped in its fragment's exchange, and with statistics, which the last one has."""

    def work(session: Session) -> Any:
        arrays = [np.zeros(7, np.float32), np.zeros(2)]
        shared = SharedParams(arrays, [np.zeros(2, np.float32)], every=2, fragments=2, session=session)
        for step in range(stopped_at or 9):
            for array in shared.arrays:
                array += 1
            shared.statistics[0][...] = step
            if step + 1 != stopped_at:
                shared.step()
        if stopped_at:  # before the second of the fragment's tables
            second = shared._packed.fragments[(stopped_at - 1) % 2][1].shared
            with monkeypatch.context() as patch:
                patch.setattr(second, "exchange", lambda *_, **__: (_ for _ in ()).throw(Stop))
                patch.setattr(second.ruled, "apply", lambda *_, **__: (_ for _ in ()).throw(Stop))
                with pytest.raises(Stop):
                    shared.step()
        shared.finish(shared.exchange)
        return [array.tolist() for array in [*shared.arrays, *shared.centre()[:2]]]

    steps = 2.0 * (stopped_at or 9)
    assert together(work, 2, **options) == [[[steps] * 7, [steps] * 2] * 2] * 2


class Stop(Exception):
    pass


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"sync": True}], ids=str)
def test_calls_that_are_stopped_between_tables_are_finished_by_the_next_ones(
    options: dict[str, Any], seed: int
) -> None:
    def work(session: Session, chance: float) -> Any:
        arrays = [np.zeros(7, np.float32), np.zeros(5)]
        shared = SharedParams(arrays, [np.zeros(2, np.float32)], every=3, fragments=3, session=session)
        calls, stops = random.Random(seed), random.Random(seed + 9 * session.worker_id)

        def stopping(exchange: Any) -> Any:
            def stop_or_exchange(*arguments: Any) -> None:
                if stops.random() < chance:
                    raise Stop
                exchange(*arguments)

            return stop_or_exchange

        for flat in shared._flats:
            flat.exchange = stopping(flat.exchange)  # type: ignore[method-assign]
        seen = []
        for number in range(40):
            for array in shared.arrays:
                array += 1 + number % 3
            call = calls.choice([shared.step, shared.step, shared.exchange, lambda: shared.finish(shared.exchange)])
            while outcome(call).__class__ is Stop and (options or stops.random() < 0.5):
                pass  # or another call is made next
            seen.append([array.tolist() for array in shared.arrays])
        while outcome(lambda: shared.finish(shared.exchange)).__class__ is Stop:
            pass
        return seen if options else None, [array.tolist() for array in shared.arrays]

    workers = 1 + bool(options)
    calm = together(lambda session: work(session, 0.0), workers, **options)
    assert together(lambda session: work(session, 0.4), workers, **options) == calm
    total = float(sum(1 + number % 3 for number in range(40)) * workers)
    assert calm[0][1] == [[total] * 7, [total] * 5]


def test_a_step_that_was_refused_leaves_the_next_call_whole() -> None:
    def work(session: Session) -> Any:
        shared = SharedParams([np.zeros(4, np.float32)], every=2, fragments=2, session=session)
        shared.sync([np.ones(4, np.float32)], whole=False)
        first = shared.centre()[0].tolist()
        refused = outcome(lambda: shared.sync([np.ones(3, np.float32)], whole=False))
        shared.sync([np.ones(4, np.float32)])
        return first, type(refused), shared.centre()[0].tolist()

    assert together(work, 1) == [([1.0, 1.0, 0.0, 0.0], mv.errors.ShapeMismatchError, [1.0] * 4)]


def test_workers_that_attach_by_name_with_other_fragments_are_told() -> None:
    def work(session: Session) -> Any:
        arrays = [np.zeros(8, np.float32)]
        open_as = partial(SharedParams, arrays, name="m", every=4, session=session)
        errors = [outcome(partial(open_as, fragments=fragments)) for fragments in (2, 1, 4)]
        return [type(error) for error in errors[1:]]

    assert together(work, 1) == [[mv.errors.TableMismatchError] * 2]


def test_a_turn_that_no_fragment_has_is_refused() -> None:
    def work(session: Session) -> Any:
        shared = in_fragments(session, None, 3)
        parts = shared.collect_parts()
        return [type(outcome(lambda: shared.check_parts(wrong(parts, turn)))) for turn in (3, -1, "0", None)]  # noqa: B023

    def wrong(parts: Any, turn: Any) -> Any:
        parts.own["turn"] = turn
        return parts

    assert together(work, 1) == [[mv.errors.SnapshotError] * 4]


def test_a_run_continues_with_the_fragment_whose_turn_it_was(tmp_path: Path) -> None:
    def work(session: Session) -> Any:
        shared = in_fragments(session, mv.rules.local_sgd(), 3, 6)
        train(session, shared, range(9))  # in the middle of the second turn of the second fragment
        shared.save(tmp_path)
        expected = train(session, shared, range(9, 20))
        shared.load(tmp_path)
        return train(session, shared, range(9, 20)) == expected

    assert together(work, 2, sync=True) == [True] * 2


def test_more_fragments_than_numbers_and_turns_by_time() -> None:
    def work(session: Session) -> Any:
        shared = SharedParams([np.zeros(2)], every=timedelta(microseconds=5), fragments=5, session=session)
        for _ in range(10):
            shared.arrays[0] += 1
            shared.step()
        shared.finish(shared.exchange)
        return shared.arrays[0].tolist()

    assert together(work, 2) == [[20.0] * 2] * 2


@pytest.mark.parametrize(
    ("every", "fragments", "words"), [(10, 3, "every=10 is no multiple of 3"), (10, 0, "fragments")]
)
def test_fragments_that_make_no_sense_are_refused(every: int, fragments: int, words: str) -> None:
    def work(session: Session) -> Any:
        return outcome(lambda: in_fragments(session, None, fragments, every))

    (error,) = together(work, 1)
    assert isinstance(error, ValueError)
    assert words in str(error)
