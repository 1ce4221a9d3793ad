"""`multiverso run`: a program in several workers on this host, with the job's node in the launcher."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.hosts.roster import ROSTER_VARIABLE
from multiverso.launch.on_nodes import Part, job_on
from multiverso.launch.options import RunOptions, check, log_files, misplaced_workers, program_of
from multiverso.launch.output import Output
from multiverso.launch.place import REFUSED, Place, here
from multiverso.launch.reports import Report
from multiverso.launch.resources import choose_gpus
from multiverso.launch.restart_policy import Ended, Replacements, Starts
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.signals import TOLD, Signals, let_signals_end_us
from multiverso.launch.watched import Page, Watch
from multiverso.layout.words import MAX_WORKERS, MOST_WORKERS
from multiverso.runtime.discovery.restarts import restarts
from multiverso.runtime.node.node import Node
from multiverso.saying import say
from multiverso.watching.history import name_of
from multiverso.watching.slowest import ending
from multiverso.watching.snapshot import Worker
from multiverso.wire.trust import SECRET_VARIABLE, new_secret

_WORD_SECONDS, _LOOK_SECONDS = 1.0, 0.05


def launch(options: RunOptions) -> int:
    """Runs the job in the calling, main thread; writes to standard output and error.

    Returns:
        The exit code, as `JobResult` describes it.

    Raises:
        StartupError: something asked for is not there; no worker was started.
    """
    check(options, MOST_WORKERS if ROSTER_VARIABLE in os.environ else MAX_WORKERS)
    place = here(options.workers_num)
    try:
        return _launch(options, place)
    except StartupError as error:
        if place.other_hosts is None:
            raise
        say(f"{place.name}: {error}")
        return REFUSED


def _launch(options: RunOptions, place: Place) -> int:
    program = program_of(options)
    devices = choose_gpus(options.gpus, os.environ) if options.gpus else []
    logs = log_files(options, place.workers)
    report = Report(options, place.name)
    workers = options.workers_num
    if devices and len(devices) < workers:
        report.warn(f"{workers} workers share {len(devices)} GPU(s).")
    if options.workers is None and (misplaced := misplaced_workers(options)):
        report.warn(misplaced)
    with ExitStack() as stack:
        before = restarts() if place.other_hosts is not None else 0  # of which each host's launcher is another one
        page = Page(options.history, goes_on=before > 0) if options.page and place.leads else None
        watches = page or (report.says_more and place.leads)
        watch = stack.enter_context(Watch(page, report.warn, before)) if watches else None
        if watch:
            report.begins(f"{workers} worker{'s' * (workers != 1)}", place, page.address if page else None)
        signals = stack.enter_context(Signals())
        starts = Starts(options.max_restarts, options.timeout_seconds, signals)
        ended = starts.run(
            lambda: _start(options, program, place, devices, logs, report, starts, watch),
            lambda: report.restarting(starts),
        )
        if watch:
            _show_end(watch, ended, signals, place, report, options.on_failure == "stop")
    # after a signal, and on one of several hosts, this process still has to tell its exit code
    if ended.result.reason != "signal" and place.other_hosts is None:
        let_signals_end_us()
    ended.tell()
    return ended.code


def _show_end(watch: Watch, ended: Ended, signals: Signals, place: Place, report: Report, stops: bool) -> None:
    """Shows on the page how a job has ended, and because of whom; ``stops``: at the first failure."""
    result, lost = ended.result, watch.history.now.in_order_of_loss if watch.history.now else []
    if place.other_hosts:
        result = _as_told(result, signals, is_doubtful=stops and bool(lost))
    first = None if stops and result.reason == "finished" else _first(result, lost, place)
    well = None if result.reason == "signal" else result.reason == "finished" and ended.code == 0
    failed = first.id if isinstance(first, Worker) else first.worker_id if first else None
    watch.end(result, well, _why(result, first, report), failed, stops)


def _as_told(result: JobResult, signals: Signals, is_doubtful: bool) -> JobResult:
    """Returns how a job on several hosts ended, which its launcher tells: by a signal, and perhaps a moment later."""
    word = Deadline.after(_WORD_SECONDS)
    while is_doubtful and not signals.number and not word.passed:
        time.sleep(_LOOK_SECONDS)
    if not signals.number or result.reason not in ("signal", "finished"):
        return result
    told = next((reason for reason, number in TOLD.items() if number == signals.number), None)
    return replace(result, reason=told or "signal")


def _first(result: JobResult, lost: Sequence[Worker], place: Place) -> WorkerExit | Worker | None:
    """Returns the worker that failed first: one of this host's, or another one, of which is known that it was lost.

    Args:
        result: how this host's part did.
        lost: the workers that were lost, the first one first.
        place: which are this host's.
    """
    if result.reason not in ("failed", "finished"):
        return None
    others = [worker for worker in lost if worker.id not in place.workers]
    if result.culprit is not None:
        return others[0] if others and lost[0] in others else result.culprit
    all_leave_so = result.reason == "finished" and len(others) < len(lost)
    return others[0] if others and not all_leave_so else None


def _why(result: JobResult, first: WorkerExit | Worker | None, report: Report) -> str:
    """Returns how a job ended, in which ``first`` was the first worker that failed."""
    failed = result.reason == "failed"
    if isinstance(first, Worker):
        goes_on = not failed and result.exit_code == 0
        return f"{'the others have finished; ' if goes_on else ''}{name_of(first)} was lost first"
    if first is None:
        return "a worker on another host has failed" if failed else f"{result}"
    said = report.output.last_words(first.worker_id) if report.output else ""
    return f"{result}{f': {said}' if said else ''}"


def _start(
    options: RunOptions,
    program: tuple[str, ...],
    place: Place,
    devices: Sequence[str],
    logs: Mapping[int, Path],
    report: Report,
    starts: Starts,
    watch: Watch | None,
) -> Ended:
    """Runs the job once."""
    workers = options.workers_num
    secret = new_secret()
    if place.other_hosts is not None:  # its node waits for the first host's, and there is no worker to end yet
        starts.signals.end_us()
    with closing(
        Node(
            workers=place.workers_num,
            on_lost=options.on_failure,
            secret=secret,
            other_hosts=place.other_hosts,
            replaces=options.replace > 0,
        )
    ) as node:
        output = Output(
            report.sink,
            log_files=logs,
            append=starts.restarts > 0 or place.goes_on or (place.other_hosts is not None and restarts() > 0),
            folds=not options.json and place.other_hosts is None,  # or the job's launcher does it, for all hosts
        )
        report.output = output
        environ = {**os.environ, SECRET_VARIABLE: secret}
        job = job_on(
            [Part(node, place, [program] * len(place.workers))],
            Replacements(options.replace),
            report,
            environ=environ if place.other_hosts else starts.environ(environ, options.resume),
            marker=f"MULTIVERSO_NODE={node.address}",
            output=output,
            on_failure=options.on_failure,
            devices=devices,
            bind=options.bind,
            grace_seconds=options.grace_seconds,
            keep_stdin=place.keeps_stdin,
        )
        with watch.following(node) if watch else nullcontext():
            result = job.run(starts.seconds_left, signals=starts.signals)
            code = end_on_host(node, place, result, report, starts.signals)
        in_it = node.had_workers
        status = node.status() if options.summary and in_it and place.leads else None
        strangers = workers > 1 and result.exit_code == 0 and not in_it

    def tell() -> None:
        if options.summary and status:
            report.summarise(status, options.summary)
        if watch and watch.history.now and (in_it or (options.page and not strangers)):
            network = watch.history.busiest
            report.ends(ending(watch.history.now) + (f"; {network}" if network else ""))
        if place.other_hosts is not None:
            return  # the rest has been said, or the job's launcher says it
        if strangers:
            report.warn(
                f"none of the {workers} workers called multiverso.init(): they were {workers} independent programs, "
                "and shared nothing."
            )
        report.finished(result)

    return Ended(result, code, tell)


def end_on_host(node: Node, place: Place, result: JobResult, report: Report, signals: Signals) -> int:
    """Of a job on several hosts: stay as long as others need this host's copies; say how this host's part ended.

    Returns:
        The exit code: of a job on several hosts 143 where this one's workers failed because of another's.
    """
    others = place.other_hosts
    if others is None:
        return result.exit_code
    first = next(iter(node.lost_workers()), None)
    in_consequence = result.reason == "failed" and first is not None and first not in place.workers
    if not in_consequence and result.reason != "signal":  # which the job's own launcher tells
        report.finished(result)
    if result.reason == "finished" and not node.stay(lambda: signals.number != 0 or not others.all_came):
        if signals.number:
            return 128 + (signal.SIGTERM if signals.number in TOLD.values() else signals.number)
        report.warn(f"{place.name}: the job ended before all its hosts were done.")
        return result.exit_code or 1
    return 128 + signal.SIGTERM if in_consequence else result.exit_code
