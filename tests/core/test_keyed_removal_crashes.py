"""Keys are removed, evicted and admitted late while workers die at every single one of their writes.

As in ``test_keyed_crashes``: the kernels run uncompiled, and a death is an exception at the k-th write. Each law has a
control: a kernel in which one thing is left out, which the same test has to notice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from keyed_support import Bench

from multiverso.compiling.atomics import hash64
from multiverso.layout.keyed import ROWS_AT_ONCE, at
from multiverso.memory.words import load64, store64

OLD = list(range(40))
MANY = list(range(100, 200))  # so that some come to each place


def _deaths(bench: Bench, work: Callable[[], object], check: Callable[[], None], step: int = 1) -> int:
    """Lets worker 0 die at each `step`-th of its writes, each time from the same beginning; returns how many."""
    image = bench.memory.copy()
    for number in range(100_000):
        bench.memory[:] = image
        bench.set_alive(0, True)
        if not bench.dies_after(number * step, work):
            return number
        bench.set_alive(0, False)
        check()
    raise AssertionError("it never came to its end")


def _is_sound(bench: Bench) -> None:
    """After a look at every key by another worker, and a new life of the dead one."""
    bench.get(1, [*OLD, *range(100, 110)])
    bench.begin(0)
    bench.check_rows()
    bench.check_counts()
    assert bench.held() == 0
    found = bench.find(1, list(bench.keys()))
    assert found.tolist() == list(bench.keys().values())


def _removing(bench: Bench) -> int:
    """Worker 0 dies in the middle of removing, then of adding others in their places. Returns how often."""
    for worker in range(2):
        bench.begin(worker)
    bench.add(1, OLD, 1)
    gone = [3, 17, 999, 3, 25]
    new = list(range(100, 104))

    def removed() -> None:
        values = bench.get(1, OLD)
        for n in range(len(gone) + 1):  # a prefix, each wholly or not at all
            if values[:, 0].tolist() == [0 if k in gone[:n] else 1 for k in OLD]:
                break
        else:
            raise AssertionError("not a prefix of the keys was removed")
        _is_sound(bench)
        bench.add(0, gone[:2], 5)
        assert (bench.get(1, gone[:2]) == [[6 - (n >= 1)] * 3, [6 - (n >= 2)] * 3]).all()
        bench.check_rows()

    deaths = _deaths(bench, lambda: bench.remove(0, gone), removed)
    assert bench.remove(1, OLD).sum() == len(OLD) - 3
    assert bench.find(1, OLD).max() < 0

    def added() -> None:
        values = bench.get(1, new)
        assert (values == values[:, :1]).all()
        assert [v in (0, 9) for v in values[:, 0]] == [True] * len(new)
        assert values[:, 0].tolist() == sorted(values[:, 0].tolist(), reverse=True)
        _is_sound(bench)

    rows = load64(bench.base + at.NEXT_ROW)
    deaths += _deaths(bench, lambda: bench.add(0, new, 9), added)
    assert load64(bench.base + at.NEXT_ROW) == rows, "the rows of removed keys were not used again"
    return deaths


def test_a_death_at_each_write_of_a_removal_or_of_what_comes_after_it_leaves_a_sound_table() -> None:
    assert _removing(Bench()) > 100


@pytest.mark.parametrize("law", ["_settle_claim", "recount", "settle_next"])
def test_what_is_left_out_is_noticed(law: str) -> None:
    works = _removing if law == "recount" else _claiming
    works(Bench())
    with pytest.raises(AssertionError):
        works(Bench(broken={law: lambda *_: None}))


def _claiming(bench: Bench) -> int:
    """Worker 0 dies while it gets fresh rows, and another one gets the next ones before its new life begins."""
    for worker in range(2):
        bench.begin(worker)
    keys = iter(range(1000, 9000))

    def check() -> None:
        bench.add(1, [next(keys) for _ in range(ROWS_AT_ONCE)], 1)
        _is_sound(bench)

    return _deaths(bench, lambda: bench.add(0, [50, 51], 1), check)


def _reading(bench: Bench) -> None:
    """A worker has found the row of a key that then goes; another key comes before it reads."""
    bench.begin(0)
    bench.begin(1)
    bench.add(1, OLD, 1)
    keys, rows = bench.array([7]), bench.array([0])
    assert bench.kernels["find"](bench.control, bench.base, 0, keys, rows, 0) == 0
    bench.remove(1, [7])
    bench.add(1, MANY, 9)
    out = bench.array([0, 0, 0])
    assert bench.kernels["read"](bench.control, bench.base, 0, keys, rows, out.ctypes.data, 0) == 0
    assert out.tolist() == [1, 1, 1], "it has read another key's row"
    before = bench.rows_of_keys()
    bench.add(1, range(1000, 1100), 9)
    assert bench.rows_of_keys() - before == 99, "nobody reads the row any more, and it is not used"


def test_a_row_goes_to_another_key_only_when_nobody_can_be_using_it() -> None:
    _reading(Bench())
    with pytest.raises(AssertionError, match="another key's row"):
        _reading(Bench(broken={"safe_epoch": lambda control, base: load64(base + at.EPOCH)}))
    with pytest.raises(AssertionError, match="another key's row"):
        _reading(Bench(broken={"pin": lambda base, line: None}))


def _undone(bench: Bench) -> None:
    """A worker dies in the middle of an add; the key is removed and its row comes to another key."""
    bench.begin(0)
    bench.begin(1)
    bench.add(1, OLD, 1)
    image = bench.memory.copy()
    for number in range(1000):
        bench.memory[:] = image
        bench.set_alive(0, True)
        if not bench.dies_after(number, lambda: bench.add(0, [7], 2)):
            return
        bench.set_alive(0, False)
        bench.remove(1, [7])
        bench.add(1, MANY, 9)  # one of them gets the row
        bench.begin(0)
        assert (bench.get(1, MANY) == 9).all(), "an undo of a dead worker has come over another key's row"
        assert (bench.get(1, [7]) == 0).all()


def test_what_a_dead_worker_had_in_hand_does_not_come_back_into_another_keys_row() -> None:
    _undone(Bench())

    def without_the_word(control: int, base: int, owner: int, row: int, key: int) -> int:
        place = base + load64(base + at.ROWS) + row * load64(base + at.ROW_BYTES)
        for column in range(3):
            store64(place + 8 * column, 0)
        return 0

    bench = Bench(broken={"_begin_again": without_the_word})
    with pytest.raises(AssertionError, match="come over"):
        _undone(bench)


def test_the_row_of_a_key_that_was_removed_begins_anew() -> None:
    def work(bench: Bench) -> None:
        bench.begin(0)
        bench.add(0, OLD, 5)
        bench.remove(0, OLD)
        bench.add(0, OLD, 1)
        assert (bench.get(0, OLD) == 1).all()

    work(Bench())
    with pytest.raises(AssertionError):
        work(Bench(broken={"_begin_again": lambda *_: 0}))


def test_a_death_at_each_write_of_an_eviction_leaves_a_sound_table() -> None:
    bench = Bench(KEEPS_USE=1, MOST_KEYS=25, IDLE_TICKS=9)
    bench.begin(0)
    bench.begin(1)
    bench.add(1, OLD[:10], 1)
    store64(bench.base + at.TICK, 3)
    bench.add(1, OLD[10:], 1)

    def check() -> None:
        _is_sound(bench)
        left = bench.keys()
        old, young = set(OLD[:10]) & set(left), set(OLD[10:]) & set(left)
        assert len(young) == 30 or not old, "a key that was used of late has gone before others"
        bench.evict(1)
        assert len(bench.keys()) in (24, 25)  # one that the dead worker did not come to count
        bench.check_rows()

    assert _deaths(bench, lambda: bench.evict(0), check, step=3) > 20
    assert bench.evict(1) == 0
    assert len(bench.keys()) == 25
    store64(bench.base + at.TICK, 12)
    assert bench.evict(1) == 25
    assert not bench.keys()


def test_a_candidate_gets_its_row_at_the_nth_add_whoever_dies_meanwhile() -> None:
    bench = Bench(ADMIT_AFTER=3)
    bench.begin(0)
    bench.begin(1)
    for _ in range(3):
        bench.add(1, OLD, 1)
    assert (bench.get(1, OLD) == 1).all()  # the third one only
    bench.remove(1, OLD[:5])  # rows for candidates to keep
    new = [100, 101]
    bench.add(1, new, 7)
    assert set(bench.keys()) == set(OLD[5:])

    def check() -> None:
        _is_sound(bench)
        for _ in range(2):
            bench.add(0, new, 0)
        values = bench.get(1, new)
        assert (values == values[:, :1]).all()
        assert set(values[:, 0].tolist()) <= {0, 7}
        assert set(bench.keys()) == {*OLD[5:], *new}
        bench.check_rows()

    def twice() -> None:
        bench.add(0, new, 7)
        bench.add(0, new, 7)

    assert _deaths(bench, twice, check) > 30
    assert (bench.get(1, new) == 7).all()


def test_a_segment_with_dead_entries_is_split_and_loses_no_row() -> None:
    bench = Bench(dim=1, capacity=1200)
    for worker in range(3):
        bench.begin(worker)
    keys: list[int] = []
    bench.add(1, range(100), 1)
    keys_of_2 = bench.array([1])
    rows_of_2 = bench.array([0])  # it reads on
    assert bench.kernels["find"](bench.control, bench.base, 2, keys_of_2, rows_of_2, 0) == 0
    bench.remove(1, range(100))
    key = 1000
    while True:
        image = bench.memory.copy()
        bench.add(1, [key], 1)
        if load64(bench.base + bench.places["SEGMENT_WORDS"] + 8):
            break
        keys.append(key)
        key += 1
    assert bench.get(1, [*keys, key]).all()
    bench.check_rows()
    bench.check_counts()
    bench.memory[:] = image

    def check() -> None:
        assert bench.get(1, keys).all()
        bench.begin(0)
        bench.check_rows()
        bench.check_counts()
        assert bench.held() == 0

    assert _deaths(bench, lambda: bench.add(0, [key], 1), check, step=97) > 15


def _neighbours(bench: Bench) -> None:
    """Two keys of one home and one tag, as low as there are: one is removed, and its neighbour stays."""
    bench.begin(0)
    lowest: dict[int, int] = {}
    for key in range(100_000):
        key_hash = hash64(key)
        home = (key_hash >> 40) & 127
        if (key_hash >> 50) & 127 <= 1:
            if home in lowest:
                break
            lowest[home] = key
    bench.add(0, [lowest[home], key], 1)
    bench.remove(0, [key])
    assert bench.find(0, [lowest[home], key]).tolist() == [0, -1], "a removed key was found"


def test_a_dead_entry_is_not_found_beside_one_of_the_same_tag() -> None:
    _neighbours(Bench())
    with pytest.raises(AssertionError, match="a removed key was found"):
        _neighbours(Bench(broken={"tag_of": lambda key_hash: max((key_hash >> 50) & 127, 1) | 128}))
