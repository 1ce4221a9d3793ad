"""Runs a command while its processes are stopped at random for up to a second, as a busy machine may do.

    python scripts/pauses.py SEED COMMAND...

Ends with the command's exit code. Tests that pass under it do not depend on who is scheduled when.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = (0.05, 0.2, 0.5, 0.8)  # a node that is stopped for a whole second while a worker comes is given up
AT_ONCE = 4


def state_and_parent(pid: int) -> tuple[str, int]:
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def descendants(root: int) -> list[int]:
    """Processes that the root has started, and those that they have; not those whose parent has ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children.setdefault(state_and_parent(int(entry))[1], []).append(int(entry))
            except OSError:  # it ended while we looked
                continue
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def main() -> int:
    seed, *command = sys.argv[1:]
    chance = random.Random(seed)
    pauses = 0
    paused: list[tuple[float, int]] = []
    with subprocess.Popen(command) as running:
        while running.poll() is None or paused:
            while paused and (paused[0][0] <= time.monotonic() or running.returncode is not None):
                resume(heapq.heappop(paused)[1])
            pids = descendants(running.pid) if running.returncode is None else []
            if pids and len(paused) < AT_ONCE and chance.random() < 0.5:
                pid = chance.choice(pids)
                if pause(pid):
                    heapq.heappush(paused, (time.monotonic() + chance.choice(SECONDS), pid))
                    pauses += 1
            time.sleep(0.1)
    print(f"{pauses} pauses, seed {seed}")
    return running.returncode


def pause(pid: int) -> bool:
    """Stops a process, unless somebody else has stopped it."""
    try:
        if state_and_parent(pid)[0] not in "RSD":
            return False
        os.kill(pid, signal.SIGSTOP)
    except OSError:
        return False
    return True


def resume(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main())
