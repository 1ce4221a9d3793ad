"""Ways to start the workers of a job from here, and what other launchers are made of."""

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
