"""Codes the sums of rounds in a format that leaves something out, and what is left out goes with the host's next sum.

Such a sum is one of differences: the values themselves do not travel. Each host on the way up adds what its own last
sum has left out, and codes again; the tail codes the total, which all hosts decode alike, itself too. So all have the
same bits, in every run. What is left of a sum counts from its total on: until then it may be made again, without a
lost host. Where hosts are lost twice before a total comes, what is left may be that of another making: a rounding.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from multiverso.hosts import codecs
from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.peer.resources import Array, Buffers
from multiverso.hosts.rounds.state import OVERWRITES, RoundTable, Sum

_Room = tuple[Array, Array]


def decoded(table: RoundTable, step: int, found: Sum, pool: Buffers, apart: bool = False) -> Sum:
    """Returns a sum whose bytes are the table's numbers: in other memory, if it was coded.

    Args:
        apart: in other memory wherever sums of the step are coded: a total is changed to values, and sent as it came.

    Raises:
        ProtocolError: it is not a coded sum.
    """
    if not found.count or not (
        found.code != codecs.NATIVE or (apart and table.is_coded(step) and not found.overwrites)
    ):
        return found
    size = table.size_of(step, found.overwrites)
    buffer = pool.take(size)
    if found.code == codecs.NATIVE:
        buffer[:size] = found.buffer[:size]
        return replace(found, buffer=buffer)
    behind = table.staged.extra * table.staged.dtype.itemsize
    coded, numbers = found.buffer[: found.length - behind], buffer[: size - behind].view(table.staged.dtype)
    try:
        if coded.size:
            codecs.decode(found.code, coded, numbers)
        else:
            numbers[:] = 0
    except ValueError as error:
        pool.give(buffer)
        raise ProtocolError(f"a sum of step {step} of table {table.number}: {error}") from error
    buffer[size - behind : size] = found.buffer[found.length - behind : found.length]
    return Sum(found.count, buffer, size, found.overwrites, found.known, found.earlier)


def room_for(table: RoundTable, step: int, pool: Buffers) -> _Room:
    """Returns all memory that `code` needs, before anything is added: for a second sum, and for what is left."""
    staged, left = table.staged, np.empty_like(_rest_of(table, step))
    behind = staged.extra * staged.dtype.itemsize
    return pool.take(max(codecs.longest(staged.wire.number, left.size, left.itemsize), left.nbytes) + behind), left


def code(table: RoundTable, step: int, found: Sum, room: _Room, pool: Buffers) -> Sum:
    """Codes a sum to which this host has added its part, with what was left out of the one before.

    Returns:
        what others will read of it, in other memory if anything is in it.
    """
    coded, left = room
    if not found.count:
        table.rests.pop(step, None)  # of one that was made with a lost host's part
        pool.give(coded)
        return found
    numbers, behind = found.buffer[: left.nbytes].view(left.dtype), found.buffer[left.nbytes : found.length]
    with np.errstate(all="ignore"):
        numbers += _rest_of(table, step)
        left[:] = numbers
        try:
            length = codecs.encode(table.staged.wire, numbers, coded)
        except MemoryError:
            numbers[:], length = left, -1
        left -= numbers
    table.rests[step] = left
    if length < 0:  # it travels as it is
        left[:] = 0
        coded[: found.length] = found.buffer[: found.length]
        return replace(found, buffer=coded)
    coded[length : length + behind.size] = behind
    plain = replace(found)
    found.buffer, found.length, found.code = coded, length + behind.size, table.staged.wire.number
    return plain


def keep_rest(table: RoundTable, step: int, total: Sum) -> None:
    """A step's total is here: what this host has left out of its sum goes with the next."""
    if table.rest is None:
        return
    before, now = table.rests_before.pop(step, None), table.rests.pop(step, None)
    left = before if total.earlier else now
    if left is not None:
        _rest_of(table, step)[:] = left
    elif total.overwrites == OVERWRITES and total.count:
        _rest_of(table, step)[:] = 0


def made_again(table: RoundTable) -> None:
    """Sums under way are made again, without a lost host; totals of those that were made may still come."""
    table.rests_before, table.rests = {**table.rests_before, **table.rests}, {}


def _rest_of(table: RoundTable, step: int) -> Array:
    assert table.rest is not None
    _, chunk = table.turn_and_chunk(step)
    part: Array = table.rest[chunk * table.staged.chunk : (chunk + 1) * table.staged.chunk]
    return part
