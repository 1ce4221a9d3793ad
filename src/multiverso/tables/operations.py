"""A table's operations, each done exactly once, also where exceptions come in the middle.

An exception may come at any moment: Ctrl-C, an alarm's handler, a deadline while a lock is held by a process that is
stopped; and a second one while the first is on its way. The rule that a user can rely on:

    **A call that raised has not returned: call it again, with the same arguments, and it is finished.** What it had
    done is not done again, even if that was everything.

Every call is recorded *before* its kernel runs, by reference, and the record is cleared in the last step before the
call returns. Kernels write how far they are into it in one step with their effects (``consistency/protocol.py``). So
nothing has to happen when an exception passes, but for one store that says so. A later call repeats one that raised if
it is the same operation with

- ``add``, ``add_rows``: equal numbers. Any other call on the table, or a flush, first finishes what was begun.
- ``exchange``, ``exchange_rows``, ``apply_rule``: the same arrays in memory. Each element that was exchanged has its
  last value, so nothing is lost if other arrays come.
- ``get``, ``get_rows``: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from multiverso.consistency.protocol import Array, Call, Consistency, RowIds
from multiverso.deadline import Deadline
from multiverso.errors import InterruptedRoundError
from multiverso.tables.pending import Pending


class Kind(Struct, frozen=True, eq=False):
    """An operation, and what makes a call the repetition of one that raised.

    Attributes:
        name: the method of `Consistency` that does it.
        values: so many arguments, the first ones, are compared by their numbers, and the others by identity.
        finishes: whether a part of it must not be left.
        again: of a read: the method of `Operations` that reads once more what a complete call has read.
        count: how many arguments it has.
    """

    name: str
    count: int
    values: int = 0
    finishes: bool = False
    again: str = ""

    def is_same(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        """Returns whether a call with these arguments repeats one with those."""
        if len(one) != len(other):
            return False
        pairs = zip(one, other, strict=True)
        return all((equal_bits if i < self.values else one_memory)(*pair) for i, pair in enumerate(pairs))


ADD = Kind("add", 1, values=1, finishes=True)
ADD_ROWS = Kind("add_rows", 2, values=2, finishes=True)
GET = Kind("get", 1, again="_get_again")
GET_ROWS = Kind("get_rows", 2, again="_get_rows_again")
EXCHANGE = Kind("exchange", 2)
EXCHANGE_ROWS = Kind("exchange_rows", 3, values=1)
APPLY_RULE = Kind("apply_rule", 4)
GET_CHANGED = Kind("get_changed", 0)  # one that is repeated reads everything again


def equal_bits(one: Array, other: Array) -> bool:
    """Bit by bit: NaN is NaN. Of any shape: a matrix is the same as its numbers flat.

    `np.array_equal` would not do: it takes what a signal's handler raises in it for a difference.
    """
    one, other = (array.reshape(-1).view(np.uint8) for array in (one, other))
    return one.size == other.size and bool(np.equal(one, other).all())


def one_memory(one: Any, other: Any) -> bool:
    """Returns whether two arguments are the same array in memory, or equal otherwise."""
    if not isinstance(one, np.ndarray):
        return bool(one == other)
    place = one.__array_interface__["data"][0]
    return bool(place == other.__array_interface__["data"][0]) and one.size == other.size


class _Record(Call):
    """One call, from before its kernel runs until it returns. Owner: the thread that made it.

    Attributes:
        kind: which operation; None: there is no call.
        arguments: its arguments; copies of what is compared by value, once it has raised.
        raised: whether an exception has ended it; else it is under way, in another thread or below a signal's handler.
    """

    __slots__ = ("arguments", "kind", "raised")

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind | None = None
        self.arguments: tuple[Any, ...] = ()
        self.raised = False

    @property
    def begun(self) -> bool:
        """Whether it has changed anything; a read has, once it is complete."""
        reads = self.kind is not None and self.kind.again
        return bool(self.complete.value or (self.done.value and not reads))

    def clear(self) -> None:
        """There is no call any more: nothing is left of it, or its user has continued without repeating it."""
        self.complete.value = self.done.value = 0
        self.arguments, self.raised = (), False
        self.kind = None


def _nothing(*arguments: Any) -> None:
    """Does nothing: the rest of a call that is complete."""


class _Mine(threading.local):
    """Each thread's own."""

    def __init__(self, records: list[_Record]) -> None:
        self.record = _Record()  # of its calls; those of a signal's handler in the middle of one have others
        self.more: list[_Record] = []
        self.pushed: tuple[Array, Array, Array] | None = None  # ids and both arrays of an exchange of rows that raised
        records.append(self.record)


class Posted(Struct, eq=False):
    """A call that hands an operation to the table's queue, until it has returned.

    Attributes:
        kind, arguments: what is to be done; the arguments are the queue's own copies where they are compared by value.
        pending: what the caller gets.
        raised: whether an exception has ended the call; the queue may have the operation all the same.
    """

    kind: Kind
    arguments: tuple[Any, ...]
    pending: Pending
    raised: bool = False


