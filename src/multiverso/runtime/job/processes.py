"""Reads facts about processes: who has started them, and of workers their program, usage and log (`mv.log`).

A node that is being started says so in the name of its thread: while it waits for the first host, it sleeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multiverso.layout import words as at
from multiverso.runtime.job.control import WorkerState
from multiverso.runtime.job.logged import read

STARTING = "node-starting"  # the kernel cuts names to 15 characters
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# fields of /proc/<pid>/stat behind the program's name
_PARENT, _USER, _SYSTEM, _START, _RESIDENT = 1, 11, 12, 19, 21


@contextmanager
def starting() -> Iterator[None]:
    """In the block, this thread's name says to those who wait for the node that it is being started."""
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    before = ""
    with suppress(OSError):  # no /proc
        before = name.read_text().strip()
        name.write_text(STARTING)
    try:
        yield
    finally:
        with suppress(OSError):
            name.write_text(before)


@dataclass(frozen=True)
class Ancestor:
    """A process above another one: its pid, its start time in clock ticks since boot, its (cut) name."""

    pid: int
    start_ticks: int
    name: str


def ancestors(pid: int) -> Iterator[Ancestor]:
    """Walks up from a process, itself first, as far as /proc shows it."""
    while pid > 0:
        try:
            # the name stands in parentheses and may itself hold spaces and parentheses
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")
        except OSError:
            return
        fields = tail.split()
        yield Ancestor(pid, int(fields[_START]), head.partition("(")[2])
        pid = int(fields[_PARENT])


def note_of(worker: WorkerState, logged: np.ndarray[Any, np.dtype[np.uint8]] | None, index: int) -> dict[str, Any]:
    """Returns what only a worker's own host can know of it; of a process that is gone nothing but its log."""
    cpu_seconds, resident_bytes = _usage(worker.pid) if worker.liveness == at.ALIVE else (0.0, 0)
    return {
        "program": _program(worker.pid),
        "cpu_seconds": cpu_seconds,
        "resident_bytes": resident_bytes,
        "logged": None if logged is None else read(logged, index),
    }


def _usage(pid: int) -> tuple[float, int]:
    """The processor time that a process has used, in seconds, and the bytes that it has in memory."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK, int(fields[_RESIDENT]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0.0, 0


def _program(pid: int) -> str:
    """The script that a process runs, as a person would name it; empty when the process is gone."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return ""
    if not arguments:
        return ""
    program, *rest = arguments
    if "python" not in Path(program).name:
        return Path(program).name
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2:] if rest[0] in ("-W", "-X") else rest[1:]
    if not rest:
        return Path(program).name
    if rest[0] == "-c":
        return "python -c"
    if rest[0] == "-m" and len(rest) > 1:
        return rest[1]
    return "a function" if rest[0].endswith("/multiverso/launch/_call.py") else Path(rest[0]).name
