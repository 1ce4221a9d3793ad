"""Whose saved state each worker resumes, where more or fewer workers resume a run than saved it."""

from __future__ import annotations

from dataclasses import dataclass

from multiverso.checkpoints.manifests import Generation
from multiverso.checkpoints.stores import Store
from multiverso.runtime import Session
from multiverso.saying import say


@dataclass(frozen=True)
class Role:
    """Whose state a worker resumes: its own; or one's that nobody else has, where it has none.

    Attributes:
        saved_as: whose part it takes.
        newcomer: that worker's place has been taken already: there are more workers than were saved.
        left: whose part nobody takes, as there are fewer; each is in one worker's role.
    """

    saved_as: int
    newcomer: bool
    left: list[int]


def role_of(generation: Generation, live: list[int], me: int) -> Role:
    """Returns whose state a live worker resumes."""
    saved, place = generation.workers, live.index(me)
    role_of_live, left = _shared_out(saved, live)
    return Role(role_of_live.get(me, saved[place % len(saved)]), me not in role_of_live, left[place :: len(live)])


def _shared_out(saved: list[int], live: list[int]) -> tuple[dict[int, int], list[int]]:
    """Returns who resumes whose state, and whose nobody does."""
    without, unclaimed = [w for w in live if w not in saved], [w for w in saved if w not in live]
    return {w: w for w in live if w in saved} | dict(zip(without, unclaimed, strict=False)), unclaimed[len(without) :]


def tell(store: Store, generation: Generation, session: Session, live: list[int], leads: bool) -> None:
    """Prints which worker resumes whose state; nothing where as many resume as have saved."""
    role = role_of(generation, live, session.worker_id)
    by = f"{store} was saved by {count(generation.workers)}"
    if role.newcomer:
        say(
            f"{by}, so worker {session.worker_id} has nothing of its own there: it begins from the shared values, "
            f"and gets as own what worker {role.saved_as} had handed over"
        )
    elif leads and (left := _shared_out(generation.workers, live)[1]):
        gone = ", ".join(map(str, left))
        say(f"{by}, and {count(live)} resumed: what was worker {gone}'s own is left out")


def count(workers: list[int]) -> str:
    """Returns which workers, in words."""
    return f"{len(workers)} worker{'s' * (len(workers) != 1)} ({', '.join(map(str, workers))})"
