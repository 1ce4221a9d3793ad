"""``platoon-launcher NAME``: starts a controller, which starts the workers, and shows how it goes.

argparse, because ``-c="--turns 150"`` and ``-D cpu cpu cpu`` have to work.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from platoon import configparser
from platoon.devices import check_devices, find_devices
from platoon.processes import Process, end_processes, launch_process
from platoon.util import PlatoonError, counted, exit_text, last_lines

SUCCESS, FAILURE, WRONG_ARGUMENTS, SYSTEM_ERROR, OTHER_ERROR = range(5)

_EPILOG = """\
NAME_worker.py must be in the working directory, and may be accompanied by NAME_controller.py. Everything they
print goes to PLATOON_LOGS/NAME/DATE_TIME/. Without -D the devices come from PLATOON_DEVICES, from the files
named in PLATOONRC, from ./.platoonrc or ~/.platoonrc, and otherwise they are all GPUs of this host.

exit codes: 0 success; 1 a worker or the controller failed; 2 wrong arguments; 3 a process could not be
started; 4 anything else

examples:
  platoon-launcher lstm
  platoon-launcher lstm -D cuda0 cuda1 -w="--alpha 0.3"
  platoon-launcher lstm -D cpu cpu cpu -c="--patience 5"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    args = _parser().parse_args(arguments)
    try:
        _on_signals(_interrupt)
        return _launch(args)
    except PlatoonError as error:
        return _fail(str(error), WRONG_ARGUMENTS)
    except OSError as error:
        return _fail(str(error), SYSTEM_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", OTHER_ERROR)
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}", OTHER_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="platoon-launcher",
        description="Trains with several workers and a controller on this host.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment_name", metavar="NAME", help="finds NAME_worker.py and NAME_controller.py")
    parser.add_argument(
        "-D", "--devices", nargs="+", metavar="DEVICE", help="cpu, cuda0, gpu1, ...: one worker for each"
    )
    parser.add_argument("-H", "--hosts", nargs="+", metavar="HOST", help="for now: this host only")
    parser.add_argument("-c", "--controller-args", default="", metavar="ARGS", help='as in -c="--patience 5"')
    parser.add_argument(
        "-w", "--worker-args", "--workers-args", default="", metavar="ARGS", help="for each worker"
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    return parser


def _launch(args: argparse.Namespace) -> int:
    name = args.experiment_name
    if not Path(f"{name}_worker.py").is_file():
        raise PlatoonError(f"there is no {name}_worker.py in {Path.cwd()}")
    _check_hosts(args.hosts)
    devices = check_devices(args.devices) if args.devices else find_devices()
    own = Path(f"{name}_controller.py")
    program = [str(own)] if own.is_file() else ["-m", "platoon.channel.controller"]
    logs = _log_directory(name)
    command = [*program, name, str(logs), "--single", "-D", *devices, *shlex.split(args.controller_args)]
    if args.worker_args:
        command.append(f"--worker-args={args.worker_args}")

    told = Told(args.json)
    told.say(
        f"{name}: {counted(len(devices), 'worker')} on {' '.join(devices)}; logs in {logs}",
        "launched",
        logs=str(logs),
    )
    readable, writable = os.pipe()
    try:
        controller = launch_process(
            "controller",
            command,
            "cpu",
            logs,
            variables={"PLATOON_STATUS_FD": str(writable)},
            pass_fds=[writable],
        )
    finally:
        os.close(writable)
    code = None
    try:
        code = _follow(controller, readable, told)
    except KeyboardInterrupt:
        pass
    finally:
        _on_signals(signal.SIG_IGN)
        os.close(readable)
        end_processes([controller])
    # nothing is left but to write, to somebody who may never read it
    _on_signals(signal.SIG_DFL if code is not None else _leave)
    return _outcome(controller, code, told, len(devices))


def _check_hosts(hosts: list[str] | None) -> None:
    if hosts is None:
        try:
            hosts = configparser.fetch_hosts()
        except KeyError:
            return
    if len(hosts) > 1:
        raise PlatoonError(f"several hosts ({' '.join(hosts)}) are not supported yet; give one, or none")
    if hosts[0] not in (socket.gethostname(), "localhost", "127.0.0.1"):
        raise PlatoonError(f"the host {hosts[0]} is not this one ({socket.gethostname()}); start it there")


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


class Told:
    """What the controller has told so far, shown to people as it comes."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.failure: str | None = None
        self.requests = 0
        self.left: set[int] = set()
        self.live = sys.stdout.isatty() and not as_json
        self.began = time.monotonic()

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

    def event(self, event: dict[str, Any]) -> None:
        """Takes one event of the controller."""
        kind = event.pop("event")
        rank = event.get("rank")
        if kind == "started":
            self.left.add(event["rank"])
            self.say(
                f"  worker {rank} on {event['device']}: process {event['pid']}, {event['log']}", kind, **event
            )
        elif kind == "ended":
            self.left.discard(event["rank"])
            self.say(f"  worker {rank} ended: {exit_text(event['code'])}", kind, **event)
        elif kind in ("failed", "stopped", "interrupted"):
            self.failure = event["text"]
        elif kind == "requests":
            self.requests = event["count"]
            if self.as_json:
                self.say("", kind, **event)
        elif self.as_json:
            self.say("", kind, **event)


def _follow(controller: Process, readable: int, told: Told) -> int:
    """Shows the controller's events until it has ended."""
    rest = b""
    watch = os.pidfd_open(controller.pid)
    try:
        while True:
            ready, _, _ = select.select([readable, watch], [], [], 1.0)
            data = os.read(readable, 65536) if readable in ready else b""
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                told.event(json.loads(line))
            told.status()
            if watch in ready and not data:
                return controller.handle.wait()
    finally:
        os.close(watch)


def _on_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(OTHER_ERROR)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _on_signals(signal.SIG_IGN)  # `timeout` and some terminals send several: a second one cuts nothing short
    raise KeyboardInterrupt


def _outcome(controller: Process, code: int | None, told: Told, workers: int) -> int:
    seconds = time.monotonic() - told.began
    if code == 0:
        told.say(
            f"success: {counted(workers, 'worker')}, {counted(told.requests, 'request')}, {seconds:.1f} s",
            "success",
            seconds=seconds,
        )
        return SUCCESS
    if code is None:
        text, result = "interrupted", OTHER_ERROR
    elif told.failure is not None:
        text, result = told.failure, FAILURE
    else:
        lines = "\n".join(f"    {line}" for line in last_lines(controller.err) or ["(nothing)"])
        text = f"the controller ended with {exit_text(code)}\n  log: {controller.err}\n  last lines:\n{lines}"
        result = code if code in (WRONG_ARGUMENTS, SYSTEM_ERROR, OTHER_ERROR) else FAILURE
    if told.as_json:
        told.say("", "failure", reason=text, code=result)
    return _fail(text, result)


def _fail(text: str, code: int) -> int:
    print(f"platoon-launcher: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
