"""The kernels between a copy and its home do to many numbers what ``difference`` and ``move`` do to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from multiverso.hosts.values.copies import Copy
from multiverso.kernels.between_hosts import agreeing
from multiverso.kernels.between_hosts.agreeing import REST, SOME, difference, move
from multiverso.spec.table import TableSpec

from .fabric_support import new_shard

Array = npt.NDArray[Any]
SIZE, ODD = 5000, slice(2500, 2700)  # more than two parts, and where what is odd lies
SPECIALS = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0, -0.0, 1e-45, 1.0], np.float32)


def numbers(random: np.random.Generator, dtype: str, odd: bool) -> Array:
    found = (random.standard_normal(SIZE) * 10.0 ** random.integers(-3, 6, SIZE)).astype(dtype)
    found[random.random(SIZE) < 0.3] = 0
    if odd:
        found[ODD] = random.choice(SPECIALS, found[ODD].size)
    return found


def one_by_one(what: str, values: Array, agreed: Array, frame: Array) -> int:
    """What a kernel is to do, a number at a time; returns what it is to find."""
    one, found = values.dtype.type(1), 0
    for i in range(values.size):
        x = frame[i]
        if what != "push":
            values[i], agreed[i] = move(values[i], x), move(agreed[i], x)
        if what != "land":
            x = difference(values[i], agreed[i], one)
            frame[i], agreed[i] = x, move(agreed[i], x)
            found |= SOME * bool(x != 0) | REST * bool(agreed[i] != values[i])
    return found


@pytest.mark.parametrize("what", ["push", "serve", "land"])
@pytest.mark.parametrize(("dtype", "odd"), [("float32", False), ("float32", True), ("int32", False)])
def test_a_kernel_does_to_many_numbers_what_is_said_of_one(what: str, dtype: str, odd: bool) -> None:
    random = np.random.default_rng(7)
    shard = new_shard(TableSpec("array", 1, SIZE, dtype=dtype))
    copy = Copy(shard)
    for _ in range(2):
        values, agreed, frame = (numbers(random, dtype, odd) for _ in range(3))
        shard.values()[:] = values
        ours = agreed.copy(), frame.copy()
        with np.errstate(all="ignore"):
            found = one_by_one(what, values, agreed, frame)
        assert copy.run(getattr(agreeing, what), copy.chunks[0], *ours) == found
        for mine, theirs in zip((shard.values(), *ours), (values, agreed, frame), strict=True):
            assert mine.tobytes() == theirs.tobytes()


def test_nothing_to_push_is_nothing_found() -> None:
    shard = new_shard(TableSpec("array", 1, SIZE))
    values = numbers(np.random.default_rng(1), "float32", True)
    shard.values()[:] = values
    copy = Copy(shard)
    assert not copy.run(agreeing.push, copy.chunks[0], values, np.empty_like(values)) & SOME
