"""`multiverso.run(function)`: call a function in several workers, from a script, a notebook or a test."""

import importlib.machinery
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from multiverso.errors import (
    DeadlockError,
    NodeLostError,
    StartupError,
    WaitTimeoutError,
    WorkerFailedError,
    WorkerLostError,
)
from multiverso.launch.job import Job, JobResult, OnFailure, WorkerExit
from multiverso.launch.local import worker_commands
from multiverso.launch.output import Output
from multiverso.launch.sinks import text_sink
from multiverso.layout import MAX_WORKERS
from multiverso.runtime.node import Node
from multiverso.runtime.trust import SECRET_VARIABLE, new_secret

# What a worker raises because of another one's end.
_CONSEQUENCES = (WorkerLostError, NodeLostError, DeadlockError)
_by_value_lock = threading.Lock()


def run(
    function: Callable[..., Any],
    workers: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    on_failure: OnFailure = "stop",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in each of several new processes, the workers of one job.

    Blocks until all have ended. The workers are fresh interpreters: what the function uses travels with it,
    even when it is defined in a notebook or a script, which is not run again and needs no guard. Their output
    appears on this process's, each line with its worker's number. In the function, `multiverso.init()` joins
    the job; `multiverso.shutdown()` is called at its end if it did not do so. May be called from any thread.

    Args:
        function: What to call; it may ask `multiverso.worker_id()` who it is.
        workers: How many workers, from 1.
        args: Positional arguments, the same for all.
        kwargs: Keyword arguments, the same for all.
        timeout_seconds: The longest that the whole call may take; None for no limit.
        on_failure: "stop" ends the others when a worker fails, and raises. "continue" lets them go on: the
            failed worker's place in the result holds its exception, which is raised when no worker succeeded.
        env: Environment variables to set in the workers.

    Returns:
        Each worker's result, in worker order.

    Raises:
        Exception: What a worker raised, of the same type, with the worker's traceback as a note.
        WorkerFailedError: A worker raised something that cannot be sent here, or that should not end this
            process (SystemExit); its text has the traceback.
        WorkerLostError: A worker was killed or ended without a result.
        WaitTimeoutError: The time is over; all workers were ended.
        StartupError: The options make no sense; nothing was started.

    Example:
        >>> import multiverso as mv
        >>> def job(base):
        ...     mv.init()
        ...     return base + mv.worker_id()
        >>> mv.run(job, workers=2, args=(10,))
        [10, 11]
    """
    if not callable(function):
        raise TypeError(f"multiverso.run: expected a function, got {type(function).__name__}.")
    if not hasattr(workers, "__index__") or not 1 <= workers <= MAX_WORKERS:
        raise StartupError(f"multiverso.run: workers is {workers!r}; it must be from 1 to {MAX_WORKERS}.")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise StartupError(f"multiverso.run: timeout_seconds is {timeout_seconds}; it must be more than 0.")
    if on_failure not in ("stop", "continue"):
        raise StartupError(f"multiverso.run: on_failure is {on_failure!r}; it must be 'stop' or 'continue'.")
    with ExitStack() as stack:
        call = stack.enter_context(_memory("multiverso-call"))
        answers = [stack.enter_context(_memory("multiverso-answer")) for _ in range(workers)]
        _write_call(call, function, tuple(args), dict(kwargs or {}))
        secret = new_secret()
        node = stack.enter_context(closing(Node(workers=workers, on_lost=on_failure, secret=secret)))
        descriptors = [(call.fileno(), answer.fileno()) for answer in answers]
        python = (sys.executable, str(Path(__file__).with_name("_call.py")))
        commands = worker_commands(
            [(*python, *map(str, pair)) for pair in descriptors],  # inherited under the same numbers
            address=node.address,
            environ={**os.environ, **(env or {}), SECRET_VARIABLE: secret},
            on_failure=on_failure,
            descriptors=descriptors,
        )
        job = Job(
            commands,
            marker=f"MULTIVERSO_NODE={node.address}",
            output=Output(text_sink(sys.stdout, sys.stderr)),
            on_failure=on_failure,
            on_exit=lambda end: node.absent(end.worker_id),
            lost_workers=node.lost_workers,
        )
        result = job.run(timeout_seconds)
        outcomes = [_read_answer(answers[end.worker_id], end) for end in result.exits]
    return _conclude(result, outcomes, timeout_seconds, on_failure)


class _Failed:
    """A worker's failure, beside which any result can be told apart."""

    def __init__(self, error: BaseException, end: WorkerExit) -> None:
        self.error = error
        self.end = end


def _conclude(
    result: JobResult, outcomes: list[Any], timeout_seconds: float | None, on_failure: OnFailure
) -> list[Any]:
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failed)]
    if result.reason == "timeout":
        missing = [failure.end.worker_id for failure in failures if failure.end.ended_by_us]
        raise WaitTimeoutError(
            f"multiverso.run took longer than timeout_seconds={timeout_seconds:g}; "
            f"workers {missing} had not finished and were ended."
        )
    if failures and (on_failure == "stop" or len(failures) == len(outcomes)):
        raise min(failures, key=_blame).error
    return [outcome.error if isinstance(outcome, _Failed) else outcome for outcome in outcomes]


