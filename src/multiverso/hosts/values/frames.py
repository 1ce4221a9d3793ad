"""The frames of asynchronous tables between a host and a chunk's home."""

from __future__ import annotations

import struct
from typing import NamedTuple

from multiverso.hosts.peer.frames import RECEIVED

# kinds
OPEN = 1  # this side has the table: body says its size, so that both mean the same
CLOSE = 2  # this side has it no more
PUSH = 3  # host to home: a difference
ANSWER = 4  # home to host: a difference
VALUE = 5  # home to host: S itself, to a first push, or where there is no memory for another answer
NEWS = 6  # home to host: its values have changed since its last answers
KINDS = frozenset((OPEN, CLOSE, PUSH, ANSWER, VALUE, NEWS, RECEIVED))

# flags
FRESH = 1  # of PUSH: the first between the two since the table was opened
FIRST = 2  # of PUSH: the first of a pass over the table
URGENT = 4  # of PUSH: a worker waits for it
RULED = 16  # of PUSH: the rule between hosts decides what becomes of it; without, it is added
REST = 32  # of PUSH: what an earlier one has left, to rounding or to the wire format
WHOLE = 8  # of ANSWER and VALUE: S is the home's value itself now, to the last bit

OPENED = struct.Struct("!QIIQ")


class Opened(NamedTuple):
    """The body of OPEN, in which it travels as `OPENED`.

    Attributes:
        elements: of the table.
        dtype: its number in ``spec.DTYPES``.
        chunk: elements of a chunk.
        epoch: how often homes were reassigned.
    """

    elements: int
    dtype: int
    chunk: int
    epoch: int
