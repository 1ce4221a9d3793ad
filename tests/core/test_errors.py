"""Every error of the tree is raised by something that a user can do (each is provoked here, or where it says)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_support import let_die, outcome, together, wait_for

import multiverso as mv
from multiverso import errors
from multiverso.layout import words as at
from multiverso.runtime import JobLock, Node, Session

ELSEWHERE = {"WorkerFailedError": "tests/launch/test_function.py"}


def _closed() -> None:
    with Node(1) as node:
        session = Session(node.address)
        session.shutdown()
        session.barrier()


def _lost() -> Any:
    def work(session: Session) -> Any:
        if session.worker_id == 1:
            let_die(session)
            wait_for(lambda: session.control.liveness(1) == at.LOST)
            return None
        return outcome(session.barrier)

    raise together(work, 2)[0]


def _node_lost() -> None:
    node = Node(1)
    session = Session(node.address)
    node.close()
    try:
        mv.ArrayTableHandler(3, session=session)
    finally:
        session.shutdown()


def _alone(call: Callable[[Session], Any], **options: Any) -> Callable[[], None]:
    def run() -> None:
        with Node(1) as node, Session(node.address, **options) as session:
            call(session)

    return run


def _timeout() -> None:
    with Node(2) as node:
        Session(node.address, 0, start_timeout_seconds=0.2)


def _deadlock() -> None:
    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        return outcome(table.get if session.worker_id else session.barrier)

    # who is told first leaves, and the other may then go on
    raise next(error for error in together(work, 2, sync=True) if isinstance(error, Exception))


def _interrupted() -> None:
    import threading

    done = threading.Event()

    def work(session: Session) -> Any:
        table = mv.ArrayTableHandler(1, session=session)
        if session.worker_id:
            done.wait(30)
            return None
        outcome(lambda: table.get(timeout_seconds=0.1))
        error = outcome(lambda: table.add([1]))
        done.set()
        return error

    raise together(work, 2, sync=True)[0]


def _mismatch() -> None:
    raise together(lambda s: outcome(lambda: mv.ArrayTableHandler(1 + s.worker_id, session=s)), 2)[0]


PROVOKED: dict[str, Callable[[], Any]] = {
    "StartupError": lambda: mv.init(sync=True, staleness=1),
    "NotInThisJobError": _alone(lambda s: mv.KeyedTable(4, session=s), staleness=1),
    "NoSuchTableError": lambda: mv.attach_read_only("nobody has it"),
    "NotInitializedError": lambda: mv.current(),
    "ClosedError": _closed,
    "InterruptedRoundError": _interrupted,
    "LockStateError": _alone(lambda s: JobLock(s, "a lock").release()),
    "WorkerLostError": _lost,
    "NodeLostError": _node_lost,
    "WaitTimeoutError": _timeout,
    "DeadlockError": _deadlock,
    "ShapeMismatchError": _alone(lambda s: mv.ArrayTableHandler(3, session=s).add([1])),
    "DtypeMismatchError": _alone(lambda s: mv.ArrayTableHandler(1, session=s).add([1j])),
    "RowIdError": _alone(lambda s: mv.MatrixTableHandler(1, 1, session=s).get([1])),
    "TableMismatchError": _mismatch,
    "OutOfMemoryError": _alone(lambda s: mv.ArrayTableHandler(10**14, session=s)),
    "SnapshotError": _alone(lambda s: mv.ArrayTableHandler(1, session=s).load("/nonexistent")),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_each_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverso.runtime.session.current._over", None)
    with pytest.raises(errors.MultiversoError) as raised:
        PROVOKED[name]()
    assert type(raised.value).__name__ == name
    assert len(str(raised.value)) > 30
    del raised


def test_none_is_forgotten() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.MultiversoError)
    }
    assert classes - {"MultiversoError"} == set(PROVOKED) | set(ELSEWHERE)
    for name, place in ELSEWHERE.items():
        text = (Path(__file__).parents[2] / place).read_text()
        assert f"raises(multiverso.errors.{name}" in text or f"raises({name}" in text or f".{name}" in text
    assert all(name in str(errors.__doc__) for name in classes)


def test_the_tree_is_drawn_with_everything_that_it_has() -> None:
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
    assert issubclass(errors.ShapeMismatchError, ValueError)
    assert issubclass(errors.DtypeMismatchError, TypeError)
    assert issubclass(errors.RowIdError, IndexError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert errors.WorkerLostError("w", [3, 1]).worker_ids == (3, 1)
