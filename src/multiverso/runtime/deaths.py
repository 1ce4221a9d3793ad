"""How the node notices a worker's death, or its leaving: it sleeps on the mutex that the worker holds for its life.

The worker's side is ``liveness.py``. The kernel releases a robust mutex when its owner's process ends, however it ends,
and wakes whatever sleeps on it, within a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from multiverso import layout as at
from multiverso.memory import mutex
from multiverso.runtime.control import Control

_LOOK_SECONDS = 1.0


def await_end(
    control: Control, worker_id: int, closing: Callable[[], bool], withdrawn: Callable[[], bool]
) -> Literal["left", "lost"] | None:
    """Sleeps until a worker's life mutex is released or its owner is dead, and says so to all who wait.

    Args:
        control: the control segment of its generation.
        worker_id: which worker.
        closing: whether the node is about to end.
        withdrawn: whether the mutex is given back by a worker that is not lost.

    Returns:
        How it ended; None where it has not, or where that means nothing.
    """
    address = control.block(worker_id) + at.LIFE
    code = mutex.TIMED_OUT
    while code == mutex.TIMED_OUT and not closing():
        code = mutex.lock(address, _LOOK_SECONDS)
    if code == mutex.TIMED_OUT:
        return None
    if code == mutex.OWNER_DEAD:
        mutex.recover(address)
    is_held = code in (0, mutex.OWNER_DEAD)
    if withdrawn():
        if is_held:
            mutex.unlock(address)
        return None
    left = is_held and control.participation(worker_id) == at.LEFT
    if is_held:
        mutex.unlock(address)
    # the word is set here and now: waiters must not depend on what else the node has to do
    control.settle(worker_id, at.GONE if left else at.LOST)
    return "left" if left else "lost"
