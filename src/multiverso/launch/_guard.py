"""Ends what a job leaves behind, also when its launcher is killed.

A worker dies with its launcher (see `_shim`), but what the worker started does not. The guard is a process in
a session of its own that reads a pipe whose other end only the launcher has. When that end closes, whatever
the reason, every process of the job is killed: those in a worker's session, and those that carry the job's
marker in their environment, which a daemon that made its own session still does.

Run as a script by its path in an isolated interpreter. Argument: the marker, "NAME=value". Standard input: one line
per worker, "pid start_ticks".
"""

import os
import select
import signal
import sys
import time

SWEEP_SECONDS = 10.0
EXEC_SECONDS = 0.5
KERNEL_THREAD = 0x00200000  # a flag of its stat


def sweep(marker: str, sessions: dict[int, int]) -> tuple[int, int]:
    """Kills the processes that belong to the job; returns how many there were, and how many could be others of it."""
    strangers = {pid for pid, ticks in sessions.items() if _stat(pid)[1] not in (ticks, None)}
    wanted = sessions.keys() - strangers
    variable = os.fsencode(marker)
    found = unclear = 0
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            descriptor = os.pidfd_open(pid)  # so that a pid that is given out again meanwhile is not hit
        except OSError:
            continue
        try:
            session, _, state, flags = _stat(pid)
            if state in "ZX" or flags & KERNEL_THREAD:
                continue
            environ = _environ(pid)
            if session in wanted or variable in environ:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                found += 1
            elif environ == [b""]:  # it has none, or is in the middle of an exec
                unclear += 1
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return found, unclear


def _stat(pid: int) -> tuple[int | None, int | None, str, int]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        return int(fields[3]), int(fields[19]), fields[0].decode(), int(fields[6])
    except (OSError, IndexError):
        return None, None, "X", 0


def _environ(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # another user's, or gone
        return []


def main() -> None:
    """Waits for the launcher's end of the pipe to close, then sweeps until nothing is found."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    text = b""
    while block := os.read(0, 65536):
        text += block
    sessions = {int(pid): int(ticks) for pid, ticks in (line.split() for line in text.splitlines())}
    began = time.monotonic()
    while any(
        left and time.monotonic() < began + seconds
        for left, seconds in zip(sweep(sys.argv[1], sessions), (SWEEP_SECONDS, EXEC_SECONDS), strict=True)
    ):
        select.select([], [], [], 0.01)  # let them go, then look for what they forked meanwhile


if __name__ == "__main__":
    main()
