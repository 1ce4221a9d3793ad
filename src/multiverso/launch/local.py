"""`multiverso run`: a program in several workers on this host, with the job's node in the launcher."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

from multiverso.errors import StartupError
from multiverso.launch.on_nodes import Part, job_on
from multiverso.launch.options import RunOptions, check, log_files, misplaced_workers, program_of
from multiverso.launch.output import Output
from multiverso.launch.place import Place, here
from multiverso.launch.reports import Report
from multiverso.launch.resources import choose_gpus
from multiverso.launch.restarting import Ended, Replacements, Starts
from multiverso.launch.results import JobResult
from multiverso.launch.signals import Signals, let_signals_end_us
from multiverso.launch.watched import Page, Watch
from multiverso.runtime.discovery.restarts import restarts
from multiverso.runtime.node.node import Node
from multiverso.watching.slowest import ending
from multiverso.watching.snapshot import Snapshot
from multiverso.wire.trust import SECRET_VARIABLE, new_secret


def launch(options: RunOptions) -> int:
    """Runs the job in the calling, main thread; writes to standard output and error.

    Returns:
        The exit code, as `JobResult` describes it.

    Raises:
        StartupError: something asked for is not there; no worker was started.
    """
    check(options)
    place = here(options.workers_num)
    try:
        return _launch(options, place)
    except StartupError as error:
        if place.other_hosts is None:
            raise
        raise StartupError(f"{place.name}: {error}") from error


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
        page = Page(options.history) if options.page and place.leads else None
        watch = stack.enter_context(Watch(page, report.warn)) if page or (report.says_more and place.leads) else None
        if watch:
            report.begins(f"{workers} worker{'s' * (workers != 1)}", place, page.address if page else None)
        signals = stack.enter_context(Signals())
        starts = Starts(options.max_restarts, options.timeout_seconds, signals)
        ended = starts.run(
            lambda: _start(options, program, place, devices, logs, report, starts, watch),
            lambda: report.restarting(starts),
        )
        if watch:
            # of several hosts the job's launcher ends each where one has failed
            by_user = ended.result.reason == "signal" and place.other_hosts is None
            watch.end(_why(ended.result, watch.history.now, place, report), None if by_user else ended.code == 0)
    # after a signal, and on one of several hosts, this process still has to tell its exit code
    if ended.result.reason != "signal" and place.other_hosts is None:
        let_signals_end_us()
    ended.tell()
    return ended.code


def _why(result: JobResult, now: Snapshot | None, place: Place, report: Report) -> str:
    """Returns how a job ended; of a worker on another host, which was the first, no more is known here than that."""
    if result.culprit is None or result.reason not in ("failed", "finished"):
        return f"{result}"
    first = now.lost[0] if now is not None and now.lost and result.reason == "failed" else result.culprit.worker_id
    if now is not None and first not in place.workers:
        worker = next(one for one in now.workers if one.id == first)
        return f"worker {first} (pid {worker.pid} on {worker.host}) was lost first"
    said = report.output.last_words(result.culprit.worker_id) if report.output else ""
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
        code = result.exit_code if place.other_hosts is None else end_on_host(node, place, result, report)
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


def end_on_host(node: Node, place: Place, result: JobResult, report: Report) -> int:
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
