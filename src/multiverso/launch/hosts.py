"""`multiverso run --hosts`: the same program on several hosts, each with a launcher and a node of its own.

This launcher starts one launcher for each host: of a rehearsal here, of others over ssh. They start their workers, pass
on what those write with each worker's number before it, and end with the code of what failed there. What is left to
do here is what a launcher does with workers: start them, pass on signals, end the others when one fails.
"""

import math
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from multiverso.errors import StartupError
from multiverso.hosts.control.connections import say_absent
from multiverso.hosts.options import VARIABLES, in_environment
from multiverso.hosts.roster import ROSTER_VARIABLE, spread
from multiverso.launch._ssh import FAILED as SSH_FAILED
from multiverso.launch.host_events import HostEvents
from multiverso.launch.job import Job
from multiverso.launch.options import RunOptions, check
from multiverso.launch.output import Output
from multiverso.launch.place import JOB_VARIABLE, REFUSED
from multiverso.launch.plan import HostPlan
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.reports import Report
from multiverso.launch.restart_policy import Ended, Replacements, Starts
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.signals import TOLD, Signals, let_signals_end_us
from multiverso.launch.sinks import Stream, unbuffered, write_all
from multiverso.launch.ssh import MOST_HOSTS, checked_names
from multiverso.layout.words import MOST_WORKERS
from multiverso.node_log import NODE_SAYS
from multiverso.runtime.discovery.restarts import RESTARTS_VARIABLE, RESUME_VARIABLE

# Beyond what a host's launcher gives its own workers: it sends SIGTERM, waits, sends SIGKILL, and sweeps.
_MORE_GRACE_SECONDS = 3.0
# After the first host's end others may still do what they do after shutdown(), which is theirs.
_LATE_SECONDS = 10.0
_WORKER = rb"worker \d+ \(pid \d+ on [^)]*\)"
_FAILED = re.compile(
    rb"multiverso: %b (failed with exit code \d+)(?: first, then (?:%b \1(?:, )?)+(?: and \d+ more)?)?"
    rb"(?:; the others were ended)?(\..*)" % (_WORKER, _WORKER)
)
_REFUSED_CODE = 2  # as on one host
_IN_CONSEQUENCE = 128 + signal.SIGTERM
_PASSED_ON = (
    "PYTHONPATH",
    "MULTIVERSO_TIMEOUT_SECONDS",
    "MULTIVERSO_NODE_STDERR",
    "MULTIVERSO_CACHE_DIR",
    "OMP_NUM_THREADS",
    RESTARTS_VARIABLE,
    RESUME_VARIABLE,
    *VARIABLES.values(),
)


def launch_on_hosts(options: RunOptions) -> int:
    """Runs the job on several hosts, in the calling, main thread.

    Returns:
        The exit code, as for one host.

    Raises:
        StartupError: something asked for is not there; nothing was started.
    """
    check(options, MOST_WORKERS)
    assert options.hosts is not None
    in_environment(**options.exchange)  # refused now, where it means nothing
    with Signals() as signals:
        starts = Starts(options.max_restarts, options.timeout_seconds, signals)
        report = Report(options) if options.json else None
        ended = starts.run(
            lambda: _start(options, starts), lambda: report.restarting(starts) if report else _say(starts.words())
        )
    if ended.result.reason != "signal":
        let_signals_end_us()
    ended.tell()
    return ended.code


