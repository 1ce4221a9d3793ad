"""What kernels take as it is, compiled and not: exactly what NumPy says of the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multiverso.kernels.plain_arrays import are_plain_rows, is_plain

F4, I8 = np.dtype("f4"), np.dtype("i8")
FLAT = np.arange(12, dtype=F4)
MATRIX = FLAT.reshape(3, 4)
IDS = np.arange(3)


def read_only(array: np.ndarray) -> np.ndarray:
    other = array.copy()
    other.flags.writeable = False
    return other


def both(kernel: Any, *arguments: Any, things: tuple[Any, ...]) -> bool:
    """Uncompiled, a kernel gets the addresses that compiled code gets by itself."""
    compiled, plain = kernel.compiled()(*arguments, *things), kernel(*arguments, *map(id, things))
    assert compiled == plain
    return bool(compiled)


@pytest.mark.parametrize("array", [FLAT, FLAT.copy(), FLAT[:12], np.asarray(FLAT)])
def test_flat_arrays_that_are_plain(array: Any) -> None:
    assert both(is_plain, id(np.ndarray), id(F4), 12, things=(array,))


@pytest.mark.parametrize(
    "array",
    [
        FLAT[1:],
        MATRIX,
        np.zeros(24, "f4")[::2],
        np.zeros(12, "f8"),
        np.zeros(12, ">f4"),
        np.frombuffer(bytearray(49), "f4", 12, 1),
        read_only(FLAT),
        np.ma.zeros(12, "f4"),
        np.float32(1),
        np.array(1, "f4"),
        list(range(12)),
        None,
        12,
    ],
    ids=repr,
)
def test_flat_arrays_that_are_not(array: Any) -> None:
    assert not both(is_plain, id(np.ndarray), id(F4), 12, things=(array,))


@pytest.mark.parametrize("ids, rows", [(IDS, MATRIX), (IDS[:1], MATRIX[2:]), (IDS[:0], MATRIX[:0])])
def test_rows_that_are_plain(ids: Any, rows: Any) -> None:
    assert both(are_plain_rows, id(np.ndarray), id(F4), id(I8), 4, things=(ids, rows))


@pytest.mark.parametrize(
    "ids, rows",
    [
        (IDS, FLAT),
        (IDS, MATRIX[:2]),
        (np.arange(4), MATRIX.T.copy()),
        (np.arange(4), MATRIX.T),
        (IDS[:0], np.zeros((0, 3), "f4")),
        (IDS, MATRIX.astype("f8")),
        (IDS, read_only(MATRIX)),
        (read_only(IDS), MATRIX),
        (IDS.astype("i4"), MATRIX),
        (IDS.reshape(3, 1), MATRIX),
        (np.arange(6)[::2], MATRIX),
        ([0, 1, 2], MATRIX),
        (IDS, MATRIX.tolist()),
        (IDS, np.ma.masked_array(MATRIX)),
        (None, MATRIX),
        (IDS, None),
    ],
    ids=repr,
)
def test_rows_that_are_not(ids: Any, rows: Any) -> None:
    assert not both(are_plain_rows, id(np.ndarray), id(F4), id(I8), 4, things=(ids, rows))
