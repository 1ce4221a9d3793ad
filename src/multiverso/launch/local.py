"""`multiverso run`: a program in several workers on this host, with the job's node in the launcher."""

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from multiverso.errors import StartupError
from multiverso.launch.job import Job, OnFailure
from multiverso.launch.output import Output
from multiverso.launch.place import Place, here
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.resources import (
    available_cores,
    bound_environ,
    choose_gpus,
    split_cores,
    thread_environ,
)
from multiverso.launch.restarting import Replacements, Starts
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.signals import Signals, let_signals_end_us
from multiverso.launch.sinks import Sink, json_sink, prefix_sink, unbuffered, wants_colour, write_event
from multiverso.layout import MAX_WORKERS
from multiverso.runtime.node import Node
from multiverso.runtime.restarts import restarts
from multiverso.runtime.trust import SECRET_VARIABLE, new_secret


@dataclass(frozen=True)
class RunOptions:
    """What `multiverso run` was asked for.

    Attributes:
        target: A Python script, with `module` a module's name, or any program.
        arguments: The target's own.
        workers: How many workers to start; None for one, and for a word where the arguments ask for more.
        module: Run the target as `python -m` does.
        on_failure: "stop" ends the job when a worker fails; "continue" lets the others go on.
        gpus: "auto" or a list of devices: worker i gets the i-th, and sees no other.
        bind: Give each worker cores of its own and as many threads.
        log_dir: Where to write a file with each worker's output, too.
        json: Write JSON objects to standard output, nothing else.
        timeout_seconds: End the job after this time.
        grace_seconds: How long workers that are asked to end may take until they are killed.
        summary: Makes text of the job's last status, to be shown at its end; None for none.
        hosts: How many hosts to rehearse on this machine, or the hosts' names; None for one host, this one.
        port: Where the first of several hosts listens for the others.
        ssh: The command that reaches a host.
        encrypted: Whether hosts encrypt what they send each other.
        host_grace: How many seconds without a word of a host until it counts as lost.
        max_restarts: How often to start the job again when it has failed.
        replace: How many workers that fail, in all, are started again in a job that goes on without them.
        resume: Whether `multiverso.checkpoint` is to go on from what is saved, also at the first start.
        exchange: What `init` is to take for its `wire`, `every` and `between` where the program gives none.
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
    summary: Callable[[dict[str, Any]], str] | None = None
    hosts: str | None = None
    port: int = 29600
    ssh: str = "ssh -o BatchMode=yes"
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


def launch(options: RunOptions) -> int:
    """Runs the job in the calling, main thread; writes to standard output and error.

    Returns:
        The exit code, as `JobResult` describes it.

    Raises:
        StartupError: Something asked for is not there; no worker was started.
    """
    check(options)
    program = program_of(options)
    place = here(options.workers_num)
    devices = choose_gpus(options.gpus, os.environ) if options.gpus else []
    logs = _log_files(options, place.workers)
    report = _JsonReport(unbuffered(sys.stdout)) if options.json else _TextReport(options)
    workers = options.workers_num
    if devices and len(devices) < workers:
        report.warn(f"{workers} workers share {len(devices)} GPU(s).")
    if options.workers is None and (misplaced := _misplaced_workers(options)):
        report.warn(misplaced)
    with Signals() as signals:
        starts = Starts(options.max_restarts, options.timeout_seconds, signals)
        while True:
            result, code, last_words = _start(options, program, place, devices, logs, report, starts)
            if not starts.again(result, code):
                break
            last_words()
            report.restarting(starts)
            starts.pause()
    if (
        result.reason != "signal" and place.abroad is None
    ):  # else its code is told, whoever ends this host meanwhile
        let_signals_end_us()
    last_words()
    return code


def _start(
    options: RunOptions,
    program: tuple[str, ...],
    place: Place,
    devices: Sequence[str],
    logs: Mapping[int, Path],
    report: "_TextReport | _JsonReport",
    starts: Starts,
) -> tuple[JobResult, int, Callable[[], None]]:
    """Runs the job once; returns how it ended, its exit code, and what says so."""
    workers = options.workers_num
    secret = new_secret()
    replacements = Replacements(options.replace)
    with closing(
        Node(
            workers=place.workers_num,
            on_lost=options.on_failure,
            secret=secret,
            abroad=place.abroad,
            replaces=options.replace > 0,
        )
    ) as node:
        output = Output(
            report.sink,
            log_files=logs,
            append=starts.restarts > 0 or place.goes_on or (place.abroad is not None and restarts() > 0),
        )
        report.output = output
        environ = {**os.environ, SECRET_VARIABLE: secret}
        commands = worker_commands(
            [program] * len(place.workers),
            address=node.address,
            environ=environ if place.abroad else starts.environ(environ, options.resume),
            on_failure=options.on_failure,
            devices=devices,
            bind=options.bind,
            place=place,
        )

        def ended(end: WorkerExit) -> None:
            node.absent(end.worker_id)
            report.ended(end)

        def again(end: WorkerExit) -> float | None:
            seconds = replacements.after(end) if node.may_be_replaced(end.worker_id) else None
            if seconds is not None:
                report.replacing(end, replacements, seconds)
            return seconds

        job = Job(
            commands,
            marker=f"MULTIVERSO_NODE={node.address}",
            output=output,
            on_failure=options.on_failure,
            grace_seconds=options.grace_seconds,
            keep_stdin=place.keeps_stdin,
            on_start=report.started,
            on_exit=ended,
            again=again,
            lost_workers=node.lost_workers,
            first=place.workers.start,
        )
        result = job.run(starts.seconds_left, signals=starts.signals)
        if place.abroad is not None:
            return result, end_on_host(node, place, result, report), lambda: None
        status = node.status() if options.summary and node.had_workers else None
        strangers = workers > 1 and result.exit_code == 0 and not node.had_workers

    def last_words() -> None:
        if strangers:
            report.warn(
                f"none of the {workers} workers called multiverso.init(): they were {workers} independent programs, "
                "and shared nothing."
            )
        if options.summary and status:
            report.summarise(status, options.summary)
        report.finished(result)

    return result, result.exit_code, last_words


def worker_commands(
    programs: Sequence[Sequence[str]],
    *,
    address: str,
    environ: Mapping[str, str],
    on_failure: OnFailure = "stop",
    devices: Sequence[str] = (),
    bind: bool = False,
    descriptors: Sequence[tuple[int, ...]] = (),
    place: Place | None = None,
) -> list[WorkerCommand]:
    """Makes each worker's command: who it is, and its share of the host, are in its environment.

    Args:
        programs: Each worker's program and arguments.
        address: The node's abstract socket name.
        environ: What to start from.
        on_failure: What `init` is to do when a worker is lost, unless it is told otherwise.
        devices: Values of CUDA_VISIBLE_DEVICES to deal out in turn; empty to leave it alone.
        bind: Whether each worker gets cores of its own.
        descriptors: Each worker's file descriptors to inherit.
        place: Which workers of the job these are; all of them by default.
    """
    place = place or Place.alone(len(programs))
    cores = available_cores()
    shares = split_cores(cores, place.on_machine) if bind else [None] * place.on_machine
    commands = []
    for index, worker_id in enumerate(place.workers):
        share = shares[place.first_on_machine + index]
        own = {
            **environ,
            **(bound_environ(len(share)) if share else thread_environ(environ, len(cores), place.on_machine)),
            "PYTHONUNBUFFERED": "1",
            "MULTIVERSO_NODE": address,
            "MULTIVERSO_WORKER_ID": str(worker_id),
            "MULTIVERSO_WORKERS_NUM": str(place.workers_num),
            "MULTIVERSO_ON_LOST": on_failure,
            "MULTIVERSO_LAUNCHED": "1",
        }
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[(place.first_on_machine + index) % len(devices)]
        inherited = descriptors[index] if descriptors else ()
        commands.append(WorkerCommand(tuple(programs[index]), own, share, inherited))
    return commands


def end_on_host(node: Node, place: Place, result: JobResult, report: "_TextReport | _JsonReport") -> int:
    """Of a job on several hosts: stay as long as others need this host's copies; say how this host's part ended.

    Returns:
        This host's exit code: 143 where its workers failed because of another host's.
    """
    first = next(iter(node.lost_workers()), None)
    in_consequence = result.reason == "failed" and first is not None and first not in place.workers
    if not in_consequence and result.reason != "signal":  # which the job's own launcher tells
        report.finished(result)
    if result.reason == "finished":
        let_signals_end_us()
        if not node.stay():
            report.warn(f"{place.name}: the job ended before all its hosts were done.")
            return result.exit_code or 1
    return 128 + signal.SIGTERM if in_consequence else result.exit_code


class _TextReport:
    """Tells a person what happens: output to where it belongs, our own words to standard error."""

    def __init__(self, options: RunOptions) -> None:
        self.output: Output | None = None
        self._going_on = options.on_failure == "continue"
        self._timeout_seconds = options.timeout_seconds
        self.sink = prefix_sink(
            unbuffered(sys.stdout),
            unbuffered(sys.stderr),
            colours=(wants_colour(sys.stdout), wants_colour(sys.stderr)),
        )

    def warn(self, text: str) -> None:
        def write() -> None:
            self.sink.say(f"multiverso: {text}\n")

        if self.output:
            self.output.notice(write)
        else:
            write()

    def started(self, worker_id: int, pid: int) -> None:
        pass

    def summarise(self, status: dict[str, Any], text_of: Callable[[dict[str, Any]], str]) -> None:
        self.sink.say(text_of(status))

    def ended(self, end: WorkerExit) -> None:
        if end.failed and self._going_on:
            self.warn(f"{end}; the others go on.")

    def restarting(self, starts: Starts) -> None:
        self.warn(starts.words())

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        self.warn(replacements.words(end, seconds))

    def finished(self, result: JobResult) -> None:
        if result.culprit and result.reason in ("failed", "finished"):
            # Its traceback stands above, perhaps far above: its last line says which one to look for.
            said = self.output.last_words(result.culprit.worker_id) if self.output else ""
            ended = "; the others were ended" if result.reason == "failed" and len(result.exits) > 1 else ""
            first = ""
            if result.deserter:
                first = (
                    f"worker {result.deserter.worker_id} (pid {result.deserter.pid}) ended with exit code 0 and "
                    "without multiverso.shutdown(), while others needed it; then "
                )
            self.warn(f"{first}{result.culprit}{ended}.{f' Its last line: {said}' if said else ''}")
        elif result.reason == "timeout":
            self.warn(f"the job took longer than {self._timeout_seconds:g} s and was ended.")
        elif result.reason == "signal":
            self.warn(f"ended by a signal after {result.seconds:.1f} s.")


class _JsonReport:
    """Tells a program what happens: one JSON object a line on standard output."""

    def __init__(self, stdout: BinaryIO) -> None:
        self.output: Output | None = None
        self.sink: Sink = json_sink(stdout)
        self._stdout = stdout

    def warn(self, text: str) -> None:
        self._write("warning", text=text)

    def started(self, worker_id: int, pid: int) -> None:
        self._write("start", worker=worker_id, pid=pid)

    def summarise(self, status: dict[str, Any], text_of: Callable[[dict[str, Any]], str]) -> None:
        self._write("status", status=status)

    def ended(self, end: WorkerExit) -> None:
        self._write("exit", **_exit_fields(end))

    def restarting(self, starts: Starts) -> None:
        self._write("restart", number=starts.restarts, most=starts.most)

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        self._write("exit", **_exit_fields(end))
        self._write("replace", worker=end.worker_id, number=replacements.done, most=replacements.most)

    def finished(self, result: JobResult) -> None:
        self._write(
            "summary",
            reason=result.reason,
            exit_code=result.exit_code,
            failed_worker=result.culprit.worker_id if result.culprit else None,
            left_without_shutdown=result.deserter.worker_id if result.deserter else None,
            seconds=round(result.seconds, 3),
            workers=[_exit_fields(end) for end in result.exits],
        )

    def _write(self, event: str, **fields: object) -> None:
        def write() -> None:
            write_event(self._stdout, event, **fields)

        if self.output:
            self.output.notice(write)
        else:
            write()


def _exit_fields(end: WorkerExit) -> dict[str, object]:
    fields = asdict(end)
    return {"worker": fields.pop("worker_id"), **fields, "seconds": round(end.seconds, 3)}


def check(options: RunOptions) -> None:
    """Refuses numbers that make no sense."""
    if not 1 <= options.workers_num <= MAX_WORKERS:
        raise StartupError(f"-n {options.workers}: the number of workers must be from 1 to {MAX_WORKERS}.")
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
            "--replace is for a job that goes on when a worker fails: add --on-failure continue, or "
            "--max-restarts, which starts all workers again."
        )
    if options.exchange and options.hosts is None:
        given = " and ".join(f"--{name}" for name in options.exchange)
        raise StartupError(f"{given}: useful between hosts only; add --hosts, or leave it out.")


def _misplaced_workers(options: RunOptions) -> str | None:
    """Says what to do about `multiverso run train.py -n 4`, whose -n is the script's."""
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


def _log_files(options: RunOptions, workers: range) -> dict[int, Path]:
    if options.log_dir is None:
        return {}
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--log-dir {options.log_dir}: {error.strerror}.") from None
    if not os.access(options.log_dir, os.W_OK | os.X_OK):
        raise StartupError(f"--log-dir {options.log_dir}: may not be written to.")
    return {worker_id: options.log_dir / f"worker-{worker_id}.log" for worker_id in workers}
