"""Every operation, rule and mode, done to two twins: one is interrupted, the other is not, and they stay equal."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from interrupting import Interruption

import multiverso as mv
from multiverso.launch.rehearsing import hosts_here
from multiverso.params import SharedParams
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.reducer import Reducer

SIZE = 50
MODES: dict[str, dict[str, Any]] = {"async": {}, "bounded": {"staleness": 1}, "sync": {"sync": True}}
Interrupter = Callable[[Callable[[], Any]], Any]
_STEPS = 1 << 20


def numbers(worker: int, step: int, size: int = SIZE) -> Any:
    return np.random.default_rng([worker, step]).integers(-8, 9, size).astype("f4")


class Twin:
    """One worker's part in one of the two: ``steps()`` yields the calls of a step; ``seen()`` what it has read."""

    hosts = 1

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.number = session, 0
        self.said: list[Any] = []
        self.make(name)

    def make(self, name: str) -> None: ...
    def calls(self) -> list[Callable[[], Any]]:
        raise NotImplementedError

    def seen(self) -> Any:
        return [np.array(said).tolist() for said in self.said]

    def mine(self, step: int | None = None) -> Any:
        return numbers(self.session.worker_id, self.number if step is None else step)


def counts_of(session: Any, table: Any, *what: str) -> list[Any]:
    """What this worker has done with a table."""
    statistics = session.tables()[table.number].statistics(session.worker_id)
    return [statistics[each] for each in what or ("adds", "exchanges", "clock")]


class Adding(Twin):
    updater = "add"

    def make(self, name: str) -> None:
        self.table = mv.MatrixTableHandler(SIZE, 1, session=self.session, updater=self.updater)

    def calls(self) -> list[Callable[[], Any]]:
        values, one = self.mine(), np.ones((2, 1), "f4")
        return [
            lambda: self.table.add(values),
            lambda: self.table.add(one, row_ids=[3, 5]),
            lambda: self.table.get(),
            lambda: self.table.add(values * 2),
            lambda: self.table.get([4, 3], out=np.empty((2, 1), "f2")),
        ]

    def seen(self) -> Any:
        counted = counts_of(self.session, self.table)
        return super().seen(), counted, self.table.version, self.table.snapshot().tolist()