class Operations:
    """Runs a table's operations. Any thread.

    Args:
        how: what they mean.
        name: the table, in words.
    """

    def __init__(self, how: Consistency, name: str) -> None:
        self.how = how
        self._name = name
        self._records: list[_Record] = []  # of all threads, in the order in which they first came
        self._mine = _Mine(self._records)
        self._raised = False  # whether any of them may have raised

    def run(
        self,
        kind: Kind,
        operation: Callable[..., None],
        arguments: tuple[Any, ...],
        deadline: Deadline | None = None,
        give: Callable[[], Any] | None = None,
    ) -> Any:
        """Does an operation, or what is left of it if this call repeats one that raised.

        Args:
            kind: which one.
            operation: ``operation(*arguments, call, deadline)`` does it, from where ``call`` says that it stands.
            arguments: of the operation; not kept beyond the call, unless it raises.
            deadline: None is the session's own time from when it first has to wait.
            give: makes of what was read what the caller gets, as part of the call.

        Returns:
            What ``give`` returns.

        Raises:
            InterruptedRoundError: another call of this kind has raised in the middle of a round.
        """
        record = self._mine.record
        if record.kind is None and not self._raised:
            record.arguments = arguments
            record.kind = kind
        else:
            record, operation = self._take_up(kind, operation, arguments, deadline)
        try:
            if kind.count == 1:  # to unpack a tuple takes a tenth of a small call's time
                operation(arguments[0], record, deadline)
            elif kind.count == 2:
                operation(arguments[0], arguments[1], record, deadline)
            else:
                operation(*arguments, record, deadline)
            result = None if give is None else give()
        except BaseException:
            record.raised = self._raised = True  # in one step: everything else is recorded already
            self._keep(record, arguments)
            raise
        # no call from here to the return, so no handler runs and no exception comes
        record.complete.value = 0
        record.arguments = ()
        record.kind = None
        return result

    def exchange_rows(self, ids: RowIds, local: Array, last: Array, deadline: Deadline | None) -> None:
        """Pushes ``local - last`` of some rows and pulls them into both; in rounds an add and a read."""
        by_stripe = self.how.by_stripe
        if by_stripe is not None:
            self.run(EXCHANGE_ROWS, by_stripe.exchange_rows, (ids, local, last), deadline)
            return
        mine, arguments = self._mine, (ids.copy(), local, last)
        if mine.pushed is None or not EXCHANGE_ROWS.is_same(mine.pushed, arguments):
            self.run(ADD_ROWS, self.how.add_rows, (ids, local - last), deadline)
            mine.pushed = arguments  # no exception comes between the two
            last[:] = local  # a worker that never calls this again pushes nothing twice
        self.run(GET_ROWS, self.how.get_rows, (ids, local), deadline, lambda: np.copyto(last, local))
        mine.pushed = None

    def settle(self, deadline: Deadline | None) -> None:
        """Finishes what must not be left half: before a flush ends, a barrier, and the session."""
        for record in self._left():
            if record.kind is not None and record.kind.finishes:
                self._finish(record, record.kind, deadline)

    # -- calls that raised -------------------------------------------------------------------------------------

    def _left(self) -> list[_Record]:
        """Returns the calls that raised and have left something; forgets those that have not."""
        left: list[_Record] = []
        for record in [each for each in self._records if each.raised]:
            kind = record.kind
            known = any(other.kind is kind for other in left)
            if kind is not None and (
                record.begun or (not known and self.how.open_round == kind.name.removesuffix("_rows"))
            ):
                left.append(record)
            else:
                record.clear()
        if not left:
            self._raised = False
            self._raised = any(each.raised for each in self._records)  # another thread's, meanwhile
        return left

    def _take_up(
        self, kind: Kind, operation: Callable[..., None], arguments: tuple[Any, ...], deadline: Deadline | None
    ) -> tuple[_Record, Callable[..., None]]:
        """Returns the record for a call, and what it has to do; does first what other calls have left."""
        left = self._left()
        for record in left:
            if record.kind is kind and (kind.again or kind.is_same(record.arguments, arguments)):
                if kind.again:  # it reads everything, perhaps into another array
                    record.done.value = 0
                if record.complete.value:
                    operation = getattr(self, kind.again) if kind.again else _nothing
                record.raised = False  # in one step with the return
                return record, operation
        for record in left:
            if record.kind is kind and self.how.open_round == kind.name:
                raise InterruptedRoundError(
                    f"a {kind.name} of {self._name} was interrupted in the middle of a round; call {kind.name} again "
                    "with the same arrays to finish it first"
                )
            if record.complete.value and record.kind is not None and not record.kind.finishes:
                record.clear()  # its user has continued without repeating it
        self.settle(deadline)
        record = self._unused()
        record.arguments, record.kind = arguments, kind
        return record, operation

    def _get_again(self, out: Array, call: Call, deadline: Deadline | None) -> None:
        self.how.get_again(out)

    def _get_rows_again(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        self.how.get_rows_again(ids, out)

    def _unused(self) -> _Record:
        """Returns a record of this thread's that stands for no call."""
        mine = self._mine
        for record in (mine.record, *mine.more):
            if record.kind is None:
                return record
        record = _Record()
        mine.more = [*mine.more, record]
        self._records.append(record)
        return record

    def _finish(self, record: _Record, kind: Kind, deadline: Deadline | None) -> None:
        record.raised = False
        try:
            if not record.complete.value:
                getattr(self.how, kind.name)(*record.arguments, record, deadline)
        except BaseException:
            record.raised = self._raised = True
            raise
        record.clear()

    @staticmethod
    def _keep(record: _Record, arguments: tuple[Any, ...]) -> None:
        """Takes copies: the caller may change its arrays before the rest is done. A second exception may prevent it."""
        if record.kind is not None and record.arguments is arguments and record.begun:
            values = record.kind.values
            record.arguments = (*(each.copy() for each in arguments[:values]), *arguments[values:])
