"""Which user is this, and does its number tell it apart from the others?"""

from __future__ import annotations

import os
from pathlib import Path

_ALL_USERS = 0xFFFFFFFF
_USUAL_OVERFLOW = 65534


def look_alike(proc: Path = Path("/proc")) -> bool:
    """Returns whether another user may have the number that this process knows as its own.

    In a user namespace a user who is not in its map is shown as the overflow number (65534). With no map at all
    (``unshare --user``) that is everybody, this process included.
    """
    try:
        overflow = int((proc / "sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        overflow = _USUAL_OVERFLOW
    if os.geteuid() != overflow:
        return False
    try:
        counts = [int(line.split()[2]) for line in (proc / "self/uid_map").read_text().splitlines()]
    except OSError:
        return True
    return sum(counts) < _ALL_USERS
