"""64-bit keys from texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.runtime import Session


def test_keys_are_the_published_hash() -> None:
    """The values by which the authors of xxHash check XXH3_64bits, of the beginnings of one sequence of bytes."""
    prime = 11400714785074694797
    state, sequence = 2654435761, b""
    for _ in range(24):
        sequence += bytes([state >> 56])
        state = state * prime % 2**64
    names = [sequence[:size] for size in (0, 1, 6, 12, 24)]
    published = {
        0: "2D06800538D394C2 C44BDFF4074EECDB 27B56A84CD2D7325 A713DAF0DFBB77E7 A3FE70BF9D3510EB",
        prime: "A8A6B918B2F0364A 032BE332DD766EF8 84589C116AB59AB9 E7303E1B2336DE0E 850E80FC35BDD690",
    }
    for seed, values in published.items():
        found = mv.keys(names, seed=seed).view(np.uint64).tolist()
        assert found == [int(value, 16) for value in values.split()]
    assert mv.keys(["user:1", b"user:1"]).tolist() == [4276021600403166465] * 2
    assert mv.keys(["user:1"], seed=1).tolist() != mv.keys(["user:1"]).tolist()
    assert mv.keys(["é"]).tolist() == mv.keys(["é".encode()]).tolist()


@pytest.mark.parametrize("dtype", ["S6", "U6", "object"])
def test_arrays_of_names_have_the_same_keys(dtype: str) -> None:
    names = ["user:1", "", "ab"]
    found = mv.keys(np.array(names, dtype))
    assert found.dtype == np.int64
    assert found.tolist() == mv.keys(names).tolist()
    assert mv.keys([]).shape == (0,)


def test_a_million_names_have_a_million_keys() -> None:
    assert np.unique(mv.keys([f"user:{i}" for i in range(1_000_000)])).size == 1_000_000


@pytest.mark.parametrize(
    "names, seed, error, said",
    [
        ("user:1", 0, TypeError, r"keys\(\['user:1'\]\)"),
        (5, 0, TypeError, r"such as keys\(\['user:1'\]\); got 5 \(int\)"),
        ([np.float64(1)], 0, TypeError, r"names are texts or bytes; got .* \(float64\)"),
        ([1, 2], 0, TypeError, r"names are texts or bytes; got 1 \(int\)"),
        (np.array([["a"]]), 0, TypeError, r"one-dimensional array of names; got shape \(1, 1\)"),
        (["\ud800"], 0, ValueError, "surrogate"),
        (["a"], -1, ValueError, "seed is a whole number, from 0"),
        (["a"], 1 << 64, ValueError, "seed is a whole number, from 0"),
    ],
)
def test_what_are_no_names_is_refused(names: Any, seed: int, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        mv.keys(names, seed=seed)


def test_a_keyed_table_takes_them(alone: Session) -> None:
    table = mv.KeyedTable(2, session=alone)
    table.add(np.ones((2, 2), "f4"), mv.keys(["a", "b"]))
    assert table.contains(mv.keys(["b", "c"])).tolist() == [True, False]
