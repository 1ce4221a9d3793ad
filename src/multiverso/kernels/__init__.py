"""Numba kernels: addresses and arrays in, an effect in place out. They know no process, socket or session.

``load(dtype)`` compiles or loads them; nothing here imports Numba before that.

A kernel returns ``(progress << 16) | code``. Code 0 means done, any other says why it stopped
(``multiverso.kernels.codes``), and the caller goes back in with the same progress.
"""

from __future__ import annotations

from multiverso.kernels.codes import (
    BAD_ROW,
    DONE,
    EINTR,
    LOST_SOMEONE,
    MISMATCH,
    NOT_RECOVERABLE,
    OWNER_DEAD,
    TIMED_OUT,
)
from multiverso.kernels.compiling import Kernels, Update, load, load_steps, load_waits

__all__ = [
    "BAD_ROW",
    "DONE",
    "EINTR",
    "LOST_SOMEONE",
    "MISMATCH",
    "NOT_RECOVERABLE",
    "OWNER_DEAD",
    "TIMED_OUT",
    "Kernels",
    "Update",
    "load",
    "load_steps",
    "load_waits",
]
