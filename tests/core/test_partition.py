"""How a table is cut: laws of the arithmetic, for every size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverso.errors import DtypeMismatchError, ShapeMismatchError, StartupError
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.spec.modes import MODES, chosen_mode
from multiverso.spec.table import DTYPES, Partition, Places, TableSpec, checked_count, checked_dtype

sizes = st.one_of(st.integers(1, 200_000), st.integers(1, 10**9))
arrays = st.builds(
    lambda n, dtype, states: TableSpec("array", 1, n, dtype=dtype, states=states),
    sizes,
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
matrices = st.builds(
    lambda r, c, dtype, states: TableSpec("matrix", r, c, dtype=dtype, states=states),
    st.integers(1, 10**5),
    st.integers(1, 10**5),
    st.sampled_from(DTYPES),
    st.integers(0, 3),
)
specs = st.one_of(arrays, matrices)


@given(specs)
def test_stripes_cover_every_element_once(spec: TableSpec) -> None:
    part = Partition.of(spec)
    assert part.stripe_size >= 1
    assert (part.stripe_count - 1) * part.stripe_size < spec.elements <= part.stripe_count * part.stripe_size


@given(specs)
def test_a_row_is_never_cut_and_a_stripe_is_as_large_as_may_be(spec: TableSpec) -> None:
    """128 KiB of an array; of a matrix as many rows, a power of two, as 8 KiB hold."""
    part = Partition.of(spec)
    if spec.kind == "array":
        assert part.stripe_size * spec.itemsize == at.STRIPE_BYTES
    else:
        rows, row = part.stripe_size // spec.columns, spec.columns * spec.itemsize
        assert part.stripe_size % spec.columns == 0
        assert rows == 1 << part.shift
        assert rows * row <= max(at.BLOCK_BYTES, row)
        assert 2 * rows * row > at.BLOCK_BYTES
    assert (part.stripe_count - 1) * part.stripe_size < spec.elements <= part.stripe_count * part.stripe_size


@given(specs, st.integers(1, at.MAX_WORKERS), st.booleans())
def test_the_parts_of_a_table_do_not_overlap(spec: TableSpec, workers: int, synchronous: bool) -> None:
    places = Places.of(spec, WorkerIndex(workers), synchronous)
    whole = spec.elements * spec.itemsize
    parts = [(0, at.TABLE_HEADER), (places.lines, (workers + 1) * at.LINE_STRIDE)]
    if not synchronous:
        part = Partition.of(spec)
        undo_slots = at.UNDO_SLOTS_EACH * (workers + 1) * part.undo_bytes(len(spec.state_names))
        parts += [(places.words, part.stripe_count << at.WORD_SPACING), (places.undo_slots, undo_slots)]
    parts += [(buffer, whole) for buffer in sorted(set(places.buffers))]
    if spec.state_names:
        parts += [(state, whole * len(spec.state_names)) for state in sorted(set(places.states))]
    if synchronous:
        parts.append((places.slots, workers * places.slot_stride))
        assert places.slot_stride >= whole
        assert places.slot_stride % at.CACHE_LINE == 0
        assert len(set(places.buffers)) == 2
    parts.sort()
    for (start, size), (following, _) in pairwise(parts):
        assert start + size <= following
        assert following % at.CACHE_LINE == 0
    last, size = parts[-1]
    assert last + size <= places.size


@given(specs)
def test_a_spec_goes_through_a_message_unchanged(spec: TableSpec) -> None:
    import json

    assert TableSpec.from_message(json.loads(json.dumps(spec.as_message()))) == spec


def test_a_spec_in_words() -> None:
    assert str(TableSpec("matrix", 3, 4, name="w")) == (
        "matrix of 3 x 4 float32 named 'w' (updater add, initial master)"
    )


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", None, True, [3]])
def test_a_size_is_an_integer_of_at_least_1(value: object) -> None:
    with pytest.raises(ShapeMismatchError, match="rows must be an integer of at least 1"):
        checked_count(value, "rows")


@pytest.mark.parametrize("value", ["float16", "complex64", "uint8", "str", "no such", object()])
def test_other_dtypes_are_refused(value: object) -> None:
    with pytest.raises(DtypeMismatchError, match="a table's dtype is one of float32, float64, int32, int64"):
        checked_dtype(value)


def test_sync_and_staleness_exclude_each_other() -> None:
    assert chosen_mode(False, None) == (MODES["async"], 0)
    assert chosen_mode(True, None) == (MODES["sync"], 0)
    assert chosen_mode(False, 0) == (MODES["bounded"], 0)
    with pytest.raises(StartupError, match="exclude each other"):
        chosen_mode(True, 1)
    with pytest.raises(StartupError, match="sync is True or False"):
        chosen_mode("no", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 1.5, True, "2"])
def test_a_staleness_is_a_number_of_ticks(value: object) -> None:
    with pytest.raises(StartupError, match="0 or more"):
        chosen_mode(False, value)  # type: ignore[arg-type]
