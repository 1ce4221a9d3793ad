"""One segment of a keyed table at a time: the one that a hash pattern belongs to, while nobody holds it, or held."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import compare_swap64, store_release64
from multiverso.compiling.declaring import inner
from multiverso.kernels.keyed.index import await_segment, resolve, word_at
from multiverso.kernels.keyed.row_words import undo_slot_of
from multiverso.layout.keyed import BUCKETS, ENTRIES, OWNER, at

SEGMENT_ENTRIES = BUCKETS * ENTRIES


@inner
def free_segment(control, base, owner, pattern):
    """Returns the segment that a pattern belongs to, its word while nobody holds it, and 0 or TIMED_OUT."""
    while True:
        segment, word = resolve(base, pattern)
        if word & OWNER == 0:
            return segment, word, 0
        code = await_segment(control, base, owner, segment)
        if code != 0:
            return segment, word, code


@inner
def take_segment(control, base, owner, pattern):
    """Takes the word of the segment that a pattern belongs to: the segment, the word before, and 0 or TIMED_OUT."""
    while True:
        segment, word, code = free_segment(control, base, owner, pattern)
        if code != 0:
            return segment, word, code
        store_release64(undo_slot_of(base, owner) + at.SEGMENT, segment + 1)
        if compare_swap64(word_at(base, segment), word, word | owner) == word:
            return segment, word, 0
