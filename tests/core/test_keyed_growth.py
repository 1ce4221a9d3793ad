"""A keyed table's memory is made huge before it is used, where it grows, and nothing that it holds changes."""

from __future__ import annotations

import numpy as np
import pytest

import multiverso as mv
from multiverso.layout.words import HUGE_PAGE
from multiverso.memory import huge_pages
from multiverso.memory.heap import Heap
from multiverso.memory.huge_pages import LARGE
from multiverso.memory.segment import Segment
from multiverso.runtime import Session
from multiverso.tables.keyed import memory as keyed_memory
from multiverso.tables.save_all import keyed_tables

KEYS, BATCH = 160_000, 10_000


def _grown(session: Session, name: str) -> mv.KeyedTable:
    table = mv.KeyedTable(16, session=session, name=name)
    for start in range(0, KEYS, BATCH):
        keys = np.arange(start, start + BATCH)
        table.add(np.repeat(keys, 16), keys)
    found = table.get(np.arange(KEYS))
    assert np.array_equal(found, np.repeat(np.arange(KEYS), 16).reshape(KEYS, 16).astype("f4"))
    return table


def test_rows_and_segments_get_huge_pages_before_they_are_used(alone: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = huge_pages.make_huge, []

    def make_huge(address: int) -> bool:
        memory = next(iter(keyed_tables(alone).values()))._memory
        seen.append((address - memory.address, memory.word("NEXT_ROW") >> 16, memory.word("HINT")))
        real(address)
        return True

    monkeypatch.setattr(huge_pages, "make_huge", make_huge)
    monkeypatch.setattr(keyed_memory, "_SLOW_SECONDS", 1000.0)
    memory = _grown(alone, "grows")._memory
    first, size = memory.word("ROWS"), memory.word("ROW_BYTES")
    rows = [(offset - first, row) for offset, row, _ in seen if offset >= first]
    assert len(rows) >= (KEYS * size - 2 * HUGE_PAGE) // HUGE_PAGE
    for offset, row in rows:
        assert offset % HUGE_PAGE == 0
        assert row * size <= offset, "rows are there already"
    assert memory.word("HINT") >= 8
    half = memory.word("SEGMENTS") + HUGE_PAGE
    assert [hint for offset, _, hint in seen if offset == half] == [8], "the place of segments 128 to 255"


def test_of_a_large_add_little_is_got_ready_at_once(alone: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[int] = []

    def make_huge(address: int) -> bool:
        offset = address - memory.address - memory.word("ROWS")
        if offset >= 0:
            ahead.append(offset - (memory.word("NEXT_ROW") >> 16) * memory.word("ROW_BYTES"))
        return True

    table = mv.KeyedTable(16, session=alone)
    memory = table._memory
    monkeypatch.setattr(huge_pages, "make_huge", make_huge)
    monkeypatch.setattr(keyed_memory, "_SLOW_SECONDS", 1000.0)
    table.add(np.zeros((KEYS, 16), "f4"), np.arange(KEYS))
    assert len(ahead) >= 2
    assert max(ahead) < 2 * HUGE_PAGE, "the whole call's memory, while this worker's other threads wait"


def test_who_gets_none_asks_less_and_less_often_or_not_at_all(alone: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "make_huge", lambda address: bool(asked.append(address)))
    table = mv.KeyedTable(512, session=alone)
    for start in range(0, 32_000, 8_000):  # 32 huge pages
        table.add(np.zeros((8_000, 512), "f4"), np.arange(start, start + 8_000))
    assert 1 <= len(asked) <= 6
    monkeypatch.setenv("MULTIVERSO_HUGE_PAGES", "0")
    asked.clear()
    _grown(alone, "small pages")
    assert not asked


def test_a_huge_page_is_made_of_nothing_and_of_what_is_there() -> None:
    heap = Heap("huge")
    try:
        offset = heap.reserve_sparse(LARGE, "sparse")
        segment = Segment(heap.descriptor, offset, LARGE, sparse=True)
        numbers = segment.array(0, 2 * HUGE_PAGE // 8, np.int64)
        numbers[:1000] = np.arange(1000)
        for page in range(2):  # it may be refused: then nothing has changed either
            huge_pages.make_huge(segment.address + page * HUGE_PAGE)
        assert np.array_equal(numbers[:1000], np.arange(1000))
        assert not numbers[1000:].any()
    finally:
        heap.close()
