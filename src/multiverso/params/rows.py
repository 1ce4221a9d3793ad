"""One matrix of a model of which each step reads and changes a few rows, beside its table.

Untouched rows cost nothing. What this worker holds is a cache of the table: a row is as it was when it was
last read there, plus what this worker has changed in it since, and ``last`` tells the two apart. So a row is

- *pushed* by an exchange if it was touched since the one before: its difference to ``last`` is added to the table;
- *pulled* when it is about to be read for the first time since an exchange, and not earlier. Then it is at least as new
  as if that exchange had brought the whole matrix.

At every ``whole_every``-th exchange, and wherever it is asked for, all rows are compared, pushed and pulled: rows that
changed behind our back (an optimizer's momentum) are late, and not lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.kernels import row_cache as kernels
from multiverso.params.values import check_alike
from multiverso.rules import Rule
from multiverso.runtime import Session
from multiverso.spec.table import Initial
from multiverso.tables import MatrixTableHandler

Array = NDArray[Any]
Ids = NDArray[np.int64]
_RULES = ("asgd", "downpour")
_MOST = 4  # from a quarter of all rows on, the whole matrix in one pass is quicker


def goes_by_rows(rule: Rule, session: Session) -> bool:
    """Returns whether a matrix may be exchanged by rows.

    Only where an untouched row would not move: other rules pull at all that differs. And where nothing is
    pulled that has not been pushed: Downpour takes that out of the parameters until it is. In a synchronous job a round
    reads all workers' differences of the whole matrix anyhow, so nothing would be gained.
    """
    pushed_first = rule.pull_every % rule.push_every == 0
    return rule.name in _RULES and pushed_first and not session.consistency.in_rounds


class RowExchange:
    """A matrix that is exchanged by the rows that were touched; see the module.

    Args:
        local: (rows, columns) that this worker trains on: overwritten in place.
        rule: one of those that `goes_by_rows` accepts.
        whole_every: exchange all rows at every N-th exchange; 1 for always.
        name, initial, session: as for `multiverso.MatrixTableHandler`.

    Attributes:
        local: the same array.
        table: the shared rows.
    """

    def __init__(
        self, local: Array, rule: Rule, *, whole_every: int, name: str | None, initial: Initial, session: Session
    ) -> None:
        self.local = local
        rows, columns = local.shape
        self.table = MatrixTableHandler(
            rows, columns, local, dtype=local.dtype, name=name, initial=initial, session=session
        )
        self.table.snapshot(out=local)
        self._session = session
        self._rule = rule
        self._whole_every = whole_every
        self._since = 0  # exchanges since the last whole one
        self._calls = 0
        self._columns = columns
        self._flat = local.reshape(-1)
        self._last = self._flat.copy()
        # Rows are stamped: a row whose stamp is another one is pulled before it is read, or has not been touched.
        self._epoch = self._round = 1
        self._fresh = np.full(rows, self._epoch, np.int64)
        self._dirty = np.zeros(rows, np.int64)
        # What an exception may leave to be finished: see `_settle`.
        self._counts = np.zeros(3, np.int64)
        self._stale = self._touched = self._pushed = np.empty(0, np.int64)
        self._values = self._delta = np.empty(0, local.dtype)
        dtype = local.dtype.name
        self._note = kernels.note.compiled()
        self._take_differences = kernels.take_differences.compiled(dtype)
        self._take_values = kernels.take_values.compiled(dtype)
        if session.makes_together(name):
            session.barrier()  # no worker trains before all have read the initial value

    def read(self, ids: Ids, touch: bool) -> None:
        """Brings rows up to date that are about to be read, and notes whether they will be changed.

        Args:
            ids: row numbers, one-dimensional, int64, C-contiguous, in range, also repeated.
            touch: whether this worker may change them before the next exchange.
        """
        if self._session.closed is not None:
            return  # what was trained is still there to be evaluated
        self._settle()
        if self._stale.size < ids.size:
            self._stale = np.empty(ids.size, np.int64)
        known = int(self._counts[kernels.TOUCHED])
        if self._touched.size < known + ids.size:
            self._touched = np.concatenate([self._touched[:known], np.empty(known + ids.size, np.int64)])
        self._note(
            ids,
            self._fresh,
            self._epoch,
            self._dirty,
            self._round,
            int(touch),
            self._stale,
            self._touched,
            self._counts,
        )
        self._settle()

    def exchange(self, workers: int, whole: bool, always: bool) -> None:
        """One exchange by the rule, or ``always``: of all rows, or of those that were touched."""
        self._settle()
        call = self._calls + 1
        push, pull = (always or call % every == 0 for every in (self._rule.push_every, self._rule.pull_every))
        touched = self._touched[: int(self._counts[kernels.TOUCHED])]
        whole = whole or self._since + 1 >= self._whole_every or touched.size * _MOST > len(self.local)
        if whole and push and pull:
            self.table.exchange(self._flat, self._last)
            self._epoch += 1
            self._fresh[:] = self._epoch
            self._all_pushed()
        else:
            if push:
                self._push(self._differing() if whole else touched)
            if pull:
                self._tick()
                self._epoch += 1
        self._since = 0 if whole else self._since + 1
        self._calls = call

    def _tick(self) -> None:
        if self._session.consistency.has_clocks:  # waits for those who are too far behind
            self.table.get(np.empty(0, np.int64))

    def _differing(self) -> Ids:
        last = self._last.reshape(self.local.shape)
        return np.flatnonzero((self.local != last).any(axis=1))

    def _push(self, rows: Ids) -> None:
        size = rows.size * self._columns
        if self._delta.size < size:
            self._delta = np.empty(size, self._delta.dtype)
        self._pushed = rows
        self._take_differences(self._flat, self._last, self._columns, rows, self._delta[:size], self._counts)
        self._settle()

    def _all_pushed(self) -> None:
        self._round += 1
        self._counts[kernels.TOUCHED] = self._counts[kernels.PUSHING] = 0

    def _settle(self) -> None:
        """Pushes the differences that have been taken, and pulls the rows that have been listed.

        Also those that an exception has left: the same `add` again is finished, and rows may be read twice.
        """
        counts = self._counts
        if number := int(counts[kernels.PUSHING]):
            delta = self._delta[: number * self._columns]
            self.table.add(delta, row_ids=self._pushed)
            self._all_pushed()
        if number := int(counts[kernels.STALE]):
            rows, size = self._stale[:number], number * self._columns
            if self._values.size < size:
                self._values = np.empty(size, self._values.dtype)
            values = self.table.snapshot(self._values[:size], rows)
            self._take_values(self._flat, self._last, self._columns, rows, values, counts)

    # -- saved and resumed, as `Flat` is -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns what is this worker's own: the arrays themselves, not copies."""
        self._settle()
        return {
            "local": self.local,
            "last": self._last,
            "touched": self._touched[: int(self._counts[kernels.TOUCHED])],
            "fresh": self._fresh == self._epoch,
            "calls": self._calls,
            "since": self._since,
        }

    def check(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Raises SnapshotError unless `restore` can take the state."""
        check_alike(state["local"], self.local)

    def restore(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Continues from what `state` returned, once the table has its values; ``left``: of those that do not."""
        np.copyto(self.local, state["local"])
        np.copyto(self._last, state["last"])
        self._epoch += 1
        self._fresh[:] = np.where(state["fresh"], self._epoch, 0)
        self._round += 1
        self._touched = np.array(state["touched"])
        self._dirty[self._touched] = self._round
        self._counts[:] = (0, self._touched.size, 0)
        self._calls, self._since = state["calls"], state["since"]

    def join(self, state: dict[str, Any]) -> None:
        """Begins from the table's values, in step with a worker that continues from ``state``."""
        values = self.table.snapshot()
        none = np.empty(0, np.int64)
        every = np.ones(len(values), np.bool_)
        self.restore({**state, "local": values, "last": values.reshape(-1), "touched": none, "fresh": every})
