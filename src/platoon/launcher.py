"""``platoon-launcher NAME``: starts a controller, which starts the workers, and shows how it goes.

argparse, because ``-c="--turns 150"`` and ``-D cpu cpu cpu`` have to work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multiverso.errors import StartupError
from multiverso.launch import Job, JobResult, Signals, let_signals_end_us
from multiverso.launch.ssh import DEFAULT_SSH
from multiverso.launch.standard_files import open_standard_files
from multiverso.wire import messages
from platoon import configparser
from platoon.processes import GRACE_SECONDS, Program
from platoon.several import DEFAULT_HOSTS_PORT, Plan, Start
from platoon.util import PlatoonError, counted

SUCCESS, FAILURE, WRONG_ARGUMENTS, SYSTEM_ERROR, OTHER_ERROR = range(5)

_EPILOG = """\
NAME_worker.py must be in the working directory, and may be accompanied by NAME_controller.py. Everything they
print goes to PLATOON_LOGS/NAME/DATE_TIME/. Without -D the devices come from PLATOON_DEVICES, from the files
named in PLATOONRC, from ./.platoonrc or ~/.platoonrc, and otherwise they are all GPUs of this host.

exit codes: 0 success; 1 a worker or the controller failed; 2 wrong arguments; 3 a process could not be
started; 4 anything else; 130 after Ctrl-C, 143 after SIGTERM

examples:
  platoon-launcher lstm
  platoon-launcher lstm -D cuda0 cuda1 -w="--alpha 0.3"
  platoon-launcher lstm -D cpu cpu cpu -c="--patience 5"
  platoon-launcher lstm -H node1 node2 -D cuda0 cuda1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    open_standard_files()
    args = _parser().parse_args(arguments)
    try:
        return _launch(args)
    except (PlatoonError, StartupError) as error:
        return _fail(str(error), WRONG_ARGUMENTS)
    except OSError as error:
        return _fail(str(error), SYSTEM_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", OTHER_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="platoon-launcher",
        description="Trains with several workers and a controller, on this host or on each of several.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment_name", metavar="NAME", help="finds NAME_worker.py and NAME_controller.py")
    parser.add_argument(
        "-D", "--devices", nargs="+", metavar="DEVICE", help="cpu, cuda0, gpu1, ...: one worker for each"
    )
    parser.add_argument(
        "-H", "--hosts", nargs="+", metavar="HOST", help="a controller on each, reached by ssh; 2: a rehearsal here"
    )
    parser.add_argument("--ssh", default=DEFAULT_SSH, metavar="COMMAND", help='as in --ssh "ssh -p 2222"')
    parser.add_argument(
        "--port", type=int, default=DEFAULT_HOSTS_PORT, help="where the first host listens for the others (%(default)s)"
    )
    parser.add_argument("--insecure-fabric", action="store_true", help="encrypt nothing between the hosts")
    parser.add_argument("-c", "--controller-args", default="", metavar="ARGS", help='as in -c="--patience 5"')
    parser.add_argument("-w", "--worker-args", "--workers-args", default="", metavar="ARGS", help="for each worker")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    return parser


def _launch(args: argparse.Namespace) -> int:
    name = args.experiment_name
    if not Path(f"{name}_worker.py").is_file():
        base = name.removesuffix(".py").removesuffix("_worker").removesuffix("_controller")
        instead = f"; NAME is {base}" if base != name and Path(f"{base}_worker.py").is_file() else ""
        raise PlatoonError(f"there is no {name}_worker.py in {Path.cwd()}{instead}")
    hosts = _hosts(args.hosts)
    if hosts is None:
        plan, grace = Plan.alone(args.devices), 2 * GRACE_SECONDS + 1  # it gives its workers their own
    else:
        plan = Plan.of(hosts, args.devices, ssh=args.ssh, port=args.port, encrypted=not args.insecure_fabric)
        grace = 2 * (2 * GRACE_SECONDS + 1)
    with contextlib.closing(plan.hosts) if plan.hosts else contextlib.nullcontext():
        logs = _log_directory(name)
        start = Start(name, str(logs), args.worker_args, args.controller_args, multi=hosts is not None)
        report = ControllerReport(args.json)
        names = {"hosts": list(plan.names)} if plan.names else {}
        launched = f"{name}: {counted(plan.workers_num, 'worker')} on {plan}; logs in {logs}"
        report.say(launched, "launched", logs=str(logs), **names)
        return _run(plan, start, report, grace)


def _run(plan: Plan, start: Start, report: ControllerReport, grace: float) -> int:
    """Starts the controllers, waits for all of them, and says how it went.

    After a failure they have as long to end by themselves as they then have after SIGTERM.
    """
    marker = f"PLATOON_LAUNCH={uuid.uuid4().hex}"
    reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reports.setblocking(False)

    def look() -> None:
        report.status()
        if report.is_overdue(grace):  # its program, or what that has started, waits for what will not come
            job.end("failed")

    with reports, theirs:
        variables = dict([marker.split("=")])
        controllers = [plan.controller(host, start, variables, theirs.fileno()) for host in range(len(plan.devices))]
        job = Job(
            [controller.command for controller in controllers],
            marker=marker,
            grace_seconds=grace,
            on_start=lambda number, pid: theirs.close() if number == len(controllers) - 1 else None,
            on_look=look,
        )
        job.watch(reports.fileno(), lambda: report.read(reports))
        signals = Signals() if threading.current_thread() is threading.main_thread() else None
        with signals or contextlib.nullcontext():
            result = job.run(signals=signals)
        while report.read(reports):
            pass
    if signals is None:
        return _outcome(plan, controllers, result, report)
    let_signals_end_us()  # only output is left to write, perhaps to a reader who never reads it
    try:
        return _outcome(plan, controllers, result, report)
    finally:
        signals.put_back()


