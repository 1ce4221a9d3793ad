"""A mean over those who came to a round, weighted by their minibatches or tokens, on one host and on several."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from core_support import bits, outcome, together, wait_for
from rehearsing import rehearsal

import multiverso as mv
from multiverso.errors import InterruptedRoundError, NotInThisJobError
from multiverso.runtime import Session

MODES: list[dict[str, Any]] = [{}, {"quorum": 3}]


def rounds(session: Session, later: bool = False) -> list[bytes]:
    """With a weight, with two, with one beside none, with none, and with nothing added."""
    me = session.worker_id
    drawn = np.random.default_rng(me)
    table = mv.ArrayTableHandler(140_000, updater="mean", session=session)
    matrix = mv.MatrixTableHandler(4, 3, updater="mean", session=session)
    seen = []
    for weights in ([me + 1], [3, 2 * me + 1], [5, None], [None], []):
        for weight in weights:
            add, add_rows = (table.add_async, matrix.add_async) if later else (table.add, matrix.add)
            add(drawn.standard_normal(table.size).astype("f4"), weight=weight)
            add_rows(drawn.standard_normal((2, 3)), row_ids=[3, me], weight=weight)
        seen += [bits(table.get()), bits(matrix.get())]
    session.barrier()
    return seen


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_bits_are_those_of_the_formula_everywhere(options: dict[str, Any]) -> None:
    each = [np.random.default_rng(me) for me in range(3)]
    value, expected = np.zeros(140_000, "f4"), []
    for weights in (lambda me: [me + 1], lambda me: [3, 2 * me + 1], lambda me: [5, 1], lambda me: [1]):
        total, count = np.zeros_like(value), 0
        for me, drawn in enumerate(each):
            slot = np.zeros_like(value)
            for weight in weights(me):
                slot = slot + drawn.standard_normal(value.size).astype("f4") * np.float32(weight)
                drawn.standard_normal((2, 3))
            total, count = total + slot, count + sum(weights(me))
        value = value + total / np.float32(count)
        expected.append(bits(value))
    alone = together(rounds, 3, sync=True, **options)
    assert alone[0][::2] == [*expected, expected[-1]]
    assert alone[1:] == alone[:1] * 2
    assert together(partial(rounds, later=True), 3, sync=True, **options) == alone
    for hosts in ((1, 1, 1), (2, 1)):
        with rehearsal(*hosts) as job:
            assert job.run(rounds, sync=True, **options) == alone


def test_who_is_late_brings_its_weight_to_the_next_round() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, updater="mean", session=session)
        if session.worker_id == 1:
            wait_for(lambda: table.version)
        table.add([8.0], weight=1 + 2 * session.worker_id)
        table.get()
        if session.worker_id == 0:
            table.add([4.0])
            table.get()
        session.barrier()
        return table.snapshot()[0]

    results = together(work, 2, sync=True, quorum=1, grace_seconds=0)
    assert results[0] in (8 + (4 + 24) / 4, 8 + 4 + 8.0), "together or one after another"
    assert results[1] == results[0]


@pytest.mark.parametrize("options", [{}, {"sync": True}], ids=str)
def test_a_weight_where_there_is_no_mean_of_a_round_is_refused(options: dict[str, Any]) -> None:
    def work(session: Session) -> list[Any]:
        matrix = mv.MatrixTableHandler(1, 1, session=session)
        mean = mv.ArrayTableHandler(1, updater="mean", session=session)
        total = mv.ArrayTableHandler(1, session=session)
        assert isinstance(outcome(lambda: total.add_async([1.0], weight=2)), NotInThisJobError)
        assert isinstance(outcome(lambda: matrix.add_async([1.0], [0], weight=2)), NotInThisJobError)
        errors = [outcome(lambda: total.add([1.0], weight=2))]
        errors += [outcome(lambda w=w: mean.add([1.0], weight=w)) for w in (2, 0, 1.5, 1 << 25)]  # type: ignore[misc]
        if options:
            errors.append(outcome(mean._unread))
            mean.get()
        return errors

    total, good, *bad = together(work, 1, **options)[0]
    assert isinstance(total, NotInThisJobError)
    if options:
        assert good is None
        assert isinstance(bad.pop(), InterruptedRoundError)
        assert all(isinstance(error, ValueError) for error in bad)
    else:
        assert all(isinstance(error, NotInThisJobError) for error in (good, *bad))
