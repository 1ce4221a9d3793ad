"""``python -m platoon._child PARENT COMMAND...``: becomes COMMAND, which will end when its parent ends.

A program of its own and not a ``preexec_fn``, which is unsafe in a parent that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for SIGKILL at the parent's end, sees that the parent is still there, and becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the request
    os.execv(sys.executable, [sys.executable, "-u", *command])


if __name__ == "__main__":
    main()
