"""Numba kernels: addresses and arrays in, an effect in place out. They know no process, socket or session.

``load(dtype)`` compiles or loads them; nothing here imports Numba before that.

A kernel returns a code: 0 means done, any other says why it stopped (``multiverso.kernels.codes``). How far it is it
writes into words of the caller's, in one step with its effects, and the caller goes back in with the same words.
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
from multiverso.kernels.compiling import Kernels, Update, load, load_rules, load_waits

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
    "load_rules",
    "load_waits",
]
