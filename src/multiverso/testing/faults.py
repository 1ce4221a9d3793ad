"""Faults on purpose: "worker 2 is killed at its 5th add"."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any, NoReturn

from multiverso.kernels import locking


def die() -> NoReturn:
    """Kills this process as the kernel would: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive after SIGKILL")


def die_at(owner: Any, operation: str, count: int, *, after: bool = False) -> None:
    """Arranges for this process to be killed at the n-th call of a method.

    Args:
        owner: an object, such as a table or a session; this one alone is changed.
        operation: the name of its method.
        count: at which call from now, from 1.
        after: when that call is over, instead of before it begins.

    Examples:
        >>> if mv.worker_id() == 2:  # doctest: +SKIP
        ...     die_at(table, "add", 5)
    """
    if count < 1:
        raise ValueError(f"count={count}: calls are counted from 1")
    method = getattr(owner, operation)
    calls = 0

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            die()
        result = method(*args, **kwargs)
        if calls == count:
            die()
        return result

    setattr(owner, operation, counted)


def die_with_lock(table: Any, stripe: int = 0) -> NoReturn:
    """Kills this process while it holds one stripe of an asynchronous table."""
    hold_stripe(table, stripe)
    die()


def hold_stripe(table: Any, stripe: int = 0) -> None:
    """Takes one stripe of an asynchronous table, as a process would that is stopped there."""
    session = table._session
    place = (session.control.address, table._shard.base, session.index, stripe)
    if code := locking.hold_stripe.compiled()(*place):
        raise OSError(code, "the stripe's word could not be taken")


def free_stripe(table: Any, stripe: int = 0) -> None:
    """The end of `hold_stripe`: what the stripe guards counts as changed."""
    locking.free_stripe.compiled()(table._shard.base, table._session.index, stripe)
