"""Ways to start the workers of a job from here, and what other launchers are made of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiverso.launch.function import run
    from multiverso.launch.job import Job
    from multiverso.launch.processes import WorkerCommand
    from multiverso.launch.resources import visible_gpus
    from multiverso.launch.results import JobResult, WorkerExit
    from multiverso.launch.signals import let_signals_end_us, put_back

__all__ = [
    "Job",
    "JobResult",
    "WorkerCommand",
    "WorkerExit",
    "let_signals_end_us",
    "put_back",
    "run",
    "visible_gpus",
]

# Imported when it is first used: the command line wants one part or another, and most of its commands none.
_LATER = {
    "Job": "job",
    "JobResult": "results",
    "WorkerCommand": "processes",
    "WorkerExit": "results",
    "let_signals_end_us": "signals",
    "put_back": "signals",
    "run": "function",
    "visible_gpus": "resources",
}

if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"multiverso.launch.{_LATER[name]}")
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
