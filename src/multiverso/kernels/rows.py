"""Rows of a matrix, asynchronously, each at once under the word of its stripe: see ``stripe_words``."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

import numpy as np

from multiverso.compiling.atomics import add_line, array_at, load64, load_acquire64, prefetch_to_write, scratch, store64
from multiverso.compiling.declaring import Address, Data, Int, Words, inner, kernel
from multiverso.kernels.codes import BAD_ROW
from multiverso.kernels.dense import PART, add_into, add_with, end_add, end_call, end_read, exchange_with, read_stripe
from multiverso.kernels.locking import rows_of
from multiverso.kernels.stripe_words import OWNER, change_rows, read_rows, release_undo_slot, take_undo_slot, word_at
from multiverso.kernels.waits import header_of
from multiverso.layout import words as at
from multiverso.layout.words import CACHE_LINE

# Rows that are on their way from memory meanwhile: as few as hide its latency. Each that another worker adds to as well
# may be fetched back before its turn comes, and with 16 a frequent one mostly was.
_AHEAD = 8


@inner
def first_bad_row(ids, rows):
    """Position of the first id that is no row, or -1."""
    outside = 0
    for i in range(ids.size):
        outside |= ids[i] | (rows - 1 - ids[i])  # one of them is below 0
    if outside >= 0:
        return -1
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= rows:
            return i
    return -1


@inner
def _bad_row(base, ids, call):
    """What a call answers, before it changes anything, where an id is out of range; else 0."""
    if load64(call + at.CALL_DONE) != 0:
        return 0
    head = header_of(base)
    bad = first_bad_row(ids, head.elements // head.columns)
    return (bad << 16) | BAD_ROW if bad >= 0 else 0


@inner
def _send_for(rows, row, what):
    """Sends for a row that is going to be changed, for its word, and for what the updater keeps of it."""
    place = row * rows.stride
    prefetch_to_write(word_at(rows, row >> rows.shift))  # another worker may have had it last
    for line in range(0, rows.stride, CACHE_LINE):
        prefetch_to_write(rows.values + place + line)
    for state in range(rows.states):
        start = rows.state + state * rows.state_stride + place
        for line in range(0, rows.stride, CACHE_LINE):
            prefetch_to_write(start + line)


@inner
def _add_numbers(to, source, nbytes, like):
    """Adds numbers of ``like``'s dtype. By itself, so that the loop over rows has only the cache lines in it."""
    count = nbytes // like.itemsize
    add_into(array_at(to, count, like), array_at(source, count, like))


@inner
def _add_row(to, source, nbytes, like):
    """Adds to a row what is at ``source``, by cache lines: as a loop over arrays it takes a tenth longer."""
    whole = nbytes & ~(CACHE_LINE - 1)
    for line in range(0, whole, CACHE_LINE):
        add_line(to + line, source + line, like)
    if whole < nbytes:
        _add_numbers(to + whole, source + whole, nbytes - whole, like)


@inner
def _read(control, base, me, ids, out, call):
    """Reads what is left of a call's rows: 0, or why not."""
    rows = rows_of(base, me)
    first = load64(call + at.CALL_DONE)
    code = read_rows(rows, control, me, ids, np.int64(out.ctypes.data), rows.stride, first)
    if code != 0:
        store64(call + at.CALL_DONE, code >> 16)
    return code & 0xFFFF


@kernel
def get_rows(control: Address, base: Address, me: Int, ids: Words, out: Data, ticks: Int, call: Address) -> Int:
    """Copies rows in the order of their ids: 0, or why not all of them."""
    code = _bad_row(base, ids, call)
    if code == 0:
        code = _read(control, base, me, ids, out, call)
    if code != 0:
        return code
    end_read(control, base, me, at.GETS, out.size, ticks)
    end_call(call)
    return 0


@inner
def _add(row, k, what):
    base, update, values, start, delta, source, columns, stride = what
    if update == 0:
        _add_row(start + row * stride, source + k * stride, stride, delta)
    else:
        lo = row * columns
        add_with(base, update, lo, values[lo : lo + columns], delta[k * columns : (k + 1) * columns])


