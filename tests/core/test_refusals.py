"""Bad input is refused with a clear message before anything is changed (in every mode)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from core_support import MODES, bits

import multiverso as mv
from multiverso.errors import DtypeMismatchError, MultiversoError, RowIdError, ShapeMismatchError, StartupError
from multiverso.runtime import Node, Session


@dataclass
class Tables:
    session: Session
    array: mv.ArrayTableHandler
    matrix: mv.MatrixTableHandler
    whole: mv.ArrayTableHandler  # of integers


@pytest.fixture(scope="module", params=MODES)
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    with Node(1) as node, Session(node.address, timeout_seconds=30, **MODES[request.param]) as session:
        yield Tables(
            session,
            mv.ArrayTableHandler(6, [1, 2, 3, 4, 5, 6], session=session),
            mv.MatrixTableHandler(3, 2, np.arange(6), session=session),
            mv.ArrayTableHandler(6, 7, dtype="int32", session=session),
        )


Call = Callable[[Tables], Any]
float16_max = float(np.finfo("f2").max)

SHAPES: dict[str, tuple[Call, str]] = {
    "too few": (lambda t: t.array.add(np.zeros(5)), r"shape \(5,\).*expects shape \(6,\)"),
    "too many": (lambda t: t.array.add([0] * 7), r"\(7,\)"),
    "nothing": (lambda t: t.array.add([]), r"\(0,\)"),
    "ragged": (lambda t: t.array.add([[1, 2], [3]]), "data"),
    "transposed": (lambda t: t.matrix.add(np.zeros((2, 3))), r"\(2, 3\).*\(3, 2\)"),
    "wrong matrix": (lambda t: t.matrix.add(np.zeros((6, 1))), r"\(6, 1\)"),
    "flat, too few": (lambda t: t.matrix.add(np.zeros(5)), r"\(5,\)"),
    "no data": (lambda t: t.matrix.add(None, row_ids=[0]), "needs data"),
    "a row too few": (lambda t: t.matrix.add([[1, 1]], row_ids=[0, 1]), r"\(1, 2\).*\(2, 2\)"),
    "transposed rows": (lambda t: t.matrix.add(np.zeros((2, 1)), row_ids=[0]), r"\(2, 1\)"),
    "out of another size": (lambda t: t.array.get(out=np.zeros(7, "f4")), r"\(7,\)"),
    "matrix out transposed": (lambda t: t.matrix.get(out=np.zeros((2, 3), "f4")), r"\(2, 3\)"),
    "rows out of another size": (lambda t: t.matrix.get([0], out=np.zeros((2, 2), "f4")), r"\(2, 2\)"),
    "out not contiguous": (lambda t: t.array.get(out=np.zeros(12, "f4")[::2]), "contiguous"),
    "snapshot out": (lambda t: t.array.snapshot(out=np.zeros(3, "f4")), r"\(3,\)"),
    "local of another size": (
        lambda t: t.array.exchange(np.zeros(5, "f4"), np.zeros(6, "f4")),
        "local has 5 numbers; the table has 6",
    ),
    "last of another size": (lambda t: t.array.exchange(np.zeros(6, "f4"), np.zeros(5, "f4")), "last has 5"),
    "local not contiguous": (lambda t: t.array.exchange(np.zeros(12, "f4")[::2], np.zeros(6, "f4")), "C-contiguous"),
    "local is last": (lambda t: t.array.exchange(*[np.zeros(6, "f4")] * 2), "share memory"),
    "local overlaps last": (lambda t: t.array.exchange(*overlapping()), "share memory"),
}

DTYPES: dict[str, tuple[Call, str]] = {
    "float into int": (lambda t: t.whole.add([0.5] * 6), "float64, the table is int32: round it yourself"),
    "whole floats into int": (lambda t: t.whole.add(np.ones(6, "f4")), "float32, the table is int32"),
    "complex": (lambda t: t.array.add([1j] * 6), "complex128.*only real numbers"),
    "strings": (lambda t: t.array.add(["1"] * 6), "only real numbers"),
    "bytes": (lambda t: t.array.add([b"1"] * 6), "only real numbers"),
    "objects": (lambda t: t.array.add([None] * 6), "only real numbers"),
    "dates": (lambda t: t.array.add(np.zeros(6, "M8[s]")), "only real numbers"),
    "too large for float32": (lambda t: t.array.add([0, 0, 0, 0, 0, 1e300]), "1e\\+300.*too large"),
    "too small for float32": (lambda t: t.array.add([0, 0, 0, 0, 0, -1e300]), "-1e\\+300.*too large"),
    "too large for int32": (lambda t: t.whole.add([0, 0, 0, 0, 0, 2**31]), f"{2**31}, too large"),
    "too small for int32": (lambda t: t.whole.add([0, 0, 0, 0, 0, -(2**31) - 1]), "too large"),
    "uint64 for int32": (lambda t: t.whole.add(np.full(6, 2**63, "u8")), f"{2**63}, too large"),
    "beyond any integer": (lambda t: t.whole.add([2**70] * 6), "only real numbers"),
    "row data": (lambda t: t.matrix.add([[1j, 0]], row_ids=[0]), "only real numbers"),
    "out of another dtype": (lambda t: t.array.get(out=np.zeros(6)), "must have the table's dtype float32"),
    "out read-only": (lambda t: t.array.get(out=read_only(np.zeros(6, "f4"))), "read-only"),
    "16-bit out read-only": (lambda t: t.array.get(out=read_only(np.zeros(6, "f2"))), "read-only"),
    "out is a list": (lambda t: t.array.get(out=[0] * 6), "NumPy array or a torch tensor; got list"),
    "16-bit out of integers": (lambda t: t.whole.get(out=np.zeros(6, "f2")), "int32"),
    "get of another dtype": (lambda t: t.array.get(dtype="float64"), "float16 or bfloat16"),
    "local of another dtype": (lambda t: t.array.exchange(np.zeros(6), np.zeros(6)), "dtype float32"),
    "local read-only": (
        lambda t: t.array.exchange(read_only(np.zeros(6, "f4")), np.zeros(6, "f4")),
        "local is written to, but it is read-only",
    ),
    "local is a list": (lambda t: t.array.exchange([0] * 6, [0] * 6), "must be a NumPy array"),
}

ROWS: dict[str, tuple[Any, str]] = {
    "past the end": ([0, 3], r"row id 3 \(at position 1\) is not in 0 .. 2; nothing was changed"),
    "negative": ([-1], r"row id -1"),
    "far negative": ([-(2**63)], "row id -9223372036854775808"),
    "uint64": (np.array([2**63], "u8"), "row id 9223372036854775808 is not in 0 .. 2"),
    "beyond any integer": ([2**70], "integers"),
    "floats": ([0.0, 1.0], "integers; got float64"),
    "booleans": ([True, False, True], "integers; got bool"),
    "strings": (["0"], "integers"),
    "two dimensions": ([[0], [1]], r"one-dimensional.*shape \(2, 1\)"),
    "one number": (1, "one-dimensional"),
    "an array for out": (np.zeros((3, 2), "f4"), r"got float32 of shape \(3, 2\); .* by name, out="),
    "ragged": ([[0], [1, 2]], "one-dimensional"),
    "None inside": ([0, None], "integers"),
}


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def overlapping() -> tuple[Any, Any]:
    memory = np.zeros(10, "f4")
    return memory[:6], memory[4:]


def refused(tables: Tables, call: Callable[[], Any], error: type[MultiversoError], message: str) -> None:
    """The call is refused, and neither values nor version nor a pending round have changed."""
    every = (tables.array, tables.matrix, tables.whole)
    before = [(bits(t.snapshot()), t.version) for t in every]
    with pytest.raises(error, match=f"(?s){message}"):
        call()
    assert [(bits(t.snapshot()), t.version) for t in every] == before
    for t in every:  # in synchronous mode a read would commit what was staged
        values = t.snapshot()
        np.testing.assert_array_equal(t.get(), values)


@pytest.mark.parametrize("case", SHAPES)
def test_wrong_shapes(tables: Tables, case: str) -> None:
    call, message = SHAPES[case]
    refused(tables, lambda: call(tables), ShapeMismatchError, message)


@pytest.mark.parametrize("case", DTYPES)
def test_wrong_kinds_of_data(tables: Tables, case: str) -> None:
    call, message = DTYPES[case]
    refused(tables, lambda: call(tables), DtypeMismatchError, message)


@pytest.mark.parametrize("case", ROWS)
def test_wrong_rows(tables: Tables, case: str) -> None:
    ids, message = ROWS[case]
    number = len(ids) if isinstance(ids, list | np.ndarray) else 1
    refused(tables, lambda: tables.matrix.add(np.ones((number, 2)), row_ids=ids), RowIdError, message)
    refused(tables, lambda: tables.matrix.get(row_ids=ids), RowIdError, message)


def test_refusals_are_also_the_errors_that_python_would_raise(tables: Tables) -> None:
    with pytest.raises(ValueError, match="shape"):
        tables.array.add([1])
    with pytest.raises(TypeError, match="complex"):
        tables.array.add([1j] * 6)
    with pytest.raises(IndexError, match="row id 7"):
        tables.matrix.get([7])


def test_an_array_with_nan_or_infinity_is_accepted(tables: Tables) -> None:
    table = tables.array
    before = table.snapshot()
    table.add(np.array([np.nan, np.inf, -np.inf, 0, 0, 0]))
    after = table.get()
    assert np.isnan(after[0])
    assert list(after[1:3]) == [np.inf, -np.inf]
    table.set(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: mv.ArrayTableHandler(0, session=s),
        lambda s: mv.ArrayTableHandler(-3, session=s),
        lambda s: mv.ArrayTableHandler(2.5, session=s),
        lambda s: mv.ArrayTableHandler("4", session=s),
        lambda s: mv.MatrixTableHandler(0, 3, session=s),
        lambda s: mv.MatrixTableHandler(3, 0, session=s),
        lambda s: mv.ArrayTableHandler(3, [1, 2], session=s),
        lambda s: mv.MatrixTableHandler(3, 2, np.zeros((2, 3)), session=s),
        lambda s: mv.ArrayTableHandler(3, dtype="float16", session=s),
        lambda s: mv.ArrayTableHandler(3, dtype=None, session=s),
        lambda s: mv.ArrayTableHandler(3, [0.5] * 3, dtype="int64", session=s),
        lambda s: mv.ArrayTableHandler(3, ["a", "b", "c"], session=s),
        lambda s: mv.ArrayTableHandler(3, updater="no such", session=s),
        lambda s: mv.ArrayTableHandler(3, initial="median", session=s),
        lambda s: mv.ArrayTableHandler(3, name="", session=s),
        lambda s: mv.ArrayTableHandler(3, name=1, session=s),
        lambda s: mv.ArrayTableHandler(3, name=b"x", session=s),
        lambda s: mv.MatrixTableHandler(3, 2, name=["a"], session=s),
        lambda s: mv.Counter("", session=s),
        lambda s: mv.Counter(1, session=s),
        lambda s: mv.attach_read_only("a", 1.5),
        lambda s: mv.attach_read_only("a", timeout_seconds="1"),
    ],
)
def test_a_table_that_cannot_be_is_refused_and_the_order_does_not_advance(
    alone: Session, make: Callable[[Session], Any]
) -> None:
    with pytest.raises(ValueError):
        make(alone)
    assert mv.ArrayTableHandler(3, session=alone).number == 1
    assert alone.control.worker(0).created == 1


def test_an_updater_whose_factors_an_integer_table_cannot_hold_is_refused(tables: Tables) -> None:
    """They would be zero, and every add would be lost."""
    with pytest.raises(DtypeMismatchError, match=r"nesterov computes with \(0.7, 0.9\), which int64 cannot hold"):
        mv.ArrayTableHandler(4, dtype="int64", updater="nesterov", session=tables.session)


@pytest.mark.parametrize(
    ("updater", "told"),
    [
        (mv.updaters.adagrad(epsilon=1e-50), "1e-50, which is 0.0 in float32"),
        (mv.updaters.rmsprop(1e39), r"1e\+39, which is inf in float32"),
        (mv.updaters.adagrad(initial=1e300), r"1e\+300, which is inf in float32"),
        (mv.updaters.chain(mv.updaters.weight_decay(1e-60), mv.updaters.sgd()), "1e-60, which is 0.0 in float32"),
    ],
)
def test_numbers_that_are_others_in_the_tables_dtype_are_refused(
    alone: Session, updater: mv.updaters.Updater, told: str
) -> None:
    """An epsilon that is 0 in float32 gave NaN wherever a gradient was 0."""
    for make in (mv.ArrayTableHandler, mv.KeyedTable):
        with pytest.raises(DtypeMismatchError, match=f"computes with {told}: use a float64 table or another number"):
            make(3, updater=updater, session=alone)
        make(3, updater=updater, dtype="float64", session=alone)


def test_a_rules_numbers_are_refused_too(alone: Session) -> None:
    with pytest.raises(DtypeMismatchError, match=r"the rule dcasgd computes with 4e\+48, which is inf in float32"):
        mv.rules.share(np.zeros(3, np.float32), mv.rules.dcasgd(1e-50), session=alone)
    assert alone.control.worker(0).created == 0


def test_keyed_tables_of_integers_refuse_fractions_as_others_do(alone: Session) -> None:
    """Their rates were 0, and every add was lost."""
    for dtype in ("int32", "int64"):
        with pytest.raises(DtypeMismatchError, match=rf"nesterov computes with \(0.7, 0.9\), which {dtype} cannot"):
            mv.KeyedTable(2, dtype=dtype, updater="nesterov", session=alone)


@pytest.mark.parametrize(
    ("initial", "dtype"),
    [(1e10, "int32"), (2**53 + 1, "int64"), (2**63, "int64"), (1e39, "float32"), (("normal", 1e39), "float32")],
)
def test_an_initial_number_that_the_dtype_cannot_hold_is_refused(alone: Session, initial: Any, dtype: str) -> None:
    """1e10 was -2147483648 in a table of int32."""
    with pytest.raises(ValueError, match=rf"the rows of a table of {dtype} begin with .* can hold; got"):
        mv.KeyedTable(2, dtype=dtype, initial=initial, session=alone)


def test_what_numpy_also_calls_an_array(alone: Session) -> None:
    """A masked element is no number, and a np.matrix is its array."""
    table = mv.ArrayTableHandler(4, session=alone)
    with pytest.raises(DtypeMismatchError, match=r"data has masked elements.*filled\(0\)"):
        table.add(np.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 0]))
    table.add(np.ma.array([1, 2, 3, 4]))
    table.add(np.array([[1, 2], [3, 4]], "f4").view(np.matrix))
    assert table.get().tolist() == [2, 4, 6, 8]


@pytest.mark.parametrize("updater", [[], {}, None, 3, "nothing"])
def test_no_updater(alone: Session, updater: Any) -> None:
    with pytest.raises(ValueError, match="no updater is called"):
        mv.ArrayTableHandler(4, updater=updater, session=alone)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (mv.updaters.adam, "called adam, the function itself .call it."),
        ("delayed_nesterov", r"no default: multiverso.updaters.delayed_nesterov\("),
        (mv.rules.easgd(0.1), "called 'easgd', a rule .which rule= of a manager takes"),
    ],
)
def test_what_is_nearly_an_updater_is_told_what_it_is(alone: Session, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mv.ArrayTableHandler(4, updater=given, session=alone)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (mv.rules.dcasgd, "the function dcasgd itself: call it"),
        ("dcasgd", r"'dcasgd' has no default: multiverso.rules.dcasgd\(rate\)"),
        (mv.updaters.adam(), "the updater 'adam', which updater= of a table takes"),
    ],
)
def test_what_is_nearly_a_rule_is_told_what_it_is(alone: Session, given: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        mv.rules.share(np.zeros(3, "f4"), given, session=alone)


def test_what_has_no_values_of_its_own_is_no_array(alone: Session) -> None:
    """NumPy made an array of one object of it."""
    table = mv.ArrayTableHandler(4, session=alone)
    for given in (table.get_async(), mv.KeyedTable(2, session=alone), mv.Counter("number", session=alone)):
        with pytest.raises(TypeError, match="is no array"):
            np.asarray(given)
    with pytest.raises(ShapeMismatchError, match=r"pending\.wait\(\)"):
        table.add(table.get_async())


def test_delay_compensation_is_no_updater_and_says_what_to_do(alone: Session) -> None:
    with pytest.raises(ValueError, match=r"rules\.dcasgd_adaptive\(rate\).*read them again before the push"):
        mv.KeyedTable(4, updater="dcasgd_adaptive", session=alone)


def test_a_bound_that_no_clock_can_hold() -> None:
    from multiverso.spec.modes import chosen_mode

    with pytest.raises(StartupError, match=r"below 2.*for no bound leave it out"):
        chosen_mode(False, 10**30)


def test_statistics_tell_an_unnamed_table_from_one_named_like_its_number(alone: Session) -> None:
    mv.ArrayTableHandler(2, session=alone).add([1, 1])
    mv.ArrayTableHandler(2, name="1", session=alone)
    tables = alone.statistics()["tables"]
    assert (tables[1]["adds"], tables["1"]["adds"]) == (1, 0)


def test_a_table_that_is_too_large_or_named_too_long_is_refused_in_words(tables: Tables) -> None:
    """The node said that it could not read the request, and showed it."""
    session = tables.session
    with pytest.raises(ShapeMismatchError, match="at most 281,474,976,710,656 elements; got 1 x 4611686018427387904"):
        mv.ArrayTableHandler(2**62, session=session)
    for make in (mv.ArrayTableHandler, mv.KeyedTable):
        if make is mv.ArrayTableHandler or not session.consistency.in_rounds:
            with pytest.raises(ValueError, match="at most 2000 characters; got 3000"):
                make(3, name="x" * 3000, session=session)


NUMBERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "adagrad": (mv.updaters.adagrad, "a learning rate is above 0"),
    "easgd": (mv.rules.easgd, "alpha is a moving rate, above 0"),
    "clip": (lambda value: mv.updaters.clip(norm=value), "a bound is above 0"),
    "decay": (mv.updaters.weight_decay, "above 0"),
    "momentum": (lambda value: mv.updaters.momentum(momentum=value), "from 0 to less than 1"),
    "delayed nesterov": (lambda value: mv.updaters.delayed_nesterov(workers=value), "workers is a whole number"),
    "schedule": (lambda value: mv.updaters.cosine(0.1, value), "steps is a whole number"),
    "rule": (lambda value: mv.rules.downpour(push=value), "push_every is a whole number"),
    "eviction": (lambda value: mv.Eviction(idle_ticks=value), "idle_ticks is a whole number, from 1 to"),
    "norm of eviction": (lambda value: mv.Eviction(least_norm=value), "least_norm is above 0"),
    "keys": (lambda value: mv.keys(["a"], seed=value), "seed is a whole number"),
}


@pytest.mark.parametrize("value", ["a", [], True, float("nan"), -1], ids=repr)
@pytest.mark.parametrize("taker", NUMBERS)
def test_what_is_no_number_of_the_kind_is_refused_in_a_sentence(taker: str, value: Any) -> None:
    take, said = NUMBERS[taker]
    with pytest.raises(ValueError, match=said):
        take(value)