class Large(Adding):
    """Adds that take as long as it takes to copy what they add, some of them in the background."""

    elements = 200_000

    def make(self, name: str) -> None:
        self.table = mv.MatrixTableHandler(self.elements // 8, 8, session=self.session, dtype="int64")

    def calls(self) -> list[Callable[[], Any]]:
        values = np.full(self.elements, self.number + 1)
        ids = np.arange(self.elements // 8)
        return [
            lambda: self.table.add(values),
            lambda: self.table.add(values, row_ids=ids),
            lambda: self.table.add_async(values),
            lambda: self.table.add_async(values, row_ids=ids),
            lambda: self.table.flush(),
            lambda: self.table.get([0, 5])[0],
        ]

    def seen(self) -> Any:
        """Every element has had each add once."""
        found = self.table.snapshot()
        return super(Adding, self).seen(), int(found.min()), int(found.max()), self.table.version


class Exchanging(Twin):
    updater: Any = "add"

    def make(self, name: str) -> None:
        self.table = mv.ArrayTableHandler(SIZE, session=self.session, updater=self.updater)
        self.local, self.last = np.zeros(SIZE, "f4"), np.zeros(SIZE, "f4")
        self.more = self.mine(7)

    def calls(self) -> list[Callable[[], Any]]:
        self.local += self.mine()
        exchange = lambda: self.table.exchange(self.local, self.last)  # noqa: E731
        return [exchange, exchange, lambda: self.table.add(self.more), exchange]

    def seen(self) -> Any:
        counted = counts_of(self.session, self.table)
        return self.local.tolist(), self.last.tolist(), counted, self.table.snapshot().tolist()


class WithState(Exchanging):
    updater = mv.updaters.nesterov(0.5, 0.5)


class Ruled(Twin):
    rule: Any = None

    def make(self, name: str) -> None:
        self.local = self.mine(3)
        self.shared = mv.rules.share(self.local, self.rule, session=self.session)

    def calls(self) -> list[Callable[[], Any]]:
        self.local += self.mine()
        exchange = lambda: self.shared.exchange(self.local)  # noqa: E731
        return [exchange, exchange, exchange]

    def seen(self) -> Any:
        counted = counts_of(self.session, self.shared.table)
        own = [array.tolist() for array in self.shared._local_state]
        return self.local.tolist(), own, self.shared._calls, counted, self.shared.table.snapshot().tolist()


class Meeting(Twin):
    """Barriers and reductions, of which a session has one kind only: the twins take turns."""

    def make(self, name: str) -> None:
        # one for both: its memory is the job's
        self.reducer = self.session.reducers.get(2) or Reducer(self.session, 2)

    def calls(self) -> list[Callable[[], Any]]:
        values, large = self.mine(), np.resize(self.mine(), 20_000)
        return [
            self.session.barrier,
            lambda: self.reducer.all_reduce(values),
            lambda: self.reducer.all_reduce(values.astype("i4"), "average"),
            lambda: self.reducer.all_reduce(values.astype("f2"), "max"),
            lambda: self.reducer.all_reduce(large, "average", large)[:SIZE],
            self.session.barrier,
        ]


class Rows(Adding):
    """Exchanges of rows, and the asynchronous variants of everything."""

    updater = "add"

    def make(self, name: str) -> None:
        super().make(name)
        self.local, self.last = np.zeros((3, 1), "f4"), np.zeros((3, 1), "f4")
        self.whole = np.zeros((2, SIZE), "f4")
        self.pending: Any = None

    def _begin(self, operation: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        def call() -> None:
            self.pending = operation(*arguments)

        return call

    def calls(self) -> list[Callable[[], Any]]:
        self.local += self.mine()[:3, None]
        self.whole[0] += self.mine()
        exchange = lambda: self.table.exchange(self.local, self.last, [7, 1, 5])  # noqa: E731
        wait = lambda: self.pending.wait(60)  # noqa: E731
        begun = [
            self._begin(self.table.add_async, self.mine(9)),
            self._begin(self.table.get_async),
            self._begin(self.table.exchange_async, self.whole[0], self.whole[1]),
            self._begin(self.table.add_async, self.mine(8)[:2, None], [2, 2]),
            self._begin(self.table.exchange_async, self.local, self.last, [7, 1, 5]),
        ]
        return [exchange, exchange, *(call for one in begun for call in (one, wait)), self.table.get]

    def seen(self) -> Any:
        return super().seen(), self.local.tolist(), self.last.tolist(), self.whole.tolist()


class Keyed(Twin):
    """Rows by key: added to, removed, evicted."""

    options: dict[str, Any] = {}  # noqa: RUF012

    def make(self, name: str) -> None:
        self.table = mv.KeyedTable(2, session=self.session, name=name, **self.options)

    def calls(self) -> list[Callable[[], Any]]:
        keys = np.random.default_rng(self.number).integers(0, 60, 8)
        delta = np.resize(self.mine(), (8, 2))
        calls: list[Callable[[], Any]] = [
            lambda: self.table.add(delta, keys),
            lambda: self.table.get(keys),
            lambda: self.table.remove(keys[:3]),
            lambda: float(self.table.tick()),
        ]
        return calls[:2] if self.session.consistency.in_rounds else calls

    def seen(self) -> Any:
        rows = {
            key: row for batch in self.table.items() for key, row in zip(*map(np.ndarray.tolist, batch), strict=True)
        }
        statistics = self.table.stats()
        counted = [statistics[what] for what in ("keys", "adds", "rows_added", "keys_removed", "keys_evicted")]
        return super().seen(), rows, counted, self.table.ticks


class KeyedWithState(Keyed):
    options = {  # noqa: RUF012
        "updater": "adagrad",
        "initial": "uniform",
        "admission": 2,
        "eviction": mv.Eviction(idle_ticks=4),
    }


class KeyedOnHosts(Keyed):
    """Rows of which half live on another host, whose worker does nothing."""

    hosts = 2

    def seen(self) -> Any:
        keys = np.arange(60)
        return Twin.seen(self), self.table.get(keys).tolist(), self.table.contains(keys).tolist(), self.table.ticks


class Sharing(Twin):
    """A model's arrays of several dtypes, with statistics: views, and values that are handed over."""

    def make(self, name: str) -> None:
        dtypes, rule = ("f4", "f8"), mv.rules.easgd(0.25)
        self.views = SharedParams(
            [self.mine().astype(dtype) for dtype in dtypes], [self.mine(1)], rule=rule, session=self.session
        )
        given = [self.mine().astype(dtype) for dtype in ("f2", *dtypes)]
        self.handed = SharedParams(given, [np.abs(self.mine(1)), np.ones(3, "f2")], every=2, session=self.session)
        self.values = self.handed.values()
        given = [self.mine().astype(dtype) for dtype in dtypes]
        self.parted = SharedParams(given, every=4, fragments=2, session=self.session)

    def _sync(self) -> None:
        self.values = self.handed.sync(self.values)

    def calls(self) -> list[Callable[[], Any]]:
        for array in self.views.arrays + self.views.statistics + self.parted.arrays:
            array += self.mine().astype(array.dtype)
        self.values = [value + np.resize(self.mine(), value.shape).astype(value.dtype) for value in self.values]
        parted = [self.parted.step, self.parted.step, self.parted.step, self.parted.exchange]
        return [self.views.exchange, self._sync, self.views.step, self.views.exchange, *parted]

    def seen(self) -> Any:
        arrays = [*self.views.arrays, *self.views.statistics, *self.values, *self.views.centre(), *self.handed.centre()]
        arrays += [*self.parted.arrays, *self.parted.centre()]
        counted = []
        for shared in (self.views, self.handed, self.parted):
            tables = shared.saved_tables().values()
            counted += [counts_of(self.session, table, "exchanges", "clock") for table in tables]
        return [array.tolist() for array in arrays], counted


def ruled(rule: Any) -> type[Twin]:
    return type("Ruled", (Ruled,), {"rule": rule})


KINDS: dict[str, type[Twin]] = {
    "add": Adding,
    "sgd": type("Sgd", (Adding,), {"updater": "sgd"}),
    "large": Large,
    "exchange": Exchanging,
    "nesterov": WithState,
    "asgd": ruled(mv.rules.asgd()),
    "easgd": ruled(mv.rules.easgd(0.25)),
    "downpour": ruled(mv.rules.downpour(fetch=3, push=2)),
    "averaging": ruled(mv.rules.model_averaging()),
    "local sgd": ruled(mv.rules.local_sgd()),
    "meeting": Meeting,
    "rows": Rows,
    "sharing": Sharing,
    "keyed": Keyed,
    "keyed adagrad": KeyedWithState,
    "keyed on two hosts": KeyedOnHosts,
}
ONLY = {
    "keyed": ("async", "sync"),
    "keyed adagrad": ("async",),
    "keyed on two hosts": ("async",),
    "averaging": ("sync",),
    "local sgd": ("sync",),
    "meeting": ("async",),
}
CASES = [(kind, mode) for kind in KINDS for mode in ONLY.get(kind, tuple(MODES))]


@dataclass
class Pair:
    """This worker's twins, and the other worker, in a thread, where there are rounds.

    The other one does each step once when it is told; so a round too many waits in vain. On another host it does none.
    """

    twins: tuple[Twin, Twin]
    go: list[queue.Queue[bool]]

    def step(self, interrupt: Interrupter) -> bool:
        """Does one step with both; the first is interrupted, and each call repeated until it returns.

        Returns:
            Whether any call was interrupted.
        """
        for go in self.go:
            go.put(True)
        interrupted = False
        for number, twin in enumerate(self.twins):
            for call in twin.calls():
                while True:
                    try:
                        said = call() if number else interrupt(call)
                    except Interruption:
                        interrupted = True
                        continue
                    break
                if isinstance(said, np.ndarray):
                    twin.said = [*twin.said[-4:], said.astype("f8")]
            twin.number += 1
        one, other = (twin.seen() for twin in self.twins)
        assert one == other, f"step {self.twins[0].number}: {one} was interrupted, {other} was not"
        return interrupted


@contextmanager
def pair(kind: str, mode: str) -> Iterator[Pair]:
    """Makes the twins, in a job of one worker, or of two where they meet."""
    make = KINDS[kind]
    workers = 2 if mode == "sync" or kind == "meeting" or make.hosts == 2 else 1
    errors: list[BaseException] = []

    def twins_of(session: Session) -> tuple[Twin, Twin]:
        return make(session, "one"), make(session, "other")

    def other(address: str, go: queue.Queue[bool]) -> None:
        try:
            with Session(address, 1, timeout_seconds=60, **MODES[mode]) as session:
                twins = twins_of(session)
                while go.get():
                    for twin in twins if make.hosts == 1 else ():
                        for call in twin.calls():
                            call()
                        twin.number += 1
        except BaseException as error:
            errors.append(error)

    with ExitStack() as stack:
        if make.hosts == 1:
            nodes = [stack.enter_context(Node(workers))] * workers
        else:
            _, nodes = stack.enter_context(hosts_here((1, 1)))
        go: list[queue.Queue[bool]] = [queue.Queue() for _ in range(workers - 1)]
        threads = [threading.Thread(target=other, args=(nodes[1].address, one)) for one in go]
        for thread in threads:
            thread.start()
        try:
            with Session(nodes[0].address, 0, timeout_seconds=20, **MODES[mode]) as session:
                yield Pair(twins_of(session), go)
        finally:
            for one in go:
                one.put(False)
            for thread in threads:
                thread.join(60)
    if errors:
        raise errors[0]
