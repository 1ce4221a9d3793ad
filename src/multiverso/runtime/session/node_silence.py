"""Is a node slow, or will it never answer? Asked while the first answer of all is waited for.

A node answers its first question at once, as soon as it has the processor. So one whose processes have all been asleep
or stopped for a second, with that question unread before them, does not answer at all: it is stopped, hangs, or is
no node. One that is still being started, or waits for the processor or a disk, is waited for until the deadline.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from multiverso.errors import StartupError
from multiverso.wire.messages import listening_sockets

_ASLEEP_SECONDS = 1.0
_IDLE = "STtZX"  # as in proc(5)
_STOPPED = "Tt"


class Silence:
    """What has been seen of the processes that hold a node's socket.

    Args:
        address: the node's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None
        self._seen: dict[int, tuple[str, int]] = {}

    def look(self) -> None:
        """Looks at them once more.

        Raises:
            StartupError: they have not done anything for a second, while there was something for them to do.
        """
        seen = {pid: _activity(pid) for pid in holders(self._address)}
        idle = bool(seen) and all(states and set(states) <= set(_IDLE) for states, _ in seen.values())
        used = {pid: ticks for pid, (_, ticks) in seen.items()}
        if not idle or used != {pid: ticks for pid, (_, ticks) in self._seen.items()}:
            self._seen, self._since = (seen, time.monotonic()) if idle else ({}, None)
        elif self._since is not None and time.monotonic() - self._since >= _ASLEEP_SECONDS:
            raise StartupError(self._verdict(seen))

    def _verdict(self, seen: dict[int, tuple[str, int]]) -> str:
        stopped = [pid for pid, (states, _) in seen.items() if _all_stopped(states)]
        if stopped:
            return _stopped_node(stopped[0])
        who = ", ".join(f"process {pid} ({_command(pid)})" for pid in seen)
        return (
            f"the node at {self._address!r} does not answer: {who} of this user has been asleep since we asked. "
            "It is not a node, or it hangs: end it, and start the job again"
        )


def said_if_stopped(pid: int) -> str | None:
    """Returns what to say of a node's process if it is stopped now, by a signal or a debugger; otherwise None."""
    return _stopped_node(pid) if _all_stopped(_activity(pid)[0]) else None


def _all_stopped(states: str) -> bool:
    return bool(states) and set(states) <= set(_STOPPED)


def _stopped_node(pid: int) -> str:
    return (
        f"the job's node is stopped: process {pid} ({_command(pid)}); `kill -CONT {pid}` lets it continue, "
        f"`kill -KILL {pid}` ends the job"
    )


def holders(address: str) -> list[int]:
    """Returns the processes, of those that we may look at, that hold a listening socket of this abstract name."""
    try:
        inode = listening_sockets().get(address)
    except OSError:
        return []  # no /proc
    processes = map(int, filter(str.isdigit, os.listdir("/proc"))) if inode else ()
    return [pid for pid in processes if f"socket:[{inode}]" in _targets(pid)]


def _targets(pid: int) -> set[str]:
    found = set()
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                try:
                    found.add(os.readlink(entry.path))
                except OSError:  # closed meanwhile
                    continue
    except OSError:  # ended, or another user's
        pass
    return found


def _activity(pid: int) -> tuple[str, int]:
    """Returns the states of a process's threads, a letter each, and how much of the processor they have had."""
    states, ticks = "", 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
            states += fields[0]
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):  # it has just ended, or a thread of it: look again
        return "", 0
    return states, ticks


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    line = " ".join(" ".join(words).split())
    return line if len(line) <= 60 else line[:60] + "..."
