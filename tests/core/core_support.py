"""Several workers of a job in one process, a thread each; and workers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forked_workers import Interpreter
from multiverso.runtime import Node, Session

interpreters: list[Interpreter] = []  # the one of this session, put here by conftest.py
SECONDS = 60.0
MODES: dict[str, dict[str, Any]] = {"async": {}, "sync": {"sync": True}, "bounded": {"staleness": 2}}


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS / 2) -> None:
    """Waits until something holds; fails, before `in_threads` gives up, when it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.005)


def in_threads(functions: list[Callable[[], Any]], seconds: float = SECONDS) -> list[Any]:
    """Calls each in a thread of its own; returns their results, or raises the first one's error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException | None] = [None] * len(functions)

    def call(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            errors[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    alive = [i for i, thread in enumerate(threads) if thread.is_alive()]
    assert not alive, f"still running after {seconds} s: {alive}"
    for error in errors:
        if error is not None:
            raise error
    return results


def together(
    function: Callable[[Session], Any], workers: int = 2, *, node: Node | None = None, **options: Any
) -> list[Any]:
    """Runs ``function(session)`` as each worker of a job; returns their results in the workers' order."""
    options = {"timeout_seconds": 30, "start_timeout_seconds": 30, **options}

    def work(job: Node, i: int) -> Any:
        with Session(job.address, i, **options) as session:
            return function(session)

    if node is not None:
        return in_threads([partial(work, node, i) for i in range(workers)])
    with Node(workers) as made:
        return in_threads([partial(work, made, i) for i in range(workers)])


def let_die(session: Session) -> None:
    """Lets go of a worker's life without a word, as the kernel does for a killed process; this one lives on."""
    session._takes_part = False
    session._liveness.release()


def outcome(function: Callable[[], Any]) -> Any:
    """Returns what a call returns, or the error that it raises."""
    try:
        return function()
    except Exception as error:
        return error


def bits(array: Any) -> bytes:
    """The exact contents of an array."""
    return np.ascontiguousarray(array).tobytes()


class Worker:
    """A worker in a process of its own, forked, that runs a piece of Python and prints JSON lines.

    The text finds ``node`` (an address), ``worker_id`` and ``say(...)``.
    """

    PREAMBLE = (
        "import json, os, signal, sys\nimport numpy as np\nimport multiverso as mv\n"
        "from multiverso.runtime import Session\nnode, worker_id = sys.argv[1], int(sys.argv[2])\n"
        "def say(*what):\n    print(json.dumps(what), flush=True)\n"
    )

    def __init__(self, node: Node, worker_id: int, text: str, **environ: str) -> None:
        self.process = interpreters[-1].start(
            *("-c", self.PREAMBLE + text, node.address, str(worker_id)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> Any:
        """Waits for the next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended with {self.process.wait(SECONDS)} and said nothing"
        return json.loads(line)

    def tell(self, line: str = "") -> None:
        """Gives it a line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Waits for its end; returns the exit code."""
        self.process.communicate(timeout=SECONDS)
        return self.process.returncode

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


def shared_memory_of(pid: int) -> list[str]:
    """The segments that a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if "memfd:multiverso" in line]
