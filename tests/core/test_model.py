"""Any sequence of table operations, by workers that come and go, agrees with a NumPy model (in every mode).

The numbers are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from core_support import in_threads
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import multiverso as mv
from multiverso.runtime import Node, Session

SHAPES = [(1,), (5,), (300,), (40_000,), (1, 1), (4, 3), (200, 250)]


@dataclass
class Model:
    """A table as NumPy knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sign: int
    values: Any
    version: int = 0
    staged: Any = None
    ticks: dict[int, int] = field(default_factory=dict)  # by worker, also of those that have left
    handlers: dict[int, Any] = field(default_factory=dict)  # by worker

    @property
    def updater(self) -> str:
        return "add" if self.sign == 1 else "sgd"


class Tables(RuleBasedStateMachine):
    """Asynchronous: everything takes effect at once."""

    options: ClassVar[dict[str, Any]] = {}
    synchronous = False
    staleness: int | None = None

    @initialize()
    def start(self) -> None:
        self.node = Node(None)
        self.sessions: dict[int, Session] = {}
        self.tables: list[Model] = []
        self.folder = tempfile.TemporaryDirectory()
        self.saved: dict[str, Any] = {}
        self.join()
        self.join()

    def teardown(self) -> None:
        if hasattr(self, "node"):
            for session in self.sessions.values():
                session.shutdown()
            self.node.close()
            self.folder.cleanup()

    # -- workers ---------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < 4)
    @rule()
    def join(self) -> None:
        session = Session(self.node.address, timeout_seconds=30, **self.options)
        assert session.worker_id not in self.sessions
        for table in self.tables:
            table.ticks.pop(session.worker_id, None)
        self.sessions[session.worker_id] = session

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.sessions)))
        self.sessions.pop(worker).shutdown()
        while worker in self.node.live_workers():  # so that who comes next always gets this number
            threading.Event().wait(0.001)
        for table in self.tables:
            table.handlers.pop(worker, None)

    @rule(shape=st.sampled_from(SHAPES), dtype=st.sampled_from(["float32", "int64"]), sign=st.sampled_from([1, -1]))
    @precondition(lambda self: len(self.tables) < 3)
    def create(self, shape: tuple[int, ...], dtype: str, sign: int) -> None:
        name = f"t{len(self.tables)}"
        values = np.arange(np.prod(shape)).reshape(shape).astype(dtype) % 7
        self.tables.append(Model(name, shape, dtype, sign, values, staged=np.zeros(shape, dtype)))
        self.handler(self.tables[-1], min(self.sessions))

    def handler(self, table: Model, worker: int) -> Any:
        """The worker's handler of a table; it attaches when it has none yet."""
        if worker not in table.handlers:
            kind = mv.ArrayTableHandler if len(table.shape) == 1 else mv.MatrixTableHandler
            first = np.arange(np.prod(table.shape)).reshape(table.shape) % 7
            table.ticks[worker] = max(table.ticks.values(), default=0)
            table.handlers[worker] = kind(
                *table.shape,
                first,
                dtype=table.dtype,
                name=table.name,
                updater=table.updater,
                session=self.sessions[worker],
            )
        return table.handlers[worker]

    def pick(self, data: st.DataObject) -> tuple[Model, int, Any]:
        table = data.draw(st.sampled_from(self.tables))
        worker = data.draw(st.sampled_from(sorted(self.sessions)))
        return table, worker, self.handler(table, worker)

    def delta(self, data: st.DataObject, table: Model) -> Any:
        seed = data.draw(st.integers(0, 1000))
        return np.random.default_rng(seed).integers(-3, 4, table.shape).astype(table.dtype)

    # -- adding ----------------------------------------------------------------------------------------------

    def pushed(self, table: Model, delta: Any) -> None:
        if self.synchronous:
            table.staged += delta
        else:
            table.values = table.values + table.sign * delta
            table.version += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), background=st.booleans())
    def add(self, data: st.DataObject, background: bool) -> None:
        table, _, handler = self.pick(data)
        delta = self.delta(data, table)
        given = delta.copy()
        if background:
            handler.add_async(given)
            if self.synchronous or len(self.sessions) > 1:
                handler.flush(30)  # another worker may read next
        else:
            handler.add(given)
        np.testing.assert_array_equal(given, delta)
        self.pushed(table, delta)

    @precondition(lambda self: any(len(t.shape) == 2 for t in self.tables))
    @rule(data=st.data())
    def add_rows(self, data: st.DataObject) -> None:
        table, _, handler = self.pick(data)
        if len(table.shape) == 1:
            return
        ids = data.draw(st.lists(st.integers(0, table.shape[0] - 1), max_size=6))
        rows = self.delta(data, table)[ids]
        handler.add(rows, row_ids=ids)
        delta = np.zeros(table.shape, table.dtype)
        np.add.at(delta, ids, rows)
        self.pushed(table, delta)

    # -- reading ---------------------------------------------------------------------------------------------

    def may_read(self, table: Model, worker: int) -> bool:
        if self.staleness is None:
            return True
        live = [table.ticks[w] for w in table.handlers]
        return min(live) >= table.ticks[worker] - self.staleness

    @precondition(lambda self: self.tables and not self.synchronous)
    @rule(data=st.data(), how=st.sampled_from(["get", "out", "later", "rows", "exchange"]))
    def read(self, data: st.DataObject, how: str) -> None:
        table, worker, handler = self.pick(data)
        if not self.may_read(table, worker):
            return
        table.ticks[worker] += 1
        self.read_as(data, how, table, handler)

    def read_as(self, data: st.DataObject, how: str, table: Model, handler: Any) -> None:
        if how == "exchange":
            local, last = self.delta(data, table), self.delta(data, table)
            self.pushed(table, local - last)
            handler.exchange(local, last)
            np.testing.assert_array_equal(local, table.values)
            np.testing.assert_array_equal(last, table.values)
        elif how == "rows" and len(table.shape) == 2:
            ids = data.draw(st.lists(st.integers(0, table.shape[0] - 1), max_size=6))
            np.testing.assert_array_equal(handler.get(ids), table.values[ids])
        elif how == "out":
            out = np.empty(table.shape, table.dtype)
            assert handler.get(out=out) is out
            np.testing.assert_array_equal(out, table.values)
        elif how == "later":
            np.testing.assert_array_equal(handler.get_async().wait(30), table.values)
        else:
            np.testing.assert_array_equal(handler.get(), table.values)

    @precondition(lambda self: self.tables and self.synchronous)
    @rule(data=st.data(), hows=st.lists(st.sampled_from(["get", "rows", "exchange"]), min_size=4, max_size=4))
    def round(self, data: st.DataObject, hows: list[str]) -> None:
        """All workers that have the table read it at once, each in its way."""
        table, _, _ = self.pick(data)
        ids = data.draw(st.lists(st.integers(0, table.shape[0] - 1), max_size=3))
        calls, checks = [], []
        for how, handler in zip(hows, table.handlers.values(), strict=False):
            if how == "exchange":
                local, last = self.delta(data, table), self.delta(data, table)
                table.staged += local - last
                calls.append(lambda h=handler, a=local, b=last: h.exchange(a, b))
                checks.append(lambda _, a=local, b=last: (a, b))
            elif how == "rows" and len(table.shape) == 2:
                calls.append(lambda h=handler: h.get(ids))
                checks.append(lambda rows: (rows, None))
            else:
                calls.append(handler.get)
                checks.append(lambda values: (values, values))
        table.values = table.values + table.sign * table.staged
        table.staged = np.zeros(table.shape, table.dtype)
        table.version += 1
        for check, result in zip(checks, in_threads(calls), strict=True):
            one, two = check(result)
            expected = table.values if two is not None else table.values[ids]
            np.testing.assert_array_equal(one, expected)
            if two is not None:
                np.testing.assert_array_equal(two, expected)

    # -- saving ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        table, _, handler = self.pick(data)
        handler.save(Path(self.folder.name) / table.name)
        self.saved[table.name] = table.values

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        table, _, handler = self.pick(data)
        if table.name in self.saved:
            handler.load(Path(self.folder.name) / table.name)
            table.values = self.saved[table.name]

    # -- always ----------------------------------------------------------------------------------------------

    @invariant()
    def everybody_sees_the_same(self) -> None:
        for table in getattr(self, "tables", []):
            for handler in table.handlers.values():
                assert np.array_equal(handler.snapshot(), table.values)
                assert np.array_equal(handler.view(), table.values)
                assert handler.version == table.version


class SynchronousTables(Tables):
    """Adds are staged; a round puts them into the values."""

    options: ClassVar[dict[str, Any]] = {"sync": True}
    synchronous = True


class BoundedTables(Tables):
    """As asynchronous; reads tick, and only those are made that may go ahead."""

    options: ClassVar[dict[str, Any]] = {"staleness": 2}
    staleness = 2


QUICK = settings(max_examples=12, stateful_step_count=40, suppress_health_check=list(HealthCheck))
TestAsynchronous = Tables.TestCase
TestAsynchronous.settings = QUICK
TestSynchronous = SynchronousTables.TestCase
TestSynchronous.settings = QUICK
TestBounded = BoundedTables.TestCase
TestBounded.settings = QUICK
