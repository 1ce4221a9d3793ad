"""Where words lie: one declaration gives the offset, the structured dtype and the record."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from multiverso.layout import words as at
from multiverso.layout.records import CACHE_LINE, Record

RECORDS = {name: value for name, value in vars(at).items() if isinstance(value, Record)}


@pytest.mark.parametrize("name", RECORDS)
def test_every_word_is_known_by_its_name_and_none_overlaps(name: str) -> None:
    record = RECORDS[name]
    assert {field.upper(): offset for field, offset in record.offsets.items()} == {
        field.upper(): getattr(at, field.upper()) for field in record.offsets
    }
    ends = [(offset, record.dtype[field].itemsize) for field, offset in record.offsets.items()]
    for (start, size), (following, _) in pairwise(ends):
        assert start + size <= following
    assert record.dtype.itemsize == record.size
    for field, offset in record.offsets.items():
        assert offset % min(record.dtype[field].base.itemsize, 64) == 0


def test_words_of_different_writers_lie_on_different_cache_lines() -> None:
    lines = [{at.EVENT}, {at.WAITERS}, {at.CAPACITY, at.CONTINUE_WITHOUT_LOST, at.NODE_BLOCK}, {at.NODE_LIFE}]
    numbers = [{offset // CACHE_LINE for offset in line} for line in lines]
    assert all(len(found) == 1 for found in numbers)
    assert len(set.union(*numbers)) == len(lines)
    assert at.LIVENESS // CACHE_LINE == at.PID // CACHE_LINE != at.PARTICIPATION // CACHE_LINE
    assert at.HYPER + 8 * 8 <= at.COMMITTED
    assert at.COMMITTED // CACHE_LINE != at.DECISIONS // CACHE_LINE


def test_a_record_is_the_memory_itself() -> None:
    memory = np.zeros(at.TABLE.size // 8, np.int64)
    header = at.TABLE.at(memory.ctypes.data)
    header["stripe_count"] = 7
    header["decisions"][1] = 9
    assert memory[at.STRIPE_COUNT // 8] == 7
    memory[at.LINES // 8] = 8
    assert (header["lines"], header["decisions"].tolist()) == (8, [0, 9])


def test_a_word_that_does_not_fit_is_refused() -> None:
    record = Record(16)
    record.int32("one")
    assert record.int64("two") == 8
    with pytest.raises(ValueError, match="three ends at byte 20 of a record of 16"):
        record.int32("three")
    with pytest.raises(ValueError, match="twice"):
        record.int32("one")
