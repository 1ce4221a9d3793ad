"""Another user of the machine, who does what a test tells."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from multiverso.files import users

SECONDS = 60.0
OURS, OTHER = 54321, 54322  # users that nobody is; and the first of them is not the overflow number either
CLONE_NEWUSER = 0x10000000

needs_root = pytest.mark.skipif(os.geteuid() != 0 or users.look_alike(), reason="only root can act as another user")


def enter_unmapped_namespace() -> None:
    """Puts this process into a user namespace of its own in which every user, itself too, has one number."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWUSER)")


def namespaces_work() -> bool:
    """Whether this machine lets a plain user make user namespaces (many forbid it)."""
    return subprocess.run(["unshare", "--user", "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="this machine does not let us make user namespaces")


class Person:
    """A process of some user that runs a piece of Python and prints JSON lines.

    The text finds the arguments in ``args``, ``say(...)``, and ``become()``, which it calls once it has imported
    what it needs: until then it is still root, whose files another user may not even read.
    """

    PREAMBLE = """
import ctypes, json, os, socket, struct, sys, time
sys.path[:0] = json.loads(sys.argv[3])
uid, args = int(sys.argv[1]), json.loads(sys.argv[2])
def say(*what):
    print(json.dumps(what), flush=True)
def become():
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, 1)  # /proc/self is ours again
"""

    def __init__(self, text: str, *args: Any, uid: int = OTHER, **environ: str) -> None:
        arguments = [str(uid), json.dumps(args), json.dumps([os.path.dirname(__file__), *sys.path])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", self.PREAMBLE + text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # one thread: a process that has more cannot enter a user namespace
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **environ},
        )

    def hear(self) -> Any:
        """Waits for the next thing that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(SECONDS)} and said nothing"
        return json.loads(line)

    def tell(self, line: str = "") -> None:
        """Gives it a line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)