def _hosts(hosts: list[str] | None) -> list[str] | None:
    """Returns the hosts of a job on several, those given or configured; None: this one alone."""
    if hosts is None:
        try:
            hosts = configparser.fetch_hosts()
        except KeyError:
            return None
    if len(hosts) > 1 or hosts[0].isdecimal():
        return hosts
    if hosts[0] not in (socket.gethostname(), "localhost", "127.0.0.1"):
        raise PlatoonError(f"the host {hosts[0]} is not this one ({socket.gethostname()}); start it there")
    return None


def _log_directory(name: str) -> Path:
    stem = Path("PLATOON_LOGS", name, time.strftime("%Y-%m-%d_%H-%M-%S"))
    for attempt in range(100):
        path = stem if attempt == 0 else stem.with_name(f"{stem.name}_{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # two launches within one second
        return path
    raise PlatoonError(f"cannot make a directory for the logs: {stem}_N are all there")


class ControllerReport:
    """The controller's reports so far, shown to people as they come."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.failure: str | None = None
        self.requests = 0
        self.left: set[int] = set()
        self.live = sys.stdout.isatty() and not as_json
        self.began = time.monotonic()
        self._failed_at: float | None = None
        self._overdue = False

    def say(self, sentence: str, kind: str, **fields: object) -> None:
        """Prints a sentence, or an event as JSON."""
        if self.as_json:
            print(json.dumps({"event": kind, **fields}), flush=True)
        else:
            print(("\r\x1b[K" if self.live else "") + sentence, flush=True)

    def status(self) -> None:
        """Rewrites the status line, on a terminal."""
        if self.live:
            seconds = time.monotonic() - self.began
            print(
                f"\r\x1b[K{seconds:6.0f} s  {counted(len(self.left), 'worker')}  {counted(self.requests, 'request')}",
                end="",
                flush=True,
            )

    def is_overdue(self, seconds: float) -> bool:
        """Returns whether the failure was longer ago, and says so the first time."""
        if not self._overdue and self._failed_at is not None and time.monotonic() - self._failed_at >= seconds:
            self._overdue = True
            self.say(f"  a controller still runs {seconds:g} s after the failure: ending it", "overdue")
        return self._overdue

    def read(self, reports: socket.socket) -> bool:
        """Takes a controller's next report; returns whether there was one."""
        try:
            received = messages.receive(reports)
        except BlockingIOError:
            return False
        if received is not None:
            self.event(received[0])
        return received is not None

    def event(self, event: dict[str, Any]) -> None:
        """Takes one event of the controller."""
        kind = event.pop("event")
        rank = event.get("rank")
        if kind == "started":
            self.left.add(event["rank"])
            self.say(f"  worker {rank} on {event['device']}: process {event['pid']}, {event['log']}", kind, **event)
        elif kind == "ended":
            self.left.discard(event["rank"])
            self.say(f"  worker {rank} ended: {event['how']}", kind, **event)
        elif kind in ("failed", "stopped", "interrupted"):
            self.failure = event["text"]
            if kind == "failed" and self._failed_at is None:
                self._failed_at = time.monotonic()
        else:
            if kind == "requests":
                self.requests = event["count"]
            if self.as_json:
                self.say("", kind, **event)


def _outcome(plan: Plan, controllers: Sequence[Program], result: JobResult, report: ControllerReport) -> int:
    if result.reason == "finished" and result.exit_code == 0:
        done = f"{counted(plan.workers_num, 'worker')}, {counted(report.requests, 'request')}"
        report.say(f"success: {done}, {result.seconds:.1f} s", "success", seconds=result.seconds)
        return SUCCESS
    if result.reason == "signal":
        text, code = "interrupted", result.exit_code
    elif report.failure is not None:
        text, code = report.failure, FAILURE
    else:
        # the first that failed by itself: those that were ended because of it say little
        end = min(result.exits, key=lambda end: (end.code == 0, end.ended_by_us, end.worker_id))
        who = f"the controller on {plan.names[end.worker_id]}" if plan.names else "the controller"
        text = controllers[end.worker_id].failure_text(who, end)
        code = end.code if end.code in (WRONG_ARGUMENTS, SYSTEM_ERROR, OTHER_ERROR) else FAILURE
    if report.as_json:
        report.say("", "failure", reason=text, code=code)
    return _fail(text, code)


def _fail(text: str, code: int) -> int:
    print(f"platoon-launcher: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    from multiverso_program import platoon_launcher  # so that a late Ctrl-C ends it as it ends the program

    sys.exit(platoon_launcher())
