"""The processor time of all processes of a job, which other work on the machine changes less than the clock."""

from __future__ import annotations

import contextlib
from pathlib import Path


def processor_seconds(root: int) -> float:
    """Returns what a process and all that it has started have used, but for threads that have ended."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    used = 0
    for process in parents:
        ancestor = process
        while ancestor not in (root, 0):
            ancestor = parents.get(ancestor, 0)
        if ancestor == root:
            for thread in Path(f"/proc/{process}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    used += int(thread.read_text().split()[0])
    return used * 1e-9
