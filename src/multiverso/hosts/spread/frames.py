"""What two hosts say of a spread table: a question to a home and its answer, one at a time in each direction.

A question brings adds that the home has not been sent (`pushed`), and asks one thing about keys::

    head  [kind 1, - 1, view 2, rows 4, table's number 8, question's number 8, argument 8, keys pushed 4, asked about 4]
    body  [keys pushed][keys asked about][deltas][rows of the keys asked about, to overwrite them]

An answer has the same head, with ANSWER added to the kind, and FAILED and a code as the argument where the question
could not be answered. It brings the values of all keys that were pushed and asked about, in their order; a flag for
each key, as its keys, where that was asked for; or whole rows with their keys.

Three kinds only nodes ask. PUSH_AGAIN brings what a question to a host that is lost had brought, and no more: its
argument is that host and the question's number. BACK_UP is a home's to a backup: rows, whole, of its first keys; the
others have none; its argument is the host and the number of the question that has changed them, 0: none has. REJOIN
is of a host that was started again, to each home: it is to be told what lived on it, and is answered once it has all,
with the words of the table that hold on all hosts, as keys.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from multiverso.hosts.peer.frames import Body, ProtocolError
from multiverso.layout import desk
from multiverso.shards.keyed_rows import Bytes, Keys

_HEAD = struct.Struct("<BxHIQQqII")
ANSWER = 128
FAILED = 64
NUMBER_BITS = 48  # of an argument that is a host and a number
WITH_VALUES = (desk.FETCH, desk.PUSH_AGAIN, desk.REMOVE, desk.OVERWRITE)  # what is answered is what copies become
NO_KEYS = np.empty(0, np.int64)
NO_BYTES = np.empty((0, 0), np.uint8)


@dataclass(frozen=True)
class Frame:
    """A question or an answer.

    Attributes:
        kind: what is asked, of ``layout/desk.py``; an answer's has ANSWER added, and FAILED where there is none.
        table: its number, a hash of its name.
        number: the question's, from 1, of this host's to that one about this table.
        argument: of the question: its own; of an answer: a number, or the code of what failed.
        pushed: keys, (n,).
        deltas: (n, bytes of a row's values).
        keys: that are asked about, (m,); of an answer of all rows: those that it has.
        rows: (m, bytes): to overwrite them; of an answer: values of ``pushed`` and ``keys``, or whole rows.
        view: how often hosts were lost or became homes again, as far as the sender knows.
    """

    kind: int
    table: int
    number: int
    argument: int = 0
    pushed: Keys = field(default_factory=lambda: NO_KEYS)
    deltas: Bytes = field(default_factory=lambda: NO_BYTES)
    keys: Keys = field(default_factory=lambda: NO_KEYS)
    rows: Bytes = field(default_factory=lambda: NO_BYTES)
    view: int = 0

    def parts(self) -> tuple[Body, ...]:
        """Returns it as it travels; the arrays must not change until it has arrived."""
        head = _HEAD.pack(
            *(self.kind, self.view, len(self.rows), self.table, self.number),
            *(self.argument, self.pushed.size, self.keys.size),
        )
        arrays = (self.pushed, self.keys, self.deltas, self.rows)
        return head, *(array.reshape(-1).view(np.uint8).data for array in arrays if array.size)

    @property
    def is_question(self) -> bool:
        """Whether it is no answer."""
        return not self.kind & ANSWER

    def refusal(self, code: int) -> Frame:
        """Returns the answer to a question that is not answered, for the reason of a code."""
        return Frame(self.kind | ANSWER | FAILED, self.table, self.number, code)

    @classmethod
    def of(cls, message: memoryview, size: int) -> Frame:
        """Returns what a message says; its arrays are the message's memory.

        Args:
            message: as it came.
            size: bytes of the values of a row of this table.

        Raises:
            ProtocolError: no node sends this.
        """
        kind, view, rows, table, number, argument, pushed, keys = _HEAD.unpack_from(message)
        of_deltas = 0 if kind & ANSWER else size * pushed
        at = _HEAD.size + 8 * (pushed + keys)
        left = len(message) - at - of_deltas
        if left < 0 or (left < rows or left % rows if rows else left):
            raise ProtocolError(f"a frame of a spread table with {len(message)} bytes: {pushed} and {keys} keys")
        return cls(
            kind,
            table,
            number,
            argument,
            np.frombuffer(message, np.int64, pushed, _HEAD.size) if pushed else NO_KEYS,
            np.frombuffer(message, np.uint8, of_deltas, at).reshape(pushed, size) if of_deltas else NO_BYTES,
            np.frombuffer(message, np.int64, keys, _HEAD.size + 8 * pushed) if keys else NO_KEYS,
            np.frombuffer(message, np.uint8, left, at + of_deltas).reshape(rows, -1) if rows else NO_BYTES,
            view,
        )


def head_of(message: Body) -> Frame:
    """Returns what a message says, but for its arrays.

    Raises:
        ProtocolError: it is none of these.
    """
    if len(message) < _HEAD.size:
        raise ProtocolError(f"a frame of a spread table has {_HEAD.size} bytes or more, not {len(message)}")
    kind, view, _, table, number, argument, *_ = _HEAD.unpack_from(message)
    return Frame(kind, table, number, argument, view=view)
