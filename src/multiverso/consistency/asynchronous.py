"""Asynchronous: every operation takes effect at once, stripe by stripe, and waits for no other worker's progress.

It waits for a stripe that another worker holds: no longer than one loop over it takes, or until its owner is found
dead, but for as long as its owner is stopped. Then the session's or the call's deadline ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from multiverso import kernels
from multiverso.consistency.protocol import Array, Call, CompiledRule, RowIds, TableAccess, Versions, bad_row
from multiverso.deadline import Deadline
from multiverso.kernels import dense, locking, rows, rules
from multiverso.layout import words as at
from multiverso.memory.words import load64

NO_TICK, TICK = 0, 1
_IDLE_SECONDS, _LOOK_SECONDS = 5.0, 0.001


class Asynchronous:
    """The default consistency. Its methods are those of `Consistency`."""

    ticks = NO_TICK  # of this worker's clock, at each read
    open_round: str | None = None
    in_rounds = False

    def __init__(self, access: TableAccess) -> None:
        self.access = access
        self._control, self._base, self._me = access.control, access.base, access.me
        self._update = access.update
        dtype = access.spec.dtype
        locking.enter.compiled()(self._control, self._base, self._me)
        self._add, self._get = dense.add.compiled(dtype), dense.get.compiled(dtype)
        self._put, self._exchange = dense.put.compiled(dtype), dense.exchange.compiled(dtype)
        self._version = dense.version.compiled()
        if access.spec.is_matrix:
            self._add_rows, self._get_rows = rows.add_rows.compiled(dtype), rows.get_rows.compiled(dtype)
            self._exchange_rows = rows.exchange_rows.compiled(dtype)
            self._get_stripes = rows.get_stripes.compiled(dtype)

    @property
    def by_stripe(self) -> Self:
        return self

    def add(self, delta: Array, call: Call, deadline: Deadline | None = None) -> None:
        arguments = (self._control, self._base, self._update, self._me, delta, call.address)
        code = self._add(*arguments)
        if code:
            self._resume(code, lambda: self._add(*arguments), deadline)

    def get(self, out: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._me, out, self.ticks, call.address)
        code = self._get(*arguments)
        if code:
            self._resume(code, lambda: self._get(*arguments), deadline)

    def get_again(self, out: Array) -> None:
        self.snapshot(out)

    def exchange(self, local: Array, last: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._update, self._me, local, last, self.ticks, call.address)
        code = self._exchange(*arguments)
        if code:
            self._resume(code, lambda: self._exchange(*arguments), deadline)

    def apply_rule(
        self, rule: CompiledRule, local: Array, push: bool, pull: bool, call: Call, deadline: Deadline | None
    ) -> None:
        kernel, ticks = rules.apply_rule.compiled(self.access.spec.dtype), self.ticks if pull else NO_TICK
        does = (rules.PUSHES if push else 0) | (rules.PULLS if pull else 0)
        places = (self._control, self._base, self._update, self._me)
        self._run(kernel, deadline, *places, rule.words, local, does, ticks, call.address)

    def add_rows(self, ids: RowIds, delta: Array, call: Call, deadline: Deadline | None = None) -> None:
        # written out: of small calls a tuple of the arguments, and a function that keeps them, are a tenth
        code = self._add_rows(self._control, self._base, self._update, self._me, ids, delta, call.address)
        if code:
            self._go_on_adding(code, ids, delta, call, deadline)

    def _go_on_adding(self, code: int, ids: RowIds, delta: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._update, self._me, ids, delta, call.address)
        self._resume_rows(code, ids, lambda: self._add_rows(*arguments), deadline)

    def get_rows(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        code = self._get_rows(self._control, self._base, self._me, ids, out, self.ticks, call.address)
        if code:
            self._go_on_reading(code, ids, out, call, deadline, self.ticks)

    def _go_on_reading(
        self, code: int, ids: RowIds, out: Array, call: Call, deadline: Deadline | None, ticks: int
    ) -> None:
        arguments = (self._control, self._base, self._me, ids, out, ticks, call.address)
        self._resume_rows(code, ids, lambda: self._get_rows(*arguments), deadline)

    def exchange_rows(self, ids: RowIds, local: Array, last: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._update, self._me, ids, local, last, self.ticks, call.address)
        kernel = self._exchange_rows
        code = kernel(*arguments)
        if code:
            self._resume_rows(code, ids, lambda: kernel(*arguments), deadline)

    def changed_stripes(self, seen: Versions, found: Versions, deadline: Deadline | None) -> int:
        return int(rows.changed_stripes.compiled()(self._base, self._me, seen, found))

    def get_stripes(
        self, stripes: Versions, versions: Versions, out: Array, call: Call, deadline: Deadline | None
    ) -> None:
        places = (self._control, self._base, self._me)
        self._run(self._get_stripes, deadline, *places, stripes, versions, out, self.ticks, call.address)

    def get_rows_again(self, ids: RowIds, out: Array) -> None:
        call = Call()
        code = self._get_rows(self._control, self._base, self._me, ids, out, NO_TICK, call.address)
        if code:
            self._go_on_reading(code, ids, out, call, None, NO_TICK)

    def snapshot(self, out: Array) -> None:
        call = Call()
        self._run(self._get, None, self._control, self._base, self._me, out, NO_TICK, call.address)

    def put(self, values: Array) -> None:
        call = Call()
        self._run(self._put, None, self._control, self._base, self._me, values, call.address)

    def version(self) -> int:
        return self.newest()

    def newest(self) -> int:
        return self._version(self._base)

    def staged(self) -> Array | None:
        return None

    def restage(self, delta: Array | None) -> None:
        if delta is not None:  # saved in a synchronous job
            self.add(delta, Call())

    def refuse_unfinished(self) -> None:
        pass

    def leave(self) -> None:
        """Waits until no other thread of this worker is in a call: to the others a worker that has left is dead.

        They would take a word over from a thread that continues writing.
        """
        deadline = Deadline.after(_IDLE_SECONDS)
        while self._is_in_a_call() and not deadline.passed:
            time.sleep(_LOOK_SECONDS)

    def _is_in_a_call(self) -> bool:
        stride = load64(self._base + at.UNDO_STRIDE)
        first = self._base + load64(self._base + at.UNDO_SLOTS) + stride * at.UNDO_SLOTS_EACH * self._me
        return any(load64(first + stride * undo + at.UNDO_USER) != 0 for undo in range(at.UNDO_SLOTS_EACH))

    def _run(self, kernel: Callable[..., int], deadline: Deadline | None, *arguments: Any) -> None:
        """Runs a kernel to its end; `add`, `get` and `exchange` have it written out, a tenth of a small call."""
        code = kernel(*arguments)
        if code:
            self._resume(code, lambda: kernel(*arguments), deadline)

    def _resume(self, code: int, again: Callable[[], int], deadline: Deadline | None) -> None:
        """Continues where a kernel stopped at a word that it did not get in half a second."""
        self.access.resume(code, again, deadline, f"a lock of {self.access.name}")

    def _resume_rows(self, code: int, ids: RowIds, again: Callable[[], int], deadline: Deadline | None) -> None:
        if code & 0xFFFF == kernels.BAD_ROW:
            raise bad_row(ids, code >> 16, self.access.spec)
        self._resume(code, again, deadline)
