"""What has to be true of the rounds that were finished, whoever came and went: see ``laws.rounds``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from interleavings.world import World


@dataclass
class Life:
    """One worker from its beginning to its end.

    Attributes:
        counts: its contributions up to and in each round that it finished.
        values: what it read in each.
        given: its contributions so far; ``asked``: with the operation that it is at.
        chunked: whether that one is an exchange.
        latest: of one that left an add, the round in flight then and one more.
        end: "" while it runs, then "left" or "lost"; of one that was killed, "".
    """

    number: int
    worker: int
    late: bool
    counts: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    given: int = 0
    asked: int = 0
    chunked: bool = False
    first: int = 0
    latest: int = 0
    end: str = ""


def judge(world: World, shard: Any, lives: list[Life]) -> None:
    finished = sorted({number for life in lives for number in life.values})
    for number in finished:
        readers = [life for life in lives if number in life.values]
        value = readers[0].values[number]
        for other in readers[1:]:
            assert np.array_equal(value, other.values[number]), (
                f"round {number}: {readers[0].worker} and {other.worker} read different values"
            )
        for life in lives:
            _judge_counts(life, number, (value >> (8 * life.number)) & 0xFF, finished, bool(world.dead))
    for life in lives:
        rounds = sorted(life.values)
        assert rounds == list(range(rounds[0], rounds[0] + len(rounds))) if rounds else True, f"{life} left out a round"
        ended = life.end or world.actors[life.worker].dead or life.worker in world.dead
        assert ended, f"worker {life.worker} neither finished nor died"
        if life.end == "lost":
            assert world.dead, f"worker {life.worker} was told that one is lost, and nobody died"
            assert not world.continues, f"worker {life.worker} did not go on without the lost"
    if finished:
        committed = shard.committed
        assert committed >= finished[-1], f"round {finished[-1]} was finished, and {committed} is the last committed"


def judge_seen(lives: list[Life], seen: list[tuple[int, Any]]) -> None:
    """A snapshot is the values of its round, or of the one before where that was finished by nobody."""
    values = {number: life.values[number] for life in lives for number in life.values}
    for number, copy in seen:
        for life in lives:
            if life.values and 0 <= number < min(life.values):
                assert not ((copy >> (8 * life.number)) & 0xFF).any(), (
                    f"a snapshot of round {number} has what worker {life.worker} gave in a later one"
                )
        before = [known for known in values if known <= number]
        if number == 0 or number in values:
            wanted = values.get(number, np.zeros_like(copy))
            assert np.array_equal(copy, wanted), f"a snapshot of round {number} is not its values"
        elif number > 0 and before:
            assert (copy >= values[max(before)]).all(), f"a snapshot of round {number} is older than it"


def _judge_counts(life: Life, number: int, found: Any, finished: list[int], died: bool) -> None:
    earlier = [r for r in life.values if r <= number]
    least = life.counts[max(earlier)] if earlier else 0
    if number in life.values:
        assert (found == least).all(), f"round {number}: {life.worker} gave {least}, and {np.unique(found)} is in it"
        return
    later = [life.counts[r] for r in life.values if r > number]
    if later:
        assert (found == least).all(), f"round {number}: {life.worker}, not in it, gave {least}: {np.unique(found)}"
        return
    if life.end == "left":
        # what it added last is in the next round; of a latecomer perhaps in the one after that was in flight
        due = max(life.values) + 1 if life.values else life.first
        surely = max(due + 1, life.latest) if life.late else due
        if number < due:
            possible = {least}
        elif number < surely or (died and any(r not in finished for r in range(due, surely + 1))):
            # (a round that only workers took part in who died is made one in which nothing was added)
            possible = {least, life.given}
        else:
            possible = {life.given}
        assert (found == found[0]).all(), f"round {number}: a part of an add of {life.worker}: {found}"
        assert int(found[0]) in possible, (
            f"round {number}: {life.worker} left after {life.given}, and {found[0]} is in it"
        )
        return
    assert ((found >= least) & (found <= life.asked)).all(), (
        f"round {number}: {life.worker} had given {least} to {life.asked}, and {np.unique(found)} is in it"
    )
    if not life.chunked:
        assert (found == found[0]).all(), f"round {number}: a part of an add of {life.worker}: {found}"
    else:
        assert (np.diff(found) <= 0).all(), f"round {number}: not the first chunks of {life.worker}: {found}"