@inner
def _change_rows(control, base, me, ids, call, change, what):
    """Changes what is left of a call's rows: 0, or why not all of them."""
    rows, first = rows_of(base, me), load64(call + at.CALL_DONE)
    undo = take_undo_slot(rows, control, me, first)
    if undo < 0:
        return -undo
    code = change_rows(rows, control, me, undo, ids, first, _AHEAD, _send_for, change, what)
    store64(call + at.CALL_DONE, code >> 16 if code != 0 else ids.size)
    release_undo_slot(undo)
    return code & 0xFFFF


@kernel
def add_rows(control: Address, base: Address, update: Address, me: Int, ids: Words, delta: Data, call: Address) -> Int:
    """Adds to rows in the order of their ids, each at once: 0, or why not all of them."""
    code = _bad_row(base, ids, call)
    if code != 0:
        return code
    head = header_of(base)
    columns, start = head.columns, base + head.buffer_0
    values, source = array_at(start, head.elements, delta), np.int64(delta.ctypes.data)
    what = base, update, values, start, delta, source, columns, columns * head.itemsize
    code = _change_rows(control, base, me, ids, call, _add, what)
    if code != 0:
        return code
    end_add(control, base, me, delta.size)
    end_call(call)
    return 0


@inner
def _ascend(ids):
    """Whether each id is greater than the one before it, so that none is there twice."""
    descents = 0
    for i in range(1, ids.size):
        descents += int(ids[i] <= ids[i - 1])
    return descents == 0


@inner
def _pull_again(control, base, me, ids, local, last, call):
    """Reads rows that may have been named twice: what the first ones got lacks what the later ones gave."""
    done = load64(call + at.CALL_DONE)
    store64(call + at.CALL_DONE, done - ids.size)
    code = _read(control, base, me, ids, local, call)
    if code != 0:
        store64(call + at.CALL_DONE, load64(call + at.CALL_DONE) + ids.size)
        return code
    for i in range(local.size):
        last[i] = local[i]
    return 0


@inner
def _exchange(row, k, what):
    base, update, values, local, last, delta, columns = what
    lo, a, b = row * columns, k * columns, (k + 1) * columns
    exchange_with(base, update, lo, values[lo : lo + columns], local[a:b], last[a:b], delta)


@kernel
def exchange_rows(
    control: Address,
    base: Address,
    update: Address,
    me: Int,
    ids: Words,
    local: Data,
    last: Data,
    ticks: Int,
    call: Address,
) -> Int:
    """Pushes ``local - last`` of each row and pulls the result into both, row by row."""
    code = _bad_row(base, ids, call)
    if code != 0:
        return code
    head = header_of(base)
    if load64(call + at.CALL_DONE) < ids.size:
        values = array_at(base + head.buffer_0, head.elements, local)
        what = base, update, values, local, last, scratch(PART, local), head.columns
        code = _change_rows(control, base, me, ids, call, _exchange, what)
        if code != 0:
            return code
    if not _ascend(ids):
        code = _pull_again(control, base, me, ids, local, last, call)
        if code != 0:
            return code
    end_read(control, base, me, at.EXCHANGES, 2 * local.size, ticks)
    end_call(call)
    return 0


# -- what has changed ------------------------------------------------------------------------------------------------


@kernel
def changed_stripes(base: Address, me: Int, seen: Words, found: Words) -> Int:
    """Writes the numbers of the stripes whose version is not the one seen, in their order; returns how many."""
    rows = rows_of(base, me)
    number = 0
    for stripe in range(seen.size):
        if load_acquire64(word_at(rows, stripe)) & ~OWNER != seen[stripe]:
            found[number] = stripe
            number += 1
    return number


@kernel
def get_stripes(
    control: Address, base: Address, me: Int, stripes: Words, versions: Words, out: Data, ticks: Int, call: Address
) -> Int:
    """Copies stripes one after another, and the version that each then had."""
    head = header_of(base)
    elements, length = head.elements, head.stripe_size
    values = array_at(base + head.buffer_0, elements, out)
    rows = rows_of(base, me)
    for i in range(load64(call + at.CALL_DONE), stripes.size):
        lo = int(stripes[i]) * length
        hi = min(elements, lo + length)
        to = i * length
        word = read_stripe(rows, control, me, int(stripes[i]), out[to : to + hi - lo], values[lo:hi])
        if word < 0:
            return -word
        versions[i] = word
        store64(call + at.CALL_DONE, i + 1)
    end_read(control, base, me, at.GETS, out.size, ticks)
    end_call(call)
    return 0
