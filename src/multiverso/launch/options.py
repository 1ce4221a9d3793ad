"""The options of `multiverso run`, checked before anything is started."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multiverso.errors import StartupError
from multiverso.launch.job import OnFailure
from multiverso.launch.ssh import DEFAULT_SSH
from multiverso.watching.snapshot import Snapshot


@dataclass(frozen=True)
class RunOptions:
    """The options of `multiverso run`.

    Attributes:
        target: A Python script, with `module` a module's name, or any program.
        arguments: the target's own.
        workers: how many workers to start; None for one, and for a word where the arguments ask for more.
        module: run the target as `python -m` does.
        on_failure: "stop" ends the job when a worker fails; "continue" lets the others continue.
        gpus: "auto" or a list of devices: worker i gets the i-th, and sees no other.
        bind: give each worker cores of its own and as many threads.
        log_dir: where to write a file with each worker's output, too.
        json: write JSON objects to standard output, nothing else.
        timeout_seconds: end the job after this time.
        grace_seconds: how long workers that are asked to end may take until they are killed.
        summary: makes text of the job's last snapshot, to be shown at its end; None for none.
        page: serve a page that shows the job.
        history: where to write the job's past, too; None for nowhere.
        hosts: how many hosts to rehearse on this machine, or the hosts' names; None for one host, this one.
        port: where the first of several hosts listens for the others.
        ssh: the command that reaches a host.
        encrypted: whether hosts encrypt what they send each other.
        host_grace: how many seconds without a word of a host until it counts as lost.
        max_restarts: how often to start the job again when it has failed.
        replace: how many workers that fail, in all, are started again in a job that continues without them.
        resume: whether `multiverso.checkpoint` is to continue from what is saved, also at the first start.
        exchange: what `init` is to take for its `wire`, `every` and `between` where the program gives none.
    """

    target: str
    arguments: tuple[str, ...] = ()
    workers: int | None = None
    module: bool = False
    on_failure: OnFailure = "stop"
    gpus: str | None = None
    bind: bool = False
    log_dir: Path | None = None
    json: bool = False
    timeout_seconds: float | None = None
    grace_seconds: float = 1.0
    summary: Callable[[Snapshot], str] | None = None
    page: bool = False
    history: Path | None = None
    hosts: str | None = None
    port: int = 29600
    ssh: str = DEFAULT_SSH
    encrypted: bool = True
    host_grace: float = 30.0
    max_restarts: int = 0
    replace: int = 0
    resume: bool = False
    exchange: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers_num(self) -> int:
        """How many workers there will be."""
        return 1 if self.workers is None else self.workers


def check(options: RunOptions, most: int) -> None:
    """Refuses numbers that make no sense; ``most``: workers."""
    if not 1 <= options.workers_num <= most:
        raise StartupError(f"-n {options.workers}: the number of workers must be from 1 to {most}.")
    if options.timeout_seconds is not None and not options.timeout_seconds > 0:
        raise StartupError(f"--timeout {options.timeout_seconds:g}: it must be more than 0 seconds.")
    if not options.grace_seconds >= 0:
        raise StartupError(f"--grace {options.grace_seconds:g}: it must be 0 seconds or more.")
    if not options.host_grace > 0:
        raise StartupError(f"--host-grace {options.host_grace:g}: it must be more than 0 seconds.")
    if not options.max_restarts >= 0:
        raise StartupError(f"--max-restarts {options.max_restarts}: it must be 0 or more.")
    if not options.replace >= 0:
        raise StartupError(f"--replace {options.replace}: it must be 0 or more.")
    if options.replace and options.on_failure == "stop":
        raise StartupError(
            "--replace is for a job that continues when a worker fails: add --on-failure continue, or "
            "--max-restarts, which starts all workers again."
        )
    if options.history is not None and not options.page:
        raise StartupError("--history is written by what serves the page: add --page.")
    if options.exchange and options.hosts is None:
        given = " and ".join(f"--{name}" for name in options.exchange)
        raise StartupError(f"{given}: useful between hosts only; add --hosts, or leave it out.")


def misplaced_workers(options: RunOptions) -> str | None:
    """Returns what to do about `multiverso run train.py -n 4`, whose -n is the script's; None for any other."""
    words = " ".join(options.arguments)
    found = re.search(r"(?<!\S)(-n ?|-np |--workers[ =])(\d+)(?!\S)", words)
    if found is None:
        return None
    option, number = found[0], found[2]
    module = "-m " if options.module else ""
    return (
        f"1 worker is started: '{option}' stands after {options.target}, which gets it as an argument of its own. "
        f"For {number} workers: multiverso run -n {number} {module}{options.target}"
    )


def program_of(options: RunOptions) -> tuple[str, ...]:
    """Returns the program that each worker runs, and its arguments."""
    target = options.target
    if options.module:
        return (sys.executable, "-m", target, *options.arguments)
    path = Path(target)
    if path.suffix in (".py", ".pyz") or (path.is_dir() and (path / "__main__.py").is_file()):
        if not path.exists():
            raise StartupError(f"There is no file {target} (looked in {Path.cwd()}).")
        return (sys.executable, target, *options.arguments)
    found = shutil.which(target)
    if found is None:
        why = "is not executable, and its name does not end in .py" if path.exists() else "is not found"
        raise StartupError(f"{target} {why}; give a Python script, a program, or `-m` and a module's name.")
    return (found, *options.arguments)


def log_files(options: RunOptions, workers: range) -> dict[int, Path]:
    """Returns the file for each worker's output, by number, after making their directory.

    Raises:
        StartupError: it cannot be made, or not be written to.
    """
    if options.log_dir is None:
        return {}
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--log-dir {options.log_dir}: {error.strerror}.") from None
    if not os.access(options.log_dir, os.W_OK | os.X_OK):
        raise StartupError(f"--log-dir {options.log_dir}: may not be written to.")
    return {worker_id: options.log_dir / f"worker-{worker_id}.log" for worker_id in workers}
