"""What a call that raised has left undone, and that the same call again does that, and nothing twice.

An exception may come at any moment: Ctrl-C, an alarm's handler, a deadline while a lock is held by a process that is
stopped. The rule that a user can rely on:

    **A call that raised has not returned: call it again, with the same arguments, and it is finished.** What it had
    done is not done again, also where it had done everything.

Kernels write how far a call is into its ``Call`` in one step with their effects (``consistency/protocol.py``), and
:class:`Operations` keeps that when an exception passes, together with what makes the next call the same one:

- ``add``, ``add_rows``: equal numbers. Another call on the table, or a flush, first finishes one of which a part is
  done, from a copy: what was begun is never left half.
- ``exchange``, ``exchange_rows``, ``step``: the same arrays in memory. What is done of one is not lost when other
  arrays come: each element that has been exchanged has its last value.
- ``get``, ``get_rows``: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiverso.consistency.protocol import Array, ByStripe, Call, CompiledRule, Consistency, RowIds
from multiverso.deadline import Deadline
from multiverso.errors import InterruptedRoundError
from multiverso.tables.changes import Changed, Changes

_MOST_KEPT = 16


@dataclass(frozen=True)
class Interrupted:
    """A call that raised, and how far it was.

    Attributes:
        kind: which operation.
        arguments: copies of the numbers of an add, the arrays themselves of an exchange.
        call: what the kernels wrote.
        finish: does what is left, where that must not be left half.
    """

    kind: str
    arguments: tuple[Any, ...]
    call: Call
    finish: Callable[[Deadline | None], None] | None = None

    def is_same(self, kind: str, arguments: tuple[Any, ...]) -> bool:
        """Returns whether a call is the repetition of this one."""
        if kind != self.kind or len(arguments) != len(self.arguments):
            return False
        same = equal_bits if self.finish is not None else _one_memory
        return all(same(mine, other) for mine, other in zip(self.arguments, arguments, strict=True))


def equal_bits(one: Array, other: Array) -> bool:
    """Bit by bit: NaN is NaN. Of any shape: a matrix is the same as its numbers flat."""
    one, other = (array.reshape(-1).view(np.uint8) for array in (one, other))
    return bool(np.array_equal(one, other))


def _same_rows(one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]) -> bool:
    return equal_bits(one[0], other[0]) and all(map(_one_memory, one[1:], other[1:]))


def _one_memory(one: Any, other: Any) -> bool:
    if not isinstance(one, np.ndarray):
        return bool(one == other)
    place = one.__array_interface__["data"][0]
    return bool(place == other.__array_interface__["data"][0]) and one.size == other.size


class _Mine(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        # Taken while in use: a signal's handler gets another, and finds nothing half done in it. An item of a list and
        # not one that is popped and appended: no handler runs between a call's end and that it is given back.
        self.calls: list[Call | None] = [None]
        # ids and both arrays of an exchange of rows that raised
        self.pushed: tuple[Array, Array, Array] | None = None


class Operations:
    """A table's operations, each done exactly once. Any thread.

    Args:
        how: what they mean.
        name: the table, in words.
    """

    def __init__(self, how: Consistency, name: str) -> None:
        self.how = how
        self._name = name
        self._mine = _Mine()
        self._interrupted: list[Interrupted] = []

    def add(self, delta: Array, deadline: Deadline | None = None) -> None:
        """Adds to the whole table. ``delta`` is not kept unless an exception comes."""
        calls = self._mine.calls
        call, calls[0] = calls[0] or Call(), None
        try:
            if not self._interrupted:
                self.how.add(delta, call, deadline)
            else:
                call = self._before("add", (delta,), call, deadline)
                if not call.complete.value:
                    self.how.add(delta, call, deadline)
                self._forget(call)
        except BaseException:
            self._keep_add("add", (delta,), call, self.how.add)
            raise
        call.complete.value = 0
        calls[0] = call

    def add_rows(self, ids: RowIds, delta: Array, deadline: Deadline | None = None) -> None:
        """Adds to some rows."""
        calls = self._mine.calls
        call, calls[0] = calls[0] or Call(), None
        try:
            if not self._interrupted:
                self.how.add_rows(ids, delta, call, deadline)
            else:
                call = self._before("add_rows", (ids, delta), call, deadline)
                if not call.complete.value:
                    self.how.add_rows(ids, delta, call, deadline)
                self._forget(call)
        except BaseException:
            self._keep_add("add_rows", (ids, delta), call, self.how.add_rows)
            raise
        call.complete.value = 0
        calls[0] = call

    def get(self, out: Array, deadline: Deadline | None, give: Callable[[], Any] | None = None) -> Any:
        """Reads the whole table into ``out``; returns what ``give`` makes of it, as part of the call."""
        if self._interrupted:
            return self._read(
                "get",
                lambda call: self.how.get(out, call, deadline),
                lambda: self.how.get_again(out),
                deadline,
                give,
            )
        calls, result = self._mine.calls, None
        call, calls[0] = calls[0] or Call(), None
        try:
            self.how.get(out, call, deadline)
            if give is not None:
                result = give()
        except BaseException:
            self._keep_read("get", call)
            raise
        call.complete.value = 0
        calls[0] = call
        return result

    def get_rows(
        self, ids: RowIds, out: Array, deadline: Deadline | None, give: Callable[[], Any] | None
    ) -> Any:
        """Reads some rows; returns what ``give`` makes of them, as part of the call."""
        if self._interrupted:
            return self._read(
                "get_rows",
                lambda call: self.how.get_rows(ids, out, call, deadline),
                lambda: self.how.get_rows_again(ids, out),
                deadline,
                give,
            )
        calls, result = self._mine.calls, None
        call, calls[0] = calls[0] or Call(), None
        try:
            self.how.get_rows(ids, out, call, deadline)
            if give is not None:
                result = give()
        except BaseException:
            self._keep_read("get_rows", call)
            raise
        call.complete.value = 0
        calls[0] = call
        return result

    def exchange_rows(self, ids: RowIds, local: Array, last: Array, deadline: Deadline | None) -> None:
        """Pushes ``local - last`` of some rows and pulls them into both; in rounds an add and a read."""
        by_stripe = self.how.by_stripe
        if by_stripe is None:
            mine, arguments = self._mine, (ids.copy(), local, last)
            if mine.pushed is None or not _same_rows(mine.pushed, arguments):
                self.add_rows(ids, local - last, deadline)
                mine.pushed = arguments  # no exception comes between the two
                last[:] = local  # a worker that never calls this again pushes nothing twice
            self.get_rows(ids, local, deadline, lambda: np.copyto(last, local))
            mine.pushed = None
            return
        calls = self._mine.calls
        call, calls[0] = calls[0] or Call(), None
        try:
            if self._interrupted:
                call = self._before("exchange_rows", (ids.tobytes(), local, last), call, deadline)
            if not call.complete.value:
                by_stripe.exchange_rows(ids, local, last, call, deadline)
            self._forget(call)
        except BaseException:
            self._keep(Interrupted("exchange_rows", (ids.tobytes(), local, last), call))
            raise
        call.complete.value = 0
        calls[0] = call

    def get_changed(self, how: ByStripe, changes: Changes, deadline: Deadline | None) -> Changed:
        """Reads what has changed since ``changes`` was last told; the caller notes what comes, in its last step."""
        found: list[Changed] = []

        def read(call: Call) -> None:
            found[:] = [changes.read(how, call, deadline)]

        self._read("get_changed", read, lambda: read(Call()), deadline, None)
        return found[0]

    def _read(
        self,
        kind: str,
        read: Callable[[Call], None],
        again: Callable[[], None],
        deadline: Deadline | None,
        give: Callable[[], Any] | None,
    ) -> Any:
        calls, result = self._mine.calls, None
        call, calls[0] = calls[0] or Call(), None
        try:
            if self._interrupted:
                call = self._before(kind, (), call, deadline)
            if call.complete.value:
                again()
            else:
                read(call)
            if give is not None:
                result = give()
            self._forget(call)
        except BaseException:
            self._keep_read(kind, call)
            raise
        call.complete.value = 0
        calls[0] = call
        return result

    def exchange(self, local: Array, last: Array, deadline: Deadline | None) -> None:
        """Pushes ``local - last`` and pulls the result into both."""
        calls = self._mine.calls
        call, calls[0] = calls[0] or Call(), None
        try:
            if not self._interrupted:
                self.how.exchange(local, last, call, deadline)
            else:
                call = self._before("exchange", (local, last), call, deadline)
                if not call.complete.value:
                    self.how.exchange(local, last, call, deadline)
                self._forget(call)
        except BaseException:
            self._keep(Interrupted("exchange", (local, last), call))
            raise
        call.complete.value = 0
        calls[0] = call

    def apply_rule(
        self, rule: CompiledRule, local: Array, push: bool, pull: bool, deadline: Deadline | None
    ) -> None:
        """Runs a rule's push, pull or both."""
        calls, arguments = self._mine.calls, (local, push, pull, rule.push, rule.local_state)
        call, calls[0] = calls[0] or Call(), None
        try:
            if not self._interrupted:
                self.how.apply_rule(rule, local, push, pull, call, deadline)
            else:
                call = self._before("step", arguments, call, deadline)
                if not call.complete.value:
                    self.how.apply_rule(rule, local, push, pull, call, deadline)
                self._forget(call)
        except BaseException:
            self._keep(Interrupted("step", arguments, call))
            raise
        call.complete.value = 0
        calls[0] = call

    def settle(self, deadline: Deadline | None) -> None:
        """Finishes what must not be left half: before a flush ends, a barrier, and the session."""
        for interrupted in list(self._interrupted):
            if interrupted.finish is not None:
                if not interrupted.call.complete.value:
                    interrupted.finish(deadline)
                self._forget(interrupted.call)

    # -- what an exception has left ----------------------------------------------------------------------------

    def _before(self, kind: str, arguments: tuple[Any, ...], call: Call, deadline: Deadline | None) -> Call:
        """Returns the call to go on with: an interrupted one's, if this is its repetition."""
        for interrupted in list(self._interrupted):
            if interrupted.is_same(kind, arguments):
                return interrupted.call
        for interrupted in list(self._interrupted):
            if interrupted.kind == kind and self.how.open_round == kind:
                raise InterruptedRoundError(
                    f"a {kind} of {self._name} was interrupted in the middle of a round; call {kind} again with "
                    "the same arrays to finish it first"
                )
            if interrupted.call.complete.value and interrupted.finish is None:
                self._forget(interrupted.call)  # its user has gone on without repeating it
        self.settle(deadline)
        return call

    def _forget(self, call: Call) -> None:
        self._interrupted = [kept for kept in self._interrupted if kept.call is not call]

    def _keep_add(
        self, kind: str, arguments: tuple[Array, ...], call: Call, again: Callable[..., None]
    ) -> None:
        if not call.begun or any(kept.call is call for kept in self._interrupted):
            return
        copies = tuple(argument.copy() for argument in arguments)
        self._keep(Interrupted(kind, copies, call, lambda until: again(*copies, call, until)))

    def _keep_read(self, kind: str, call: Call) -> None:
        call.done.value = 0  # the next one reads everything, perhaps into another array
        self._keep(Interrupted(kind, (), call))

    def _keep(self, interrupted: Interrupted) -> None:
        kind, call = interrupted.kind, interrupted.call
        if any(kept.call is call for kept in self._interrupted):
            return
        if not call.begun:
            known = any(kept.kind == kind for kept in self._interrupted)
            if known or self.how.open_round != kind.removesuffix("_rows"):
                return  # it had not changed anything
        self._interrupted = [*self._interrupted, interrupted][-_MOST_KEPT:]
