"""The command lines of controllers and workers."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable
from typing import Any

DEFAULT_PORT = 5567


def controller_parser() -> argparse.ArgumentParser:
    """Returns a parser for what the launcher hands to a controller."""
    parser = argparse.ArgumentParser(description="A Platoon controller: coordinates the workers of one host.")
    parser.add_argument("experiment_name", help="NAME of the experiment: NAME_worker.py is started")
    parser.add_argument("log_directory", help="where the workers' output goes")
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--single", action="store_true", help="the only controller")
    hosts.add_argument("--multi", action="store_true", help="one of several, started by platoon-launcher -H or MPI")
    parser.add_argument(
        "-D", "--devices", nargs="+", default=[], metavar="DEVICE", help="cpu, cuda0, ...: a worker for each"
    )
    parser.add_argument("-w", "--worker-args", default="", help='the workers\' arguments: -w="--rate 0.1"')
    parser.add_argument("--control-port", type=int, help="port for requests (default: a free one)")
    parser.add_argument("--data-port", type=int, help="port for minibatches, 0 for a free one (default: none)")
    parser.add_argument("--data-hwm", type=int, default=10, help="minibatches on their way to one worker")
    return parser


def worker_parser() -> argparse.ArgumentParser:
    """Returns a parser for a worker's ports and timeout.

    Its controller's argument is the default for a worker that a controller started.
    """
    parser = argparse.ArgumentParser(description="A Platoon worker.")
    parser.add_argument(
        "--control-port",
        type=int,
        default=_told("PLATOON_CONTROL_PORT"),
        help=f"the controller's port (default: the controller's own, or {DEFAULT_PORT})",
    )
    parser.add_argument(
        "--data-port",
        type=int,
        default=_told("PLATOON_DATA_PORT"),
        help="port that minibatches come from (default: the controller's, or none)",
    )
    parser.add_argument(
        "--data-hwm",
        type=int,
        default=_told("PLATOON_DATA_HWM") or 10,
        help="minibatches on their way to this worker (default: the controller's, or 10)",
    )
    parser.add_argument("--socket-timeout", type=int, default=300_000, help="milliseconds to wait for an answer")
    return parser


def _told(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text else None


def chosen(args: argparse.Namespace, constructor: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a constructor among those that were read."""
    return {name: getattr(args, name) for name in inspect.signature(constructor).parameters if hasattr(args, name)}
