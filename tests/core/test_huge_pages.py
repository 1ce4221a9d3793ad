"""Large memory goes into huge pages in the background, and nothing that it holds changes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from multiverso.memory.heap import Heap
from multiverso.memory.huge_pages import HUGE_PAGE, LARGE, Collapser, fits
from multiverso.memory.segment import Segment

SECONDS = 60.0
SIZE = LARGE + 3 * 4096


@pytest.fixture
def heap() -> Iterator[Heap]:
    made = Heap("huge")
    yield made
    made.close()


def test_an_address_fits_a_place_in_the_file() -> None:
    for address, offset in ((0, 0), (4096, 0), (3 * HUGE_PAGE - 4096, 8192), (12345 * 4096, 77 * 4096)):
        found = fits(address, offset)
        assert address <= found < address + HUGE_PAGE
        assert (found - offset) % HUGE_PAGE == 0


def test_what_large_memory_holds_stays_while_its_pages_become_huge(heap: Heap) -> None:
    heap.reserve(4096)  # so that the next one does not begin where a huge page could
    offset = heap.reserve(SIZE)
    segment = Segment(heap.descriptor, offset, SIZE)
    assert (segment.address - offset) % HUGE_PAGE == 0
    numbers = segment.array(0, SIZE // 8, np.int64)
    numbers[:] = np.arange(SIZE // 8)
    collapser = Collapser(heap.descriptor, rest=lambda seconds: False)
    collapser.add(offset, SIZE)
    numbers[::4096] += 1  # meanwhile
    assert collapser.wait(SECONDS)
    expected = np.arange(SIZE // 8)
    expected[::4096] += 1
    assert np.array_equal(numbers, expected)
    assert collapser.made <= SIZE // HUGE_PAGE
    collapser.close()


def test_memory_that_is_given_back_stays_a_hole(heap: Heap) -> None:
    offset = heap.reserve(SIZE)
    heap.make_huge(offset, SIZE)
    heap.release(offset, SIZE)
    heap.close()  # waits for the page in hand
    again = Heap("other")
    try:
        place = again.reserve(SIZE)
        again.make_huge(place, SIZE)
        again.release(place, SIZE)
        assert again._collapser is not None
        assert again._collapser.wait(SECONDS)
        assert os.fstat(again.descriptor).st_blocks * 512 < HUGE_PAGE
    finally:
        again.close()


def test_sparse_memory_follows_where_it_is_wholly_there_and_rests(heap: Heap) -> None:
    heap.reserve(4096)
    offset = heap.reserve_sparse(LARGE, "sparse")
    assert offset % HUGE_PAGE == 0
    assert heap.reserve(4096) < offset  # what lies before it is given out
    segment = Segment(heap.descriptor, offset, LARGE, sparse=True)
    assert segment.address % HUGE_PAGE == 0
    numbers = segment.array(0, LARGE // 8, np.int64)
    half = HUGE_PAGE // 16
    numbers[: 5 * half] = np.arange(5 * half)  # two and a half
    used, looks = os.fstat(heap.descriptor).st_blocks, []

    def rest(seconds: float) -> bool:
        looks.append(seconds)
        return len(looks) == 20

    collapser = Collapser(heap.descriptor, rest)
    collapser.add_sparse(offset, LARGE)
    assert collapser.wait(SECONDS)
    assert collapser.tried == 2
    assert collapser.made <= 2
    assert np.array_equal(numbers[: 6 * half], [*range(5 * half), *[0] * half])
    assert os.fstat(heap.descriptor).st_blocks <= used + HUGE_PAGE // 512  # what is read is there, not what is not
    collapser.close()


def test_small_memory_and_memory_of_who_does_not_want_it_is_left_alone(
    heap: Heap, monkeypatch: pytest.MonkeyPatch
) -> None:
    heap.make_huge(heap.reserve(4096), 4096)
    monkeypatch.setenv("MULTIVERSO_HUGE_PAGES", "0")
    heap.make_huge(heap.reserve(SIZE), SIZE)
    assert heap._collapser is None


def test_a_part_that_is_given_back_takes_no_neighbour_with_it(heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    offset = heap.reserve(4 * HUGE_PAGE)
    collapser = Collapser(heap.descriptor, rest=lambda seconds: False)
    with monkeypatch.context() as patch:
        patch.setattr(Collapser, "_begin", lambda self: None)
        for place in (0, 1, 2):
            collapser.add(offset + place * HUGE_PAGE, HUGE_PAGE)
    collapser.discard(offset + HUGE_PAGE, HUGE_PAGE)
    collapser.add(offset + 3 * HUGE_PAGE, HUGE_PAGE)
    assert collapser.wait(SECONDS)
    assert collapser.tried == 3
    collapser.close()


def test_the_place_of_sparse_memory_is_given_out_again(heap: Heap) -> None:
    first = heap.reserve_sparse(3 * HUGE_PAGE, "a table")
    heap.reserve(4096)
    heap.release(first, 3 * HUGE_PAGE)
    used = heap.used
    again = [heap.reserve_sparse(HUGE_PAGE, "a table") for _ in range(4)]
    assert again[:3] == [first, first + HUGE_PAGE, first + 2 * HUGE_PAGE]
    assert again[3] > first + 3 * HUGE_PAGE
    assert heap.used == used, "what is not written takes none"
    for offset in again:
        heap.release(offset, HUGE_PAGE)
