"""An exception between any two steps (Ctrl-C, an alarm's handler) while something begins or ends.

The k-th moment at which the interpreter would look for signals, in the package's code in the calling thread,
raises. Where all k would take long, a few dozen are tried; others with MULTIVERSO_TEST_INTERRUPTIONS=1000.
"""

from __future__ import annotations

import dis
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from core_support import in_threads, wait_for

import multiverso as mv
from multiverso.runtime import Node, Session
from multiverso.tables.save_all import handlers

# what was just made is let go by Python itself when the exception comes before it has a name
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
PACKAGE = str(Path(mv.__file__).parent)
NUMPY = str(Path(np.__file__).parent)
POINTS = int(os.environ.get("MULTIVERSO_TEST_INTERRUPTIONS", "40"))


# after these the interpreter looks for signals; between others, as in the way out of a `with`, it never does
LOOKS = re.compile("CALL|RESUME|JUMP_BACKWARD")


class Interruption(Exception):
    """Stands for KeyboardInterrupt, and for what no handler of all exceptions may swallow either."""


def run(function: Callable[[], Any], at: int | None) -> int:
    """Calls a function, which is interrupted at its ``at``-th moment; returns how many there were."""
    count = 0
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "opcode":
            before = last.get(frame)
            last[frame] = frame.f_lasti
            if before is None or LOOKS.match(dis.opname[frame.f_code.co_code[before]]):
                count += 1
                if count == at:
                    raise Interruption
        return step

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        # a descriptor that the system has handed over belongs to nobody for a few bytecodes; only C could mend that
        if not code.co_filename.startswith((PACKAGE, NUMPY)) or code.co_name in ("receive", "_received"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    before = sys.gettrace()
    sys.settrace(call)
    try:
        function()
    except Interruption:
        pass
    finally:
        sys.settrace(before)
        last.clear()
    return count


def points(total: int, most: int = POINTS) -> Iterator[int]:
    """At most so many of the numbers from 1 to ``total``: the first, the last, and others evenly between."""
    return iter(sorted({1, total, *(int(x) for x in np.linspace(1, total, min(total, most)))}))


def held() -> tuple[set[str], set[str]]:
    """This process's threads and descriptors."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            files.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # the listing's own
            continue
    return {f"{t.name} {t.ident}" for t in threading.enumerate()}, files


def settle(before: tuple[set[str], set[str]], at: int) -> None:
    """Waits until this process holds no more than before."""

    def settled() -> bool:
        return not any(now - then for now, then in zip(held(), before, strict=True))

    if settled():
        return
    try:
        gc.collect()  # what the frames of an exception refer to may be a cycle
        wait_for(settled, 15)
    except AssertionError:
        left = [now - then for now, then in zip(held(), before, strict=True)]
        pytest.fail(f"an interruption at {at} leaves {left}")


def test_init_leaves_nothing_and_can_be_repeated() -> None:
    total = run(mv.init, None)
    mv.shutdown()
    before = held()
    for at in points(total):
        run(mv.init, at)
        mv.shutdown()  # where there are fewer of them than the first time, it has not been interrupted
        settle(before, at)
        mv.init()
        assert mv.workers_num() == 1
        mv.shutdown()
        settle(before, at)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a trace that was interrupted shows fewer moments at first")
def test_a_repeated_call_that_is_interrupted_once_more_is_no_other_call(alone: Session) -> None:
    """What NumPy swallows while the arguments are compared was taken for a difference: it was added twice."""

    def add(table: Any) -> None:
        table.add(delta)

    delta = np.ones(3, "int64")

    def new() -> Any:
        return mv.ArrayTableHandler(3, dtype="int64", session=alone)

    def is_added(at: int) -> bool:
        run(partial(add, table := new()), at)
        return bool(table.snapshot()[0])

    added = next(filter(is_added, range(1, 200)))
    for at in range(1, 200):
        table = new()
        run(partial(add, table), added)  # it has not returned
        total = run(partial(add, table), at)
        assert table.snapshot().tolist() == [1, 1, 1], at
        table.close()
        if total < at:
            break


def test_a_session_that_is_interrupted_while_it_begins_lets_its_place_go() -> None:
    with Node(None) as node:
        before = held()
        made: list[Session] = []
        total = run(lambda: made.append(Session(node.address)), None)
        made.pop().shutdown()
        for at in points(total):
            run(lambda: made.append(Session(node.address)), at)
            for session in made:
                session.shutdown()
            made.clear()
            wait_for(lambda: not node.live_workers())
            settle(before, at)


def test_shutdown_has_ended_the_session_when_it_raises() -> None:
    with Node(None) as node, Session(node.address) as other:

        def begun() -> Session:
            session = Session(node.address)
            mv.ArrayTableHandler(3, name="w", session=session).add_async(np.ones(3))
            return session

        before = held()
        session = begun()
        total = run(session.shutdown, None)
        for at in points(total):
            session = begun()
            run(session.shutdown, at)
            if session.closed is None:  # it had not begun
                session.shutdown()
            wait_for(lambda: node.live_workers() == [other.worker_id])
            session.shutdown()
            settle(before, at)
        other.barrier(30)


@pytest.mark.parametrize("initial", ["master", "sum"])
def test_a_creation_that_was_interrupted_is_finished_by_the_same_call(initial: str) -> None:
    """Nobody waits for ever meanwhile, and every initial value counts once."""
    table_of = {"master": [1.0, 1.0, 1.0], "sum": [3.0, 3.0, 3.0]}
    with Node(2) as node:

        def make(session: Session) -> mv.ArrayTableHandler:
            value = np.full(3, session.worker_id + 1.0)
            return mv.ArrayTableHandler(3, value, initial=initial, session=session)

        go, rounds = threading.Semaphore(0), []

        def helper() -> None:
            with Session(node.address, 1, timeout_seconds=60) as session:
                while go.acquire(timeout=60) and rounds:
                    with make(session) as table:
                        assert table.get().tolist() == table_of[initial]
                        session.barrier()

        def interrupted() -> None:
            with Session(node.address, 0, timeout_seconds=60) as session:
                rounds.append(None)

                def once(at: int | None) -> int:
                    go.release()
                    count = run(lambda: make(session), at)
                    # an exception after the last step finds the table made
                    table: Any = handlers(session)[-1] if handlers(session) else make(session)
                    assert table.get().tolist() == table_of[initial]
                    session.barrier()
                    table.close()
                    return count

                try:
                    once(None)
                    for at in points(once(None), 3000):
                        once(at)
                finally:
                    rounds.clear()
                    go.release()

        in_threads([helper, interrupted], 120)


def test_an_error_in_a_workers_own_initial_value_names_it_to_the_others() -> None:
    """A value whose conversion fails: the others wait for this worker to call again, and it may."""

    def work(session: Session) -> Any:
        if session.worker_id == 0:
            with pytest.raises(ValueError, match="the user's own"):
                mv.ArrayTableHandler(3, _Bad(), session=session)
        return mv.ArrayTableHandler(3, [4, 5, 6], session=session).get().tolist()

    from core_support import together

    assert together(work, 2) == [[4.0, 5.0, 6.0]] * 2


class _Bad:
    def __array__(self, *arguments: Any, **named: Any) -> Any:
        raise ValueError("the user's own")


def test_an_interrupted_start_of_a_whole_job_is_no_lost_worker() -> None:
    """The others wait on, and the same process may come again."""
    options: dict[str, Any] = {"start_timeout_seconds": 30, "timeout_seconds": 30}

    def job(at: int | None) -> int:
        total = 0
        with Node(2) as node:

            def first() -> None:
                with Session(node.address, 0, **options) as session:
                    mv.ArrayTableHandler(3, session=session)
                    session.barrier()
                    assert session.live_workers() == [0, 1]
                    session.barrier()

            def second() -> None:
                nonlocal total
                made: list[Session] = []
                total = run(lambda: made.append(Session(node.address, 1, **options)), at)
                with made[0] if made else Session(node.address, 1, **options) as session:
                    mv.ArrayTableHandler(3, session=session)
                    session.barrier()
                    session.barrier()

            in_threads([first, second])
        return total

    for at in points(job(None)):
        job(at)


LINKS_IN_A_STORM = """
import random, signal, sys
import numpy as np
import multiverso as mv
from multiverso.compiling.on_demand import load_module

class Alarm(BaseException):
    pass

def ring(number, frame):
    while frame is not None:
        if "multiverso" in frame.f_code.co_filename:
            raise Alarm
        frame = frame.f_back

mv.init()
names = ("dense", "rows", "rounds.calls", "rules", "reduce", "between_hosts.agreeing")
groups = [(name, dtype) for name in names for dtype in ("float32", "float64")]
chance, alarms = random.Random(int(sys.argv[1])), 0
signal.signal(signal.SIGALRM, ring)
for name, dtype in groups:
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.random() * 0.004 + 1e-5, 0.0007)
            load_module(f"multiverso.kernels.{name}", dtype)
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except Alarm:
            alarms += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if alarms % 30 == 0:  # so that it ends on any machine; an alarm may still be on its way
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                load_module(f"multiverso.kernels.{name}", dtype)
                signal.signal(signal.SIGALRM, ring)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
table = mv.ArrayTableHandler(3, dtype="float32")
table.add([1, 2, 3])
print(alarms > 0, table.get().tolist())
mv.shutdown()
"""


@pytest.mark.parametrize("seed", range(3))
def test_kernels_are_linked_in_a_storm_of_signals(seed: int) -> None:
    """llvmlite frees memory twice where an exception comes in the middle: this aborted eight of nine processes."""
    done = subprocess.run(
        [sys.executable, "-c", LINKS_IN_A_STORM, str(seed)], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "True [1.0, 2.0, 3.0]"), done.stderr
