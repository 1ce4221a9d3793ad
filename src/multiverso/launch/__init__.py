"""Ways to start the workers of a job from here, and what other launchers are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiverso.lazy_names import lazy_names

if TYPE_CHECKING:
    from multiverso.launch.function import run
    from multiverso.launch.job import Job
    from multiverso.launch.processes import WorkerCommand
    from multiverso.launch.resources import visible_gpus
    from multiverso.launch.results import JobResult, WorkerExit
    from multiverso.launch.signals import Signals, let_signals_end_us

__all__ = ["Job", "JobResult", "Signals", "WorkerCommand", "WorkerExit", "let_signals_end_us", "run", "visible_gpus"]

if not TYPE_CHECKING:
    # The command line wants one part or another, and most of its commands none.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "multiverso.launch.function": "run",
            "multiverso.launch.job": "Job",
            "multiverso.launch.processes": "WorkerCommand",
            "multiverso.launch.resources": "visible_gpus",
            "multiverso.launch.results": "JobResult WorkerExit",
            "multiverso.launch.signals": "Signals let_signals_end_us",
        },
    )
