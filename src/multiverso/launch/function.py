"""`multiverso.run(function)`: call a function in several workers, from a script, a notebook or a test."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

from multiverso.errors import StartupError
from multiverso.launch.job import Job, OnFailure
from multiverso.launch.local import worker_commands
from multiverso.launch.outcomes import conclude, read_answer, write_call
from multiverso.launch.output import Output
from multiverso.launch.sinks import text_sink
from multiverso.layout import MAX_WORKERS
from multiverso.runtime.node import Node
from multiverso.runtime.trust import SECRET_VARIABLE, new_secret


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
    check_call("multiverso.run", function, workers, timeout_seconds, on_failure)
    with ExitStack() as stack:
        call = stack.enter_context(_memory("multiverso-call"))
        answers = [stack.enter_context(_memory("multiverso-answer")) for _ in range(workers)]
        write_call(call, function, tuple(args), dict(kwargs or {}))
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
        outcomes = [read_answer(answers[end.worker_id], end) for end in result.exits]
    late = (
        f"multiverso.run took longer than timeout_seconds={timeout_seconds:g}"
        if result.reason == "timeout"
        else None
    )
    return conclude(outcomes, on_failure, late)


def check_call(
    what: str,
    function: Callable[..., Any],
    workers: int,
    timeout_seconds: float | None,
    on_failure: OnFailure,
) -> None:
    """Refuses what makes no sense, in the name of the function that was called.

    Raises:
        TypeError: the function is none.
        StartupError: another argument cannot be.
    """
    if not callable(function):
        raise TypeError(f"{what}: expected a function, got {type(function).__name__}.")
    if not hasattr(workers, "__index__") or not 1 <= workers <= MAX_WORKERS:
        raise StartupError(f"{what}: workers is {workers!r}; it must be from 1 to {MAX_WORKERS}.")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise StartupError(f"{what}: timeout_seconds is {timeout_seconds}; it must be more than 0.")
    if on_failure not in ("stop", "continue"):
        raise StartupError(f"{what}: on_failure is {on_failure!r}; it must be 'stop' or 'continue'.")


@contextmanager
def _memory(name: str) -> Iterator[IO[bytes]]:
    with open(os.memfd_create(name), "w+b") as file:
        yield file
