"""Numba kernels: addresses and arrays in, an effect in place out. They know no process, socket or session.

``load(dtype)`` compiles or loads them; nothing here imports Numba before that.

A kernel returns ``(progress << 16) | code``. Code 0 means done, any other says why it stopped (a slice of
waiting is over, a signal came, someone is lost), and the caller goes back in with the same progress.
"""

from __future__ import annotations

from multiverso.kernels.compiling import Kernels, Update, load, load_steps, load_waits

DONE = 0
LOST_SOMEONE = 1
EINTR = 4
TIMED_OUT = 110  # ETIMEDOUT: a slice of waiting is over
OWNER_DEAD = 130
NOT_RECOVERABLE = 131
BAD_ROW = 256

__all__ = [
    "BAD_ROW",
    "DONE",
    "EINTR",
    "LOST_SOMEONE",
    "NOT_RECOVERABLE",
    "OWNER_DEAD",
    "TIMED_OUT",
    "Kernels",
    "Update",
    "load",
    "load_steps",
    "load_waits",
]
