"""Snapshots of real jobs: what was waited for and for whom; a past in bounded memory; what happened meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
from core_support import let_die, together, wait_for
from hypothesis import given
from hypothesis import strategies as st

from multiverso.runtime import Node, Session
from multiverso.tables import ArrayTableHandler, KeyedTable
from multiverso.tables.log import log_of
from multiverso.watching.history import Event, History
from multiverso.watching.slowest import Busiest, Slowest, busiest, ending, slowest
from multiverso.watching.snapshot import Link, Observer, Snapshot, Worker, kind_of

IDLE = Worker(
    id=0,
    pid=7,
    host="",
    program="train.py",
    state="alive",
    incarnation=0,
    waiting_for="",
    waiting_seconds=0.0,
    needs=[],
    waited_seconds=0.0,
    cost_seconds=0.0,
    adds=0.0,
    gets=0.0,
    exchanges=0.0,
    bytes=0.0,
    staleness=0.0,
    cpu_seconds=0.0,
    resident_bytes=0,
    checkpoint=0,
    step=None,
    values={},
)


WORKER = {"program": "train.py", "host": None, "state": "alive", "incarnation": 0, "checkpoint": 0, "logged": None}
WORKER |= {"waiting_for": None, "waiting_seconds": 0.0, "waited_seconds": 0.0, "needs": []}
WORKER |= {"cpu_seconds": 0.0, "resident_bytes": 0}
TABLE = {"name": "w", "kind": "array", "shape": [3], "dtype": "float32", "updater": "add", "rounds": 0}
JOB = {"address": "a", "host": None, "workers_num": 1, "up_seconds": 1.0, "memory_bytes": 0, "links": []}


def moment(at: float, *workers: Worker, **changes: Any) -> Snapshot:
    known: dict[str, Any] = {"address": "a", "host": "", "workers_num": 2, "memory_bytes": 0, "checkpoint": 0}
    known |= {"tables": [], "links": [], "waited_for": {}}
    return Snapshot(at=at, up_seconds=at, workers=list(workers), **{**known, **changes})


def changed(worker: Worker, **changes: Any) -> Worker:
    return msgspec.structs.replace(worker, **changes)


def test_a_snapshot_says_who_waits_for_whom_and_what_that_costs() -> None:
    go = threading.Event()
    with Node(3) as node:

        def work(session: Session) -> Snapshot | None:
            table = ArrayTableHandler(5, session=session, name="weights")
            table.add(np.ones(5))
            log_of(session).write({"loss": float("nan") if session.worker_id else 0.5}, 3)
            if session.worker_id != 2:
                session.barrier()
                return None
            watching = Observer()  # from here on: before, a worker may have waited for its table
            waiting = lambda: [worker["waiting_for"] for worker in node.status()["workers"]]  # noqa: E731
            wait_for(lambda: waiting() == ["barrier 1", "barrier 1", None])
            # the first look counts all that a worker has waited so far
            wait_for(lambda: slowest(None, watching.see(node.status())) is not None)
            wait_for(lambda: watching.see(node.status()).workers[0].waiting_seconds > 0.05)
            go.set()
            session.barrier()
            return watching.last

        *_, seen = together(work, 3, node=node)
    assert go.is_set()
    assert seen is not None
    first, _, last = seen.workers
    assert (first.needs, first.waiting_for, last.waiting_for) == ([2], "barrier 1", "")
    assert first.waited_seconds >= first.waiting_seconds > 0.05
    assert first.cost_seconds == 0.0 < last.cost_seconds
    assert seen.waited_for.keys() == {"barrier"}
    assert abs(sum(seen.waited_for.values()) - last.cost_seconds) < 1e-6
    assert [worker.values["loss"] for worker in seen.workers] == [0.5, None, None], "no number is nothing"
    assert (first.adds, first.step, first.operations) == (1, 3, 1)
    assert first.resident_bytes > 1_000_000 < last.cpu_seconds * 1e9
    (table,) = seen.tables
    assert (table.name, table.shape, table.adds) == ("weights", [5], 3)
    found = slowest(None, seen)
    assert found is not None
    assert found.worker == 2
    assert "worker 2 is the slowest: the others spend" in str(found)


def test_what_a_node_of_a_newer_version_says_beside_is_left_out() -> None:
    with Node(1) as node:
        status = node.status()
    link = {"host": "b", "state": "connected", "connections": 1, "bytes_sent": 2, "bytes_received": 3, "new": 4}
    seen = Observer().see(status | {"links": [link], "new": 5})
    assert seen.links == [Link("b", "connected", 1, 2.0, 3.0)]


def test_keyed_tables_show_the_keys_that_have_a_row() -> None:
    with Node(2) as node:

        def work(session: Session) -> Any:
            table = KeyedTable(3, session=session, name="words")
            table.add(np.ones((10, 3)), np.arange(10) + 5 * session.worker_id)
            session.barrier()
            if session.worker_id == 0:
                table.remove([0, 1])
                return Observer().see(node.status())
            session.barrier()
            return None

        def both(session: Session) -> Any:
            found = work(session)
            if session.worker_id == 0:
                session.barrier()
            return found

        seen, _ = together(both, 2, node=node)
    (table,) = seen.tables
    assert (table.name, table.kind, table.shape, table.dtype) == ("words", "keyed", [13, 3], "float32")
    assert (table.adds, table.bytes) == (2, 20 * 3 * 4)
    assert [worker.adds for worker in seen.workers] == [1, 1]


def test_the_memory_of_tables_is_also_that_of_rows_by_key() -> None:
    with Node(1) as node:

        def work(session: Session) -> None:
            table, sizes = KeyedTable(1000, session=session), [Observer().see(node.status()).memory_bytes]
            table.add(np.ones((1000, 1000)), np.arange(1000))
            sizes.append(Observer().see(node.status()).memory_bytes)
            assert sizes[1] - sizes[0] >= 4_000_000
            assert sizes[1] >= table.stats()["bytes"]
            table.close()
            wait_for(lambda: Observer().see(node.status()).memory_bytes < sizes[0])

        together(work, 1, node=node)


def test_a_wait_is_called_the_same_whatever_its_numbers() -> None:
    assert kind_of("round 17 of weights") == "round of weights"
    assert kind_of("barrier 3") == "barrier"
    assert kind_of("a lock of w2 that process 71 holds") == "a lock of w2"
    assert kind_of("the creation of table number 3") == "the creation of a table"
    assert kind_of("step 2 of a reduction by 4 workers") == "a reduction"
    assert kind_of("round 17 of layer 2") == "round of layer 2", "a table's name is kept as it is"


def test_the_last_line_leaves_out_waits_that_took_no_time() -> None:
    waits = {"the creation of a table": 0.01, "round of weights": 3.0}
    assert ending(moment(10, IDLE, waited_for=waits)).endswith("; waited for, over all workers: round of weights 3.0 s")
    assert "waited for" not in ending(moment(10, IDLE, waited_for={"barrier": 0.0}))


def test_the_slowest_is_who_is_waited_for_or_does_much_less() -> None:
    fast, slow = changed(IDLE, adds=1000.0), changed(IDLE, id=1, adds=400.0)
    assert slowest(None, moment(10, fast, slow)) == Slowest(1, 0.0, 0.4)
    assert slowest(None, moment(10, fast, changed(slow, adds=900.0))) is None
    assert slowest(None, moment(10, fast)) is None
    before, now = moment(10, fast, slow), moment(20, fast, changed(slow, adds=1400.0, cost_seconds=4.0))
    assert slowest(before, now) == Slowest(1, 0.4)
    again = moment(5, fast, changed(slow, adds=990.0), restarts=1)
    assert slowest(before, again) is None, "what another start did does not count"
    begun = moment(20, changed(fast, adds=2000.0), changed(slow, adds=9.0))
    assert slowest(None, begun) is None, "it has hardly begun"
    assert slowest(before, moment(20, changed(fast, adds=2000.0), slow)) == Slowest(1, 0.0, 0.0), "it is stuck"
    for one in (changed(slow, pid=8, incarnation=1, adds=50.0), changed(slow, id=2, adds=50.0)):
        assert slowest(before, moment(20, changed(fast, adds=2000.0), one)) is None, "it came meanwhile"
    free = [changed(IDLE, id=i, pid=0, state="free") for i in range(2)]
    assert slowest(moment(1, *free), moment(10, fast, slow)) == Slowest(1, 0.0, 0.4), "the job's beginning"
    over = [changed(fast, id=i, state="left") for i in (0, 2)]
    ended = [changed(worker, state="ended") for worker in (fast, changed(fast, id=2), slow)]
    assert slowest(None, moment(20, *ended)) == Slowest(1, 0.0, 0.4), "all were ended together"
    failed = changed(slow, state="failed", cost_seconds=9.0)
    assert slowest(None, moment(20, *ended[:2], failed)) is None, "the others were ended because of it"
    assert ending(moment(20, ended[0], failed)) == "2 workers ran for 20.0 s", "one alone is not compared"
    assert slowest(None, moment(20, *(changed(one, state="lost") for one in ended))) is None, "nobody knows when"
    assert slowest(None, moment(20, *over, changed(slow, state="lost"))) is None, "it has failed"
    assert slowest(None, moment(20, *over, changed(slow, state="left", incarnation=1))) is None, "another one began"
    assert slowest(None, moment(20, *over, changed(slow, state="left"))) == Slowest(1, 0.0, 0.4)
    few = moment(1, changed(fast, adds=9.0), changed(slow, adds=1.0))
    assert slowest(None, few) is None


def test_who_has_become_slow_is_named_by_the_last_seconds() -> None:
    history = History()
    for look in range(41):
        slowed = 10 * look if look <= 32 else 320 + 4 * (look - 32)  # 20 a second, and 8 from the 16th second on
        both = changed(IDLE, adds=10.0 * look), changed(IDLE, id=1, adds=float(slowed))
        history.add(moment(look / 2, *both))
        if look == 32:
            assert history.slowest is None
    assert history.slowest is not None
    assert (history.slowest.worker, round(history.slowest.pace, 1)) == (1, 0.4)


def test_a_connection_that_is_busy_nearly_all_the_time_is_named() -> None:
    def links(*busy_seconds: float) -> list[Link]:
        return [Link(f"host-{i}", "connected", 1, 0.0, 0.0, busy) for i, busy in enumerate(busy_seconds, 1)]

    before = moment(10, IDLE, links=links(5, 9))
    assert busiest(before, moment(20, IDLE, links=links(14.5, 14))) == Busiest("host-1", 0.95)
    assert "the network is the limit: the connection to host-1 is busy 95% of" in str(Busiest("host-1", 0.95))
    assert busiest(before, moment(20, IDLE, links=links(12, 16))) is None
    assert busiest(None, moment(20, IDLE, links=links(20))) is None
    back = [msgspec.structs.replace(link, busy_back_seconds=9.0) for link in links(6, 10)]
    assert busiest(before, moment(20, IDLE, links=back)) == Busiest("host-1", 0.9, "from")
    # rounds use one way after the other: where all wait, both count together
    both = [msgspec.structs.replace(link, busy_back_seconds=4.5) for link in links(9.5, 9)]
    assert busiest(before, moment(20, IDLE, changed(IDLE, id=1), links=both)) is None
    waiting = [changed(IDLE, id=i, waited_seconds=9.0, cost_seconds=5.0) for i in range(2)]
    now = moment(20, *waiting, links=both)
    assert busiest(moment(10, IDLE, changed(IDLE, id=1), links=links(5, 9)), now) == Busiest("host-1", 0.9, "with")
    assert slowest(moment(10, IDLE, changed(IDLE, id=1)), now) is None, "who waits most of the time holds nobody up"


def test_nothing_is_said_of_a_network_that_was_looked_at_for_a_moment() -> None:
    history, way = History(), Link("host-1", "connected", 1, 0.0, 0.0)
    for at in (1.0, 1.09):
        busy = msgspec.structs.replace(way, busy_seconds=at)
        history.add(moment(at, changed(IDLE, adds=at), links=[busy]))
    assert history.busiest is None
    assert history.now is not None
    history.add(msgspec.structs.replace(history.now, over="all workers have finished"))
    assert history.busiest is None


def test_what_the_network_was_like_is_known_when_the_job_is_over() -> None:
    """Connections end before the job does, and with them went the verdict; a file did not say how busy they were."""
    history, way = History(), Link("host-1", "connected", 1, 0.0, 0.0)
    for look in range(100):
        busy = msgspec.structs.replace(way, busy_seconds=0.475 * min(look, 90), busy_back_seconds=0.1 * look)
        history.add(moment(look / 2, changed(IDLE, adds=float(look)), links=[busy]))
        if look == 60:
            assert history.busiest == Busiest("host-1", 0.95)
    gone = changed(IDLE, adds=99.0, state="left")
    last = moment(50.0, gone, links=[msgspec.structs.replace(busy, state="ended")])
    history.add(last)
    assert history.busiest is None
    history.add(msgspec.structs.replace(last, over="all workers have finished"))
    assert history.busiest is not None
    assert (history.busiest.host, round(history.busiest.share, 2)) == ("host-1", 0.86), "of all the time"
    there = history.points[60].links["host-1"]
    assert (there.busy_seconds, there.busy_back_seconds) == (28.5, 6.0)


def test_who_uses_tables_less_and_steps_as_fast_is_not_slow() -> None:
    before = [changed(IDLE, id=i, step=5) for i in range(2)]
    now = [changed(IDLE, id=i, step=105, adds=100.0 + 900 * i) for i in range(2)]
    assert slowest(moment(10, *before), moment(20, *now)) is None
    assert slowest(moment(10, *before), moment(20, now[0], changed(now[1], step=30))) == Slowest(1, 0.0, 0.25)


def test_staleness_is_of_the_last_reads() -> None:
    def status(pushes: float, reads: int, **table: Any) -> dict[str, Any]:
        line = {"adds": 5, "gets": reads, "exchanges": 0, "bytes": 0, "wait_seconds": 0.0}
        line |= {"staleness_mean": pushes / max(1, reads), "staleness_reads": reads}
        unused = {**line, "gets": 0, "staleness_mean": 0.0, "staleness_reads": 0}
        worker = {**WORKER, "id": 0, "pid": 7}
        tables = [{**TABLE, "id": i, "workers": {0: one}} for i, one in ((1, line), (2, unused))]
        return {**JOB, "workers": [worker], "tables": tables}

    observer = Observer()
    assert observer.see(status(200, 100)).workers[0].staleness == 2.0
    assert round(observer.see(status(500, 110)).workers[0].staleness, 6) == 30.0
    assert round(observer.see(status(500, 110)).workers[0].staleness, 6) == 30.0
    replaced = observer.see(status(6, 2))
    assert replaced.workers[0].staleness == 3.0, "another process in its place"
    assert replaced.tables[0].gets == 112, "a table's totals never fall"
    assert replaced.tables[0].adds == 5, "a count that goes on in the next one"


def test_what_a_dead_worker_logged_is_not_its_successors() -> None:
    """It stood there until that one logged: a step that fell, and a worker that was called the slowest."""
    observer = Observer()

    def seen(pid: int, step: int) -> tuple[int | None, dict[str, float | None]]:
        worker = {**WORKER, "id": 0, "pid": pid, "logged": {"step": step, "values": {"loss": 0.5}}}
        now = observer.see({**JOB, "tables": [], "workers": [worker]}).workers[0]
        return now.step, now.values

    assert seen(7, 500) == (500, {"loss": 0.5})
    assert seen(8, 500) == seen(8, 500) == (None, {})
    assert seen(8, 1) == (1, {"loss": 0.5})


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=200), st.integers(4, 20))
def test_a_past_of_any_length_is_kept_in_bounded_memory_from_its_beginning_on(steps: list[float], most: int) -> None:
    history, at = History(most), 0.0
    for step in steps:
        at += step
        history.add(moment(at, changed(IDLE, adds=at)))
        assert len(history.points) <= most
        times = [point.at for point in history.points]
        assert times == sorted(times)
        assert times[0] == round(steps[0], 2)
        assert all(abs(point.workers[0].operations - point.at) < 0.01 for point in history.points)
    history.add(moment(at + 1e-3, IDLE, over="the job is over"))
    assert history.points[-1].at == round(at + 1e-3, 2), "the end is kept"


def test_what_happened_between_two_looks_is_told_in_words() -> None:
    history = History()
    one, two, three = (changed(IDLE, id=i, pid=10 + i) for i in range(3))

    def told(*workers: Worker, **changes: Any) -> list[tuple[str, bool]]:
        news = history.add(moment(len(history.points), *workers, **changes))
        return [(event.text, event.bad) for event in news]

    assert told(one, two, three) == [("workers 0 to 2 have joined", False)]
    assert told(one, two, three) == []
    assert told(one, changed(two, state="lost"), three) == [("worker 1 (pid 11) was lost", True)]
    anew = changed(two, incarnation=1, pid=20)
    assert told(one, anew, three) == [("worker 1 (pid 20) has taken the place of the one that was lost", False)]
    both = [changed(worker, state="lost") for worker in (one, three)]
    before = moment(99, one, two, three)
    together = History()
    together.add(before)
    assert together.add(moment(100, both[0], two, both[1], lost=[2, 0])) == [
        Event(100, "worker 2 (pid 12) was lost first", bad=True),
        Event(100, "worker 0 (pid 10) was lost", bad=True),
    ]
    killed = changed(anew, incarnation=2, pid=30)
    assert [bad for _, bad in told(one, killed, three)] == [True, False], "it died and came again between two looks"
    assert told(one, killed, three, checkpoint=4) == [("checkpoint 4 is written by all workers", False)]
    assert told(one, killed, three, checkpoint=3) == told(one, killed, three, checkpoint=4) == [], "said already"
    gone = [changed(worker, state="left") for worker in (one, killed, three)]
    assert told(*gone, checkpoint=4) == [("workers 0 to 2 have left", False)]
    assert told(one, restarts=1)[0] == ("the job was started again", True)
    assert told(one, restarts=1, over="the job is over") == [("the job is over", False)]
    assert len(history.events) == 10
    assert told(one, restarts=1) == []
    assert told(one, restarts=1, over="worker 0 failed", well=False) == [("worker 0 failed", True)]


def test_a_worker_that_dies_is_seen_as_lost() -> None:
    with Node(2, on_lost="continue") as node:
        watching, history = Observer(), History()

        def work(session: Session) -> None:
            session.barrier()
            history.add(watching.see(node.status()))
            session.barrier()
            if session.worker_id:
                let_die(session)
                return
            wait_for(lambda: [worker.state for worker in watching.see(node.status()).workers] == ["alive", "lost"])

        together(work, 2, node=node)
        assert watching.last is not None
        assert [event.text for event in history.add(watching.last) if event.bad] == [
            f"worker 1 (pid {watching.last.workers[1].pid}) was lost"
        ]