def _start(options: RunOptions, starts: Starts) -> Ended:
    """Runs the job once."""
    job_id = uuid.uuid4().hex
    with closing(plan_of(options)) as plan:
        environ = {**os.environ, **in_environment(**options.exchange), JOB_VARIABLE: job_id}
        commands = host_commands(options, plan, starts.environ(environ, options.resume))
        roster = plan.roster
        shown = HostEvents(roster.names, unbuffered(sys.stdout)) if options.json else _Shown(roster.names)
        say, output = shown.say, Output(shown, folds=not options.json, of_hosts=True)
        replacements = Replacements(options.replace)

        def lost(end: WorkerExit) -> bool:
            return end.failed and (end.signal is not None or (end.code == SSH_FAILED and plan.ssh is not None))

        def ended(end: WorkerExit) -> None:
            if lost(end) and options.on_failure == "continue":
                then = "the others continue" if end.worker_id else "it led the job, which ends"
                say(f"{roster.names[end.worker_id]} was lost; {then}.")
            if end.failed and end.worker_id and options.on_failure == "continue":
                absent = (roster, end.worker_id, "it ended before it had begun")  # if it has not
                threading.Thread(target=say_absent, args=absent, daemon=True).start()
            if end.code == REFUSED and not end.worker_id:  # the others would wait for it
                job.end("failed")

        def again(end: WorkerExit) -> float | None:
            """A host is started again where its launcher was killed; one that has ended by itself has said why."""
            host = end.worker_id
            if not lost(end) or host == 0 or 0 not in job.running:
                return None
            seconds = replacements.after(end)
            if seconds is not None:
                times_replaced[host] += 1
                anew = replace(roster.on(host), times_replaced=times_replaced[host]).as_text()
                environ = {**commands[host].environ, ROSTER_VARIABLE: anew}
                commands[host] = replace(commands[host], environ=environ)
                say(f"{roster.names[host]} (pid {end.pid}) was lost; it is started again ({replacements}).")
            return seconds

        told_at = math.inf

        def look() -> None:
            """The first host stays until no other one needs it: who is still there then may not end by itself."""
            nonlocal told_at
            if 0 in job.running or not job.running:
                return
            told_at = min(told_at, time.monotonic() + _LATE_SECONDS)
            if time.monotonic() > told_at > 0:
                told_at = 0.0
                late = " and ".join(roster.names[host] for host in job.running)
                say(f"{roster.names[0]} has ended, and {late} not yet, which is waited for: Ctrl-C ends it.")

        times_replaced = [0] * roster.hosts
        job = Job(
            commands,
            on_exit=ended,
            on_look=look,
            again=again,
            on_trouble=say,
            marker=f"{JOB_VARIABLE}={job_id}",
            output=output,
            on_failure=options.on_failure,
            grace_seconds=2 * (options.grace_seconds + _MORE_GRACE_SECONDS),
            keep_stdin=True,
            tells=TOLD,
        )
        result = job.run(starts.seconds_left, signals=starts.signals)
        exits = tuple(replace(end, code=_REFUSED_CODE) if end.code == REFUSED else end for end in result.exits)
        result = replace(result, exits=exits)
        for text in shown.folded():
            say(text)
        culprit = culprit_of(result.exits) if result.exits else None  # none was started
        code = culprit.code if culprit and result.reason == "failed" else result.exit_code
        if isinstance(shown, HostEvents):
            return Ended(result, code, partial(shown.finished, result, code, culprit))
        told = shown.has_told
        return Ended(result, code, lambda: tell_end(options, result, roster.names, output.last_words, told))


def tell_end(
    options: RunOptions,
    result: JobResult,
    names: Sequence[str],
    last_words: Callable[[int], str],
    is_told: bool = False,
) -> None:
    """Says why a job on several hosts failed, if it did, and on which of them.

    Args:
        options: what was asked for.
        result: how the hosts' launchers ended, as workers of this one.
        names: what the hosts are called.
        last_words: returns what a host's launcher wrote last.
        is_told: whether one of them has told already which worker failed.
    """
    assert options.hosts is not None
    if result.reason == "timeout":
        _say(f"the job took longer than {options.timeout_seconds:g} s and was ended.")
    elif result.reason == "signal":
        _say(f"ended by a signal after {result.seconds:.1f} s.")
    if result.reason not in ("failed", "finished") or not result.exits:
        return
    culprit = culprit_of(result.exits)
    ends_it = culprit.worker_id == 0 and culprit.signal is not None and not culprit.ended_by_us
    if result.reason != "failed" and not ends_it:  # "continue": each host's end has been said, and this one's long ago
        return
    name, said = names[culprit.worker_id], last_words(culprit.worker_id)
    if culprit.code == SSH_FAILED and not options.hosts.isdecimal():
        _say(f"{name} could not be reached by `{options.ssh}`, or the connection to it ended.{_quoted(said)}")
    elif culprit.signal is not None and not culprit.ended_by_us:
        _say(f"{name} (pid {culprit.pid}) was killed by {culprit.signal}; the others were ended.")
    elif is_told or any(last_words(end.worker_id).startswith("multiverso: worker ") for end in result.exits):
        return  # the host that it was on has said it
    elif culprit.code == _IN_CONSEQUENCE or culprit.ended_by_us:  # or all that is known of them is that they left
        _say(
            "no host says what failed first: its launcher was ended by SIGTERM, or a worker ended with exit code 0 and "
            "without multiverso.shutdown() while others needed it; their errors name it."
        )
    elif not said.startswith("multiverso: "):  # then there was no launcher of ours that could say why
        _say(f"{name} ended with exit code {culprit.code}; the others were ended.{_quoted(said)}")


