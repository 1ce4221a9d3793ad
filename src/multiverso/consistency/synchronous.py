"""Synchronous: adds go to this worker's slot; a read is the end of a round, the same bits in every worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso.consistency.protocol import Array, Call, CompiledRule, RowIds, TableAccess, bad_row, refuse_bad_rows
from multiverso.deadline import Deadline
from multiverso.errors import InterruptedRoundError, MultiversoError, WaitTimeoutError
from multiverso.kernels import rules
from multiverso.kernels.between_hosts import rounds as chained
from multiverso.kernels.rounds import calls as rounds
from multiverso.layout import words as at
from multiverso.memory.words import load32, load64, store64
from multiverso.signal_safety import new_lock, turn

_SNAPSHOT_TRIES = 1000


class Synchronous:
    """Its methods are those of `Consistency`. One thread at a time gets in.

    Everything about the unfinished round is in ``_progress``, which only kernels write (``kernels.rounds``): an
    exception may come between any two steps here.
    """

    in_rounds = True
    by_stripe = None

    def __init__(self, access: TableAccess) -> None:
        self.access = access
        self._control, self._base, self._me = access.control, access.base, access.me
        self._update = access.update
        self._dtype = access.spec.dtype
        self._spans_hosts = load32(access.control + at.SPANS_HOSTS) == 1
        self._kernels: Any
        self._apply_rule: Any
        self._choose_kernels()
        # compiled now, and not while others wait for this worker
        (rounds.stage.compiled(self._dtype), self._kernels.read.compiled(self._dtype), self._kernels.leave.compiled())
        self._lock = new_lock()
        self._progress = np.zeros(at.ROUND_MEMBERS + load64(access.base + at.CHUNK_COUNT), np.int64)
        self._progress[at.ROUND_NUMBER] = access.first_round
        self._reading: str | None = None  # what the open round's read is
        if self._spans_hosts and access.update:
            self._refuse_stale_copy()

    def _choose_kernels(self) -> None:
        self._kernels = chained if self._spans_hosts else rounds
        self._apply_rule = chained.apply_rule if self._spans_hosts else rules.apply_rule_in_round

    @property
    def open_round(self) -> str | None:
        return self._reading if self._progress[at.ROUND_OPEN] else None

    def add(self, delta: Array, call: Call, deadline: Deadline | None = None, weight: int = 0) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            stage = rounds.stage.compiled(self._dtype)
            stage(self._base, self._me, self._progress, delta, weight, call.address)

    def add_rows(
        self, ids: RowIds, delta: Array, call: Call, deadline: Deadline | None = None, weight: int = 0
    ) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            bad = rounds.stage_rows.compiled(self._dtype)(
                self._base, self._me, self._progress, ids, delta, weight, call.address
            )
            if bad >= 0:
                raise bad_row(ids, bad, self.access.spec)

    def get(self, out: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._update, self._me, self._progress, out, call.address)
        self._read("get", lambda: self._kernels.read.compiled(self._dtype)(*arguments), deadline)

    def get_again(self, out: Array) -> None:
        # the last round's buffer is written to again in the next but one, which needs this worker
        rounds.committed_copy.compiled(self._dtype)(self._base, int(self._progress[at.ROUND_NUMBER]) - 1, out)

    def get_rows(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        refuse_bad_rows(ids, self.access.spec)
        arguments = (self._control, self._base, self._update, self._me, self._progress, ids, out, call.address)
        self._read("get", lambda: self._kernels.read_rows.compiled(self._dtype)(*arguments), deadline)

    def get_rows_again(self, ids: RowIds, out: Array) -> None:
        refuse_bad_rows(ids, self.access.spec)
        rounds.committed_rows.compiled(self._dtype)(self._base, int(self._progress[at.ROUND_NUMBER]) - 1, ids, out)

    def exchange(self, local: Array, last: Array, call: Call, deadline: Deadline | None) -> None:
        arguments = (self._control, self._base, self._update, self._me, self._progress, local, last, call.address)
        self._read("exchange", lambda: self._kernels.exchange.compiled(self._dtype)(*arguments), deadline)

    def apply_rule(
        self, rule: CompiledRule, local: Array, push: bool, pull: bool, call: Call, deadline: Deadline | None
    ) -> None:
        kernel = self._apply_rule.compiled(self._dtype)
        does = (rules.PUSHES if push else 0) | (rules.PULLS if pull else 0)
        places = (self._control, self._base, self._update, self._me)
        self._read("step", lambda: kernel(*places, rule.words, self._progress, local, does, call.address), deadline)

    def snapshot(self, out: Array) -> None:
        for _ in range(_SNAPSHOT_TRIES):
            if self._copy(out):
                return
        raise WaitTimeoutError(
            f"no consistent copy of {self.access.name} in {_SNAPSHOT_TRIES} tries: its rounds are too quick"
        )

    def _copy(self, out: Array) -> bool:
        """Copies the values after the last finished round; False where another one was finished meanwhile."""
        number = self.newest()
        rounds.committed_copy.compiled(self._dtype)(self._base, number, out)
        # a buffer is written to again only after the next round is finished
        return self.newest() == number

    def put(self, values: Array) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            rounds.committed_put.compiled(self._dtype)(self._base, self.newest(), values)
            self._say_written()

    def _say_written(self) -> None:
        """On several hosts: at the next barrier the node gives the values to the others."""
        if self._spans_hosts:
            store64(self._base + at.WRITTEN, load64(self._base + at.WRITTEN) + 1)

    def version(self) -> int:
        return self.newest()

    def newest(self) -> int:
        return load64(self._base + at.COMMITTED)

    def staged(self) -> Array | None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            if load64(self.access.line + at.WEIGHT):
                raise InterruptedRoundError(
                    f"an add to {self.access.name} with a weight is in no round yet: get() first"
                )
            return self.access.slot().copy() if self._progress[at.ROUND_STAGED] else None

    def restage(self, delta: Array | None) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            self._progress[at.ROUND_STAGED] = 0
        if delta is not None:
            self.add(delta, Call())

    def leave(self) -> None:
        """What was added since the last read goes into the others' next round."""
        self._kernels.leave.compiled()(self._control, self._base, self._me, self._progress)

    def refuse_unfinished(self) -> None:
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            if self._progress[at.ROUND_STAGED]:
                raise InterruptedRoundError(
                    f"this worker has added to {self.access.name} since its last read, which no round has taken up; "
                    "get() first, in every worker, or shutdown()"
                )

    def _refuse_stale_copy(self) -> None:
        """Across hosts an updater is run by workers: on a host that had none the values stayed what they were."""
        decided, done = load64(self.access.base + at.DECIDED), load64(self.access.base + at.COMMITTED)
        here = load64(self.access.base + at.TAKING_PART + 8 * (decided & 1))
        if decided > done + 1 or (decided > done and not here):
            raise MultiversoError(
                f"{self.access.name} has an updater, and has gone through rounds while no worker of this host had it: "
                "make it on every host before the first round"
            )

    def _refuse_in_round(self) -> None:
        if self._progress[at.ROUND_OPEN]:
            raise InterruptedRoundError(
                f"a {self._reading} of {self.access.name} was interrupted in round "
                f"{self._progress[at.ROUND_NUMBER]}; call {self._reading} again to finish it first"
            )

    def _read(self, reading: str, go: Callable[[], int], deadline: Deadline | None) -> None:
        """Goes through a round, or through what is left of it."""
        with turn(self._lock, self.access.name):
            if self._reading != reading:
                self._refuse_in_round()
                self._reading = reading
            self.access.check_may_wait()
            code = go()
            if code:
                what = f"round {self._progress[at.ROUND_NUMBER]} of {self.access.name}"
                self.access.resume(code, go, deadline, what)
