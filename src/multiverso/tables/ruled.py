"""A table as rules use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso.compiling.on_demand import compile_pull, compile_push
from multiverso.consistency.protocol import CompiledRule
from multiverso.kernels import rules
from multiverso.runtime.session.session import table_key
from multiverso.tables.convert import Array, writable
from multiverso.tables.handler import TableHandler
from multiverso.tables.operations import APPLY_RULE
from multiverso.tables.pending import Pending


class Ruled:
    """A table as one rule of one worker moves it.

    Args:
        table: the table.
        user: the rule's state in this worker, if it has some: while it lives, the table is not loaded behind its back.
    """

    def __init__(self, table: TableHandler, user: Any = None) -> None:
        self._table = table
        self._session = table._session
        table._refuse_clipped()
        if user is not None:
            table._users.add(user)

    def others(self) -> list[Any]:
        """Returns the users of this worker's other handlers of the table, which have the same local state."""
        twins = self._session.handles.of(table_key(self._table._number))
        return [user for twin in twins if twin is not self._table for user in getattr(twin, "_users", ())]

    def local_state(self) -> list[Array]:
        """Returns this worker's own arrays, in the shared segment: flat, writable."""
        self._session.check()
        return self._table._shard.local_state(self._session.worker_id)

    def compile(
        self, push: Callable[..., None], pull: Callable[..., None] | None, hyper: tuple[float, ...]
    ) -> CompiledRule:
        """Returns a rule's two loops, compiled for this table; see `multiverso.rules.Rule`."""
        dtype = self._table.spec.dtype
        # now, and not at the first step, which may be in a thread during training
        rules.apply_rule.compiled(dtype)
        return CompiledRule(
            compile_push(push, dtype),
            compile_pull(pull, dtype) if pull else 0,
            self._table._shard.local_state_address(self._session.worker_id),
            np.array(hyper or (0.0,), self._table.dtype),
        )

    def apply(
        self, rule: CompiledRule, local: Any, push: bool, pull: bool, *, timeout_seconds: float | None = None
    ) -> None:
        """Runs push, pull or both, in place; see `multiverso.rules.Shared`."""
        deadline = self._table._ready(timeout_seconds)
        array = self._local(local)
        if push:
            self._table._follow_schedule()
        operations = self._table._operations
        operations.run(APPLY_RULE, operations.how.apply_rule, (rule, array, push, pull), deadline)

    def apply_async(self, rule: CompiledRule, local: Any, push: bool, pull: bool) -> Pending:
        """Like `apply`, in the background. Leave ``local`` alone until ``wait()`` returns."""
        self._session.check()
        array = self._local(local)
        if push:
            self._table._follow_schedule()
        return self._table._later(APPLY_RULE, (rule, array, push, pull))

    def staged(self) -> Array | None:
        """Returns a copy of what this worker has added since its last read in a synchronous job, or None.

        Raises:
            InterruptedRoundError: a read was interrupted and has to be finished first.
        """
        self._table._ready(None)
        return self._table._how.staged()

    def restage(self, delta: Array | None) -> None:
        """Puts back what `staged` returned, in the place of what was added since."""
        self._table._ready(None)
        self._table._operations.settle(None)
        self._table._how.restage(delta)

    def _local(self, local: Any) -> Array:
        table = self._table
        return local if table._is_plain(local) else writable(local, table.size, table.dtype, "local")
