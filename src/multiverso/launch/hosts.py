"""`multiverso run --hosts`: the same program on several hosts, each with a launcher and a node of its own.

This launcher starts one launcher for each host: of a rehearsal here, of others over ssh. They start their workers, pass
on what those write with each worker's number before it, and end with the code of what failed there. What is left to
do here is what a launcher does with workers: start them, pass on signals, end the others when one fails.
"""

import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing

from multiverso.errors import StartupError
from multiverso.hosts.credentials import new_credentials
from multiverso.hosts.roster import ROSTER_VARIABLE, Roster, spread
from multiverso.launch.job import Job, WorkerExit, let_signals_end_us
from multiverso.launch.local import RunOptions, check
from multiverso.launch.output import Output
from multiverso.launch.place import LISTENER_VARIABLE
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.sinks import Stream, unbuffered, write_all

_JOB_VARIABLE = "MULTIVERSO_JOB"
_MOST_HOSTS = 64
# Beyond what a host's launcher gives its own workers: it sends SIGTERM, waits, sends SIGKILL, and sweeps.
_MORE_GRACE_SECONDS = 3.0
_IN_CONSEQUENCE = 128 + signal.SIGTERM


def launch_on_hosts(options: RunOptions) -> int:
    """Run the job on several hosts, in the calling, main thread.

    Returns:
        The exit code, as for one host.

    Raises:
        StartupError: Something asked for is not there; nothing was started.
    """
    check(options)
    assert options.hosts is not None
    if options.json or options.summary:
        option = "--json" if options.json else "--summary"
        raise StartupError(f"{option} works on one host only yet: leave it out, or leave --hosts out.")
    names = _names(options.hosts)
    workers = spread(options.workers_num, len(names))
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        credentials = new_credentials(encrypted=False).to_text()
        roster = Roster(0, names, workers, listening.getsockname()[:2], credentials, rehearsal=True)
        job_id = uuid.uuid4().hex
        commands = [_command(options, roster.on(host), job_id, listening) for host in range(len(names))]
        output = Output(_pass_on)
        job = Job(
            commands,
            marker=f"{_JOB_VARIABLE}={job_id}",
            output=output,
            on_failure=options.on_failure,
            grace_seconds=2 * (options.grace_seconds + _MORE_GRACE_SECONDS),
            keep_stdin=True,
        )
        result = job.run(options.timeout_seconds, forward_signals=True)
    if result.reason != "signal":
        let_signals_end_us()
    if result.reason == "timeout":
        _say(f"the job took longer than {options.timeout_seconds:g} s and was ended.")
    elif result.reason == "signal":
        _say(f"ended by a signal after {result.seconds:.1f} s.")
    if result.reason != "failed":
        return result.exit_code
    culprit = _culprit(result.exits)
    if culprit.signal is not None:
        _say(
            f"{names[culprit.worker_id]} (pid {culprit.pid}) was killed by {culprit.signal}; the others were ended."
        )
    return culprit.code


def _names(hosts: str) -> tuple[str, ...]:
    """The hosts' names: of a rehearsal host-0, host-1, ..."""
    if not hosts.isdecimal():
        raise StartupError(
            f"--hosts {hosts}: only a number works yet, for a rehearsal of so many hosts on this machine."
        )
    if not 1 <= int(hosts) <= _MOST_HOSTS:
        raise StartupError(f"--hosts {hosts}: the number of hosts must be from 1 to {_MOST_HOSTS}.")
    return tuple(f"host-{host}" for host in range(int(hosts)))


def _command(options: RunOptions, roster: Roster, job_id: str, listening: socket.socket) -> WorkerCommand:
    """What starts a host's launcher: the same command without what concerns all hosts together."""
    arguments = [
        *("--on-failure", options.on_failure),
        *("--grace", str(options.grace_seconds)),
        *("-n", str(options.workers_num)),
        *(("--gpus", options.gpus) if options.gpus else ()),
        *(("--bind",) if options.bind else ()),
        *(("--log-dir", str(options.log_dir)) if options.log_dir else ()),
        *(("-m",) if options.module else ()),
        *("--", options.target),
        *options.arguments,
    ]
    environ = {**os.environ, _JOB_VARIABLE: job_id, ROSTER_VARIABLE: roster.as_text()}
    descriptors: tuple[int, ...] = ()
    if roster.leads:
        environ[LISTENER_VARIABLE] = str(listening.fileno())
        descriptors = (listening.fileno(),)
    return WorkerCommand(
        (sys.executable, "-P", "-m", "multiverso", "run", *arguments), environ, descriptors=descriptors
    )


def _culprit(exits: Sequence[WorkerExit]) -> WorkerExit:
    """Which host's part ended the job: one with a code of its own, then one that was killed, then any."""

    def order(end: WorkerExit) -> int:
        if end.code in (0, _IN_CONSEQUENCE):
            return 3
        if end.signal is not None:
            return 2 if end.ended_by_us else 1
        return 0

    return min(exits, key=order)


def _pass_on(worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
    """What a host's launcher writes has its workers' numbers already."""
    if lines:
        write_all(unbuffered(sys.stdout if stream == "stdout" else sys.stderr), lines)


def _say(text: str) -> None:
    write_all(unbuffered(sys.stderr), f"multiverso: {text}\n".encode())
