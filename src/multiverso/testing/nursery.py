"""Workers that share one import: a process imports what all need, then forks itself once for each.

A framework's import takes seconds of processor time, and the laws of its binding milliseconds. A fork is sound as long
as what was imported has started nothing yet: PyTorch, JAX, Keras and their trainers start threads at their first use.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import pickle
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import multiverso as mv
from multiverso.errors import WorkerLostError

Preload = Sequence[str | Callable[[], object]]
"""What is done once for all: modules to import, by name, and functions to call."""


def run_forked(
    function: Callable[..., Any],
    number: int,
    args: Sequence[Any],
    *,
    preload: Preload,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls ``function(me, *args)`` in each of several processes that one process forks, and waits for all.

    Args:
        function: what to call; ``me`` counts the processes from 0. It joins what job it likes.
        number: how many processes.
        args: what the function is called with after ``me``, the same in all.
        preload: what to do before the fork.
        timeout_seconds: the longest that all may take.
        env: environment variables for the processes.

    Returns:
        What each returned; a WorkerLostError in the place of one that was killed or ended before.
    """
    nursed = (number, tuple(preload), 0.8 * timeout_seconds, function, tuple(args))
    answers = mv.run(_nurse, 1, args=nursed, timeout_seconds=timeout_seconds, env=env)[0]
    return [answer if isinstance(answer, WorkerLostError) else pickle.loads(answer) for answer in answers]


def _nurse(
    number: int, preload: Preload, seconds: float, function: Callable[..., Any], args: Sequence[Any]
) -> list[bytes | WorkerLostError]:
    gc.disable()  # the million objects of an import are there to stay
    for what in preload:
        importlib.import_module(what) if isinstance(what, str) else what()
    gc.freeze()
    gc.enable()
    context = multiprocessing.get_context("fork")
    answers: list[Connection] = []
    children = []
    for me in range(number):
        answer, there = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(there, seconds, me, function, args))
        with warnings.catch_warnings():
            # JAX, about the threads that it starts later.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            child.start()
        there.close()
        answers.append(answer)
        children.append(child)
    found: list[bytes | WorkerLostError] = []
    for me, (answer, child) in enumerate(zip(answers, children, strict=True)):
        with answer:
            try:
                found.append(answer.recv_bytes())
            except EOFError:
                child.join()
                found.append(WorkerLostError(f"Process {me} {_end(child.exitcode)}.", [me]))
        child.join()
    return found


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code} before the function returned"


def _child(answer: Connection, seconds: float, me: int, function: Callable[..., Any], args: Sequence[Any]) -> None:
    import cloudpickle  # as `multiverso.run` sends what a worker returns

    faulthandler.dump_traceback_later(seconds)  # then it hangs: this says where
    try:
        with answer:
            answer.send_bytes(cloudpickle.dumps(function(me, *args)))
    finally:
        faulthandler.cancel_dump_traceback_later()