def _blame(failure: _Failed) -> tuple[bool, bool, float]:
    # The cause before its consequences; one that was killed before one that complained; then the earliest.
    consequence = isinstance(failure.error, _CONSEQUENCES) and failure.end.signal is None
    return failure.end.ended_by_us or consequence, failure.end.signal is None, failure.end.seconds


def _read_answer(answer: IO[bytes], end: WorkerExit) -> Any:
    who = f"Worker {end.worker_id} (pid {end.pid})"
    lost = f"{who} ended with exit code {end.code} before the function returned."
    if end.signal:
        lost = f"{who} was killed by {end.signal}."
    answer.seek(0)
    try:
        kind, text = pickle.load(answer)
    except Exception:
        return _Failed(WorkerLostError(lost, [end.worker_id]), end)
    if end.signal and kind == "value":
        return _Failed(WorkerLostError(lost, [end.worker_id]), end)
    try:
        value = pickle.load(answer)
    except Exception as error:
        if end.signal:  # in the middle of its answer
            return _Failed(WorkerLostError(f"{lost} It had failed:\n{text}", [end.worker_id]), end)
        message = f"{who} sent a {kind} that cannot be read here: {error}\n{text}"
        return _Failed(WorkerFailedError(message), end)
    if kind == "value":
        return value
    if not isinstance(value, Exception):
        return _Failed(WorkerFailedError(f"{who} failed:\n{text}"), end)
    value.add_note(f"In multiverso worker {end.worker_id} (pid {end.pid}):\n{text}")
    return _Failed(value, end)


@contextmanager
def _memory(name: str) -> Iterator[IO[bytes]]:
    with open(os.memfd_create(name), "w+b") as file:
        yield file


def _write_call(file: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    import cloudpickle  # here, so that `import multiverso` does not pay for it

    pickle.dump((sys.path, sys.argv[:1] or [""]), file)
    modules = {id(module): module for module in _modules([function, *args, *kwargs.values()])}
    with _by_value_lock, ExitStack() as stack:
        for module in modules.values():
            if not _importable(module) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        cloudpickle.dump((function, args, kwargs), file)
    file.flush()


def _modules(values: Sequence[Any]) -> Iterator[ModuleType]:
    for value in values:
        inner = getattr(value, "func", value)  # functools.partial
        for owner in (inner, type(inner)):
            module = sys.modules.get(getattr(owner, "__module__", None) or "")
            if module is not None and module.__name__ != "__main__":
                yield module


def _importable(module: ModuleType) -> bool:
    """Tells whether a fresh interpreter finds the same module; a test runner's own it often does not."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.__name__.split(".")
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found = (finder.find_spec(name, path) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    if not spec.has_location or spec.origin is None:  # built in, frozen, or a namespace
        return True
    return os.path.samefile(spec.origin, file)