def _quoted(said: str) -> str:
    return f" Its last line: {said}" if said else ""


def plan_of(options: RunOptions) -> HostPlan:
    """Returns the hosts that were asked for, and how many workers each has.

    Raises:
        StartupError: they are none, or too many, or cannot be reached.
    """
    assert options.hosts is not None
    if not options.hosts.isdecimal():
        names = checked_names("--hosts", options.hosts.split(","))
        workers = spread(options.workers_num, len(names))
        return HostPlan.by_ssh(
            names, workers, options.ssh, port=options.port, encrypted=options.encrypted, grace=options.host_grace
        )
    if not 1 <= int(options.hosts) <= MOST_HOSTS:
        raise StartupError(f"--hosts {options.hosts}: the number of hosts must be from 1 to {MOST_HOSTS}.")
    return HostPlan.rehearsal(spread(options.workers_num, int(options.hosts)), options.host_grace)


def host_commands(options: RunOptions, plan: HostPlan, environ: Mapping[str, str]) -> list[WorkerCommand]:
    """Returns what starts each host's launcher, with this environment."""
    command = WorkerCommand((sys.executable, "-P", "-m", "multiverso", "run", *_arguments(options)), environ)
    return [plan.on(host, command, _PASSED_ON) for host in range(plan.roster.hosts)]


def _arguments(options: RunOptions) -> list[str]:
    """The same command for a host's launcher, without what concerns all hosts together."""
    return [
        *("--on-failure", options.on_failure),
        *("--replace", str(options.replace)),
        *("--grace", str(options.grace_seconds)),
        *("-n", str(options.workers_num)),
        *(("--gpus", options.gpus) if options.gpus else ()),
        *(("--bind",) if options.bind else ()),
        *(("--log-dir", str(options.log_dir)) if options.log_dir else ()),
        *(("--json",) if options.json else ()),
        *(("--page",) if options.page else ()),
        *(("--summary",) if options.summary else ()),
        *(("--history", str(options.history)) if options.history else ()),
        *(("-m",) if options.module else ()),
        *("--", options.target),
        *options.arguments,
    ]


def culprit_of(exits: Sequence[WorkerExit]) -> WorkerExit:
    """Which host's part ended the job.

    The first host where it was killed, as the job ends with it; then one with a code of its own, then another that was
    killed, then any.
    """

    def order(end: WorkerExit) -> int:
        if end.code == 0:
            return 4
        if end.code == _IN_CONSEQUENCE or (end.ended_by_us and end.code == SSH_FAILED):
            return 3
        if end.signal is not None:
            return 2 if end.ended_by_us else 1 if end.worker_id else -1
        return 0

    return min(exits, key=order)


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk, or no reader: neither ends a job, nor takes its exit code away
        write_all(unbuffered(sys.stderr), f"multiverso: {text}\n".encode())


class _Shown:
    """Passes on what the hosts' launchers write, which has their workers' numbers already.

    What one node says of a lost host, or of its own end, the others often say in the same words, and so do launchers
    whose workers have failed of one cause: it is shown once.

    Args:
        names: the hosts'.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.has_told = False  # which worker failed, and how
        self._said: dict[bytes, tuple[bytes, list[int]]] = {}  # such lines, and who has said them, the first one first

    def __call__(self, worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        """Writes whole lines; what are workers to this launcher are hosts."""
        shown = b"".join(line for line in lines.splitlines(True) if not self._is_repeated(worker_id, line))
        if shown:
            write_all(unbuffered(sys.stdout if stream == "stdout" else sys.stderr), shown)

    say = staticmethod(_say)

    def _is_repeated(self, host: int, line: bytes) -> bool:
        failed = _FAILED.match(line)
        self.has_told |= failed is not None
        if not failed and not line.startswith(NODE_SAYS.encode()):
            return False
        _, hosts = self._said.setdefault(failed[1] + failed[2] if failed else line, (line, []))
        if host in hosts:
            return False  # its own, once more, is news
        hosts.append(host)
        return hosts[0] != host

    def folded(self) -> list[str]:
        """Returns what to say at the end of the lines that were left out."""
        return [
            f"the same from {len(others)} other{'s' * (len(others) > 1)} "
            f"({', '.join(self._names[host] for host in sorted(others))}): "
            + line.decode("utf-8", "backslashreplace").removeprefix(NODE_SAYS).removeprefix("multiverso: ").rstrip()
            for line, (_, *others) in self._said.values()
            if others
        ]
