"""A worker of a keyed table dies at every single one of its writes, and another one goes on.

The kernels run uncompiled, from the same source, in one thread: a death is an exception at the k-th write. What must
hold afterwards, whatever k: nothing that was acknowledged is missing, rows are changed wholly or not at all, the dead
one's call has changed an exact prefix, no word stays held, no key is entered twice, and no row belongs to two keys.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from keyed_support import Bench

from multiverso.compiling.declared import rebound

FULL_OF = 640  # keys in the first segment when the test's keys come


def _check(bench: Bench, before: set[int], mine: list[int]) -> None:
    """Another worker, a new life of the dead one, and the table itself."""
    everything = [*before, *mine]
    found = bench.find(1, everything)
    assert (found[: len(before)] >= 0).all()
    bench.begin(0)
    rows = bench.keys()
    assert set(rows) <= set(everything)
    assert rows == {k: r for k, r in zip(everything, bench.find(0, everything).tolist(), strict=True) if r >= 0}
    bench.check_rows()
    bench.check_counts()
    assert bench.held() == 0


def _deaths(bench: Bench, work: Callable[[], None], check: Callable[[], None], step: int = 1) -> int:
    """Lets worker 0 die at each `step`-th of its writes, each time from the same beginning; returns how many."""
    image = bench.memory.copy()
    for number in range(1_000_000):
        bench.memory[:] = image
        bench.set_alive(0, True)
        if not bench.dies_after(number * step, work):
            return number
        bench.set_alive(0, False)
        check()
    raise AssertionError("it never came to its end")


def test_a_death_at_each_write_of_an_add_changes_a_prefix_of_whole_rows() -> None:
    bench = Bench(dim=3)
    bench.begin(0)
    bench.begin(1)
    old = list(range(50))
    bench.add(1, old, 1)
    mine = [3, -5, 7, 7, 1 << 62]
    prefixes = set()

    def check() -> None:
        rows = bench.get(1, mine)
        assert (rows == rows[:, :1]).all(), rows  # whole
        for n in range(len(mine) + 1):
            expected = {key: int(key in old) + 10 * mine[:n].count(key) for key in mine}
            if all(rows[i, 0] == expected[key] for i, key in enumerate(mine)):
                prefixes.add(n)
                break
        else:
            raise AssertionError(f"not a prefix: {rows[:, 0]}")
        _check(bench, set(old), mine)
        bench.add(0, mine, 10)  # its new life goes on as if nothing had been
        again = bench.get(1, mine)
        assert (again >= rows + 10).all()

    assert _deaths(bench, lambda: bench.add(0, mine, 10), check) > 60
    assert prefixes == set(range(len(mine) + 1))


@pytest.mark.parametrize("both", [False, True])
def test_a_death_at_each_write_of_a_split_loses_nothing(both: bool) -> None:
    """In the second case the worker that takes over dies in the middle of that, and a third one goes on."""
    bench = Bench(dim=1, capacity=1200)
    for worker in range(3):
        bench.begin(worker)
    random = np.random.default_rng(1)
    keys: list[int] = []
    while len(bench.entries()) == len(keys):  # until the next key splits the only segment
        image = bench.memory.copy()
        key = int(random.integers(-(2**63), 2**63))
        words = bench.memory[bench.places["SEGMENT_WORDS"] :][:16].view(np.int64)
        bench.add(1, [key], 1)
        if words[1]:
            break
        keys.append(key)
    bench.memory[:] = image
    assert len(keys) > FULL_OF
    deaths = 0

    def check() -> None:
        nonlocal deaths
        if both:
            deaths += bench.dies_after(int(random.integers(1, 400)), lambda: bench.add(1, [key], 1))
            bench.set_alive(1, False)
            found = bench.find(2, keys)
            assert (found >= 0).all()
            bench.begin(1)
        _check(bench, set(keys), [key])
        assert bench.get(1, keys).all()

    assert _deaths(bench, lambda: bench.add(0, [key], 1), check, step=61 if both else 23) > 20
    assert both == bool(deaths)


def test_who_takes_over_may_die_at_any_write_and_no_row_comes_to_two_keys() -> None:
    bench = Bench(dim=1)
    for worker in range(3):
        bench.begin(worker)
    bench.add(1, range(5), 1)
    image, deaths = bench.memory.copy(), 0
    for first in range(1000):
        for second in range(6):
            bench.memory[:] = image
            for worker in range(3):
                bench.set_alive(worker, True)
            died = bench.dies_after(first, lambda: bench.add(0, [100], 1))
            bench.set_alive(0, False)
            if bench.dies_after(second, lambda: bench.add(1, [200], 1)):
                deaths += 1
                bench.set_alive(1, False)
            bench.add(2, [300], 1)
            bench.begin(0)
            bench.add(0, [400], 1)  # with the row that its first life had claimed, if that is nobody's
            _check(bench, {*range(5), 300, 400}, [100, 200])
            bench.check_rows()
        if not died:
            break
    assert deaths > 50


def test_a_number_that_comes_again_elsewhere_leaves_no_word_held() -> None:
    """The dead worker's number has a new life at once, which never comes to this table."""
    bench = Bench(dim=3)
    bench.begin(0)
    bench.begin(1)
    old = list(range(20))
    bench.add(1, old, 1)
    safe_epoch = rebound("multiverso.kernels.keyed.fresh", lambda value: value)["safe_epoch"]

    def check() -> None:
        bench.admit(0)
        bench.add(1, [*old, 100], 1)
        assert (bench.get(1, old) >= 2).all()
        bench.remove(1, [3])
        assert bench.held() == 0
        assert safe_epoch(bench.control, bench.base) > 0  # its call keeps no rows from being used again

    assert _deaths(bench, lambda: bench.add(0, [3, 100], 10), check) > 20


def test_a_reader_meets_a_dead_owner_and_puts_the_row_back() -> None:
    bench = Bench(dim=4, integer=False)
    bench.begin(0)
    bench.begin(1)
    bench.add(1, [1, 2], 1.5)
    writes = 0
    while True:  # to the last number of the row
        bench.set_alive(0, True)
        image = bench.memory.copy()
        if not bench.dies_after(writes, lambda: bench.add(0, [1], 1.0)):
            break
        half = bench.memory.copy()
        bench.set_alive(0, False)
        assert np.array_equal(bench.get(1, [1]), np.full((1, 4), 1.5)) or np.array_equal(
            bench.get(1, [1]), np.full((1, 4), 2.5)
        )
        del half
        bench.memory[:] = image
        writes += 1
    assert writes > 8
