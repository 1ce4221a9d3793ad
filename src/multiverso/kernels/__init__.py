"""Numba kernels: addresses and arrays in, an effect in place out. They know no process, socket or session.

``dense.add.compiled("float32")`` compiles one or loads it from disk (``multiverso.compiling``); nothing here imports
Numba before that.

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

__all__ = ["BAD_ROW", "DONE", "EINTR", "LOST_SOMEONE", "MISMATCH", "NOT_RECOVERABLE", "OWNER_DEAD", "TIMED_OUT"]
