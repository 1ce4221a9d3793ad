"""Begins a worker's checkpoint: looks at what is in the store, and agrees on the last number.

Each returns the last number, and whether there is something to be continued from.
"""

from __future__ import annotations

import contextlib

from multiverso.checkpoints.board import FAILED, NOTHING, Board
from multiverso.checkpoints.generations import numbers_in, refuse_strangers, remove_others
from multiverso.checkpoints.manifests import read_generations
from multiverso.checkpoints.stores import Store, make_usable
from multiverso.errors import SnapshotError
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import Together
from multiverso.runtime.discovery.restarts import may_resume
from multiverso.saying import say

_STEPS = 3  # that all workers do together
_LOCK_SECONDS = 5.0  # one that was killed just now holds its lock until it has ended


def begin_together(
    session: Session, store: Store, board: Board, held: contextlib.ExitStack, resume: bool
) -> tuple[int, bool]:
    """Looks at what is saved, the same in all workers.

    Args:
        session, store, board: of the checkpoint.
        held: gets what the lowest worker holds until its end, so that no other job writes there.
        resume: whether a run that is there is to be continued from.

    Raises:
        SnapshotError: the store cannot be used, or holds a run that nobody asked to resume.
    """
    task = Together(session, "checkpoint", lambda why: SnapshotError(f"{store} cannot be used: {why}"))

    def look() -> str:
        if not task.leads:
            return ""
        make_usable(store)
        held.enter_context(store.alone(_LOCK_SECONDS, session.job))
        there = read_generations(store, missing_ok=True)
        if there and not (resume or may_resume()):
            raise SnapshotError(
                f"{store} holds a run already (saved as {there[-1].folder}). To resume it: `multiverso "
                "run --resume`, MULTIVERSO_RESUME=1, or checkpoint(..., resume=True); to begin a new one, give "
                "another directory, or remove this one"
            )
        refuse_strangers(store, there)
        if not there and (resume or may_resume()):
            say(f"{store} holds no saved run to resume from: this one begins at its first step")
        remove_others(store, there)
        return f"{max([0, *numbers_in(store)])} {len(there)}"

    task.step()  # who leads is settled before it looks: one that dies while others wait for it here does not
    said = "".join(task.step(look).values())
    last, there = map(int, said.split())
    board.say(last, NOTHING)  # what was said of another checkpoint does not count
    task.step()
    return last, there > 0


def begin_alone(
    session: Session, store: Store, board: Board, held: contextlib.ExitStack, resume: bool
) -> tuple[int, bool]:
    """As `begin_together`, for a worker that takes a dead one's place: the others have done so before, and continue."""
    if session.consistency.in_step:
        raise SnapshotError(
            "in a synchronous job all workers count the steps to a checkpoint alike, so that none can take the "
            "place of one that died: start the job again (multiverso run --max-restarts), or make no checkpoints"
        )
    if session.worker_id == min(session.live_workers()):  # then nobody has what the dead one held
        make_usable(store)
        held.enter_context(store.alone(_LOCK_SECONDS, session.job))
    resumes = bool(read_generations(store, missing_ok=True))
    # The board knows what live workers have begun: where no other has, only the store tells which numbers are taken. It
    # is looked at first, as a number is said before anything is written.
    taken = max([0, *numbers_in(store)])
    newest = board.newest() or taken
    if newest:  # if it is being written, its other parts do not wait for this worker's
        board.say(newest, FAILED)
    session.count_barriers(session.barriers + _STEPS)  # which the others have passed
    return newest, resumes
