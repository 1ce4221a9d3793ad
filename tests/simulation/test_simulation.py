"""Sums are exact in every simulated schedule tried here; `make simulate` tries others for as long as it is let."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated import clocks, quorum, rejoining, rounds, statistics
from simulated.world import Memory, run

from multiverso.hosts.peer.frames import ProtocolError
from multiverso.hosts.rounds import frames
from multiverso.hosts.rounds.frames import RoundHeader
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.rounds.state import WINDOW

SCHEDULES = 88
JOINS = 12
ROUNDS = 40
FEW = 15


@pytest.mark.parametrize("part", range(4))
def test_sums_are_exact_whatever_the_network_does(part: int) -> None:
    faults, memory = 0, Memory()
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        try:
            faults += run(seed, memory).faults
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS=--replay: {error}") from error
    assert faults, "these schedules had no fault in them"


def test_a_lost_host_that_comes_again_makes_no_sum_wrong() -> None:
    """What it had given to a home before counts, what its place adds afterwards counts once."""
    joined, memory = 0, Memory()
    for seed in range(JOINS):
        try:
            joined += run(seed, memory, joins=True).joined
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--joins --replay': {error}") from error
    assert joined > JOINS // 2, "in the others it is lost when all is over"


def test_rounds_have_the_same_bits_whatever_the_network_does() -> None:
    faults = lost = 0
    for seed in range(ROUNDS):
        try:
            world = rounds.run(seed)
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--rounds --replay': {error}") from error
        faults, lost = faults + world.faults, lost + world.moves
    assert faults > lost > 0, "these schedules had no fault in them"


def test_with_a_quorum_each_add_is_in_one_round_and_nobody_waits_longer_than_the_grace() -> None:
    faults = lost = stopped = early = 0
    for seed in range(ROUNDS):
        try:
            world = quorum.run(seed)
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--quorum --replay': {error}") from error
        faults, lost = faults + world.faults, lost + world.moves
        stopped, early = stopped + world.stopped, early + world.early
    assert faults > lost > 0, "these schedules had no fault in them"
    assert early > stopped > 0, "in these schedules nobody was late, or stopped for good"


def test_rounds_have_the_same_bits_whoever_is_lost_and_comes_again() -> None:
    """It passes on what the others send, gets their values between two rounds, and is in all that follow."""
    filled = 0
    # in these a total that all have was due, and kept no more; a round had gone by without one that waited for the
    # values; values were given before those that overwrite them had come
    found = (460263697760, 151501679780, 151501680958)
    for seed in (20456, *found, *range(FEW)):
        try:
            filled += rejoining.run(seed).filled
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--rejoining --replay': {error}") from error
    assert filled > FEW // 2, "in these schedules nobody came again"


def test_statistics_stay_between_those_of_the_hosts_whatever_the_network_does() -> None:
    faults, memory = 0, Memory()
    for seed in range(FEW):
        try:
            faults += statistics.run(seed, memory).faults
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--statistics --replay': {error}") from error
    assert faults, "these schedules had no fault in them"


def test_reads_are_no_older_than_the_bound_whatever_the_network_does() -> None:
    faults, memory = 0, Memory()
    for seed in range(FEW):
        try:
            faults += clocks.run(seed, memory).faults
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--clocks --replay': {error}") from error
    assert faults, "these schedules had no fault in them"
    with pytest.raises(AssertionError, match="reads"):
        for seed in range(FEW):
            clocks.run(seed, memory, kind=clocks.Careless)


def test_a_seed_makes_the_same_schedule_again() -> None:
    lines: list[list[str]] = [[], []]
    for kept in lines:
        run(7, Memory(), kept.append)
    assert lines[0] == lines[1]


def test_a_table_that_ends_while_it_is_looked_at_is_touched_no_more() -> None:
    class Ending(rounds.Staged):
        ended = False

        def members(self, number: int) -> int | None:
            if self.ready:
                host.detach(rounds.TABLE)
                self.ended = True
            return None

        def wanted(self, number: int) -> bool:
            assert not self.ended, "its memory may be another table's"
            return False

    host = Rounds(0, [0], lambda peer: None)
    staged = Ending(4, 4, np.zeros(4, np.float32), [])
    host.attach(rounds.TABLE, staged)
    host.begin(rounds.TABLE)
    host.look(0.0)
    staged.ready = 1
    host.look(0.0)
    assert staged.ended


def _exchange(hosts: list[Rounds], look: Callable[[], None] = lambda: None) -> None:
    """Brings to each host what the others have for it, until nobody has anything; calls `look` after each frame."""
    moved = True
    while moved:
        moved = False
        for number, host in enumerate(hosts):
            host.look(0.0)
            for peer, other in enumerate(hosts):
                while peer != number and (out := host.ways[peer].next(0.0)) is not None:
                    moved, there = True, other.ways[number]
                    room = there.accept(out.header)
                    if room is not None:
                        room[:] = out.body
                    there.arrived(out.header, room, 0.0)
                    look()


def test_set_values_come_in_the_order_of_the_head_where_only_that_has_begun_a_round() -> None:
    """A reading that was given up leaves the head ready for a round; the others come to it after the barrier."""
    numbers = np.arange(4, dtype=np.float32)
    hosts: list[Rounds] = [Rounds(number, range(2), lambda peer: None) for number in range(2)]
    staged = [rounds.Staged(4, 2, numbers, [[numbers], [numbers]]) for _ in hosts]

    def go() -> None:
        _exchange(hosts)

    for number, host in enumerate(hosts):
        host.attach(rounds.TABLE, staged[number])
        Neighbour(host, 1 - number).connect(1)
        host.begin(rounds.TABLE)
    go()
    staged[0].ready = 1
    go()
    turns = [host.turns()[rounds.TABLE] for host in hosts]
    assert turns == [2, 1]
    staged[1].values[-1][:] = 9  # the last finished round's, which are what a worker of host 1 sets
    for host in hosts:
        host.overwrite(rounds.TABLE, 1, max(turns), awaited=False)
    go()
    assert not any(host.missing(rounds.TABLE) for host in hosts), "a barrier would wait for a round that nobody ends"
    staged[1].ready = 1
    go()
    for each in staged:  # the head's own values were not set when its part was added
        assert len(each.values) == 2
    assert np.array_equal(staged[0].values[1], staged[1].values[1])
    for turn in range(3, 3 + 3 * WINDOW):  # what is set is forgotten when nobody can lack it
        for host in hosts:
            host.overwrite(rounds.TABLE, 0, turn)
        go()
        assert not any(host.missing(rounds.TABLE) for host in hosts)
    assert all(len(host.tables[rounds.TABLE].overwrites) <= WINDOW for host in hosts)
    for each in staged:
        each.ready = 2
    go()
    assert np.array_equal(staged[0].values[2], staged[1].values[2])


def test_totals_are_kept_no_longer_than_somebody_can_lack_them() -> None:
    """What has arrived everywhere is used again at once, so that few steps' memory goes through the cache."""
    numbers = np.arange(10, dtype=np.float32)
    hosts: list[Rounds] = [Rounds(number, range(2), lambda peer: None) for number in range(2)]
    staged = [rounds.Staged(10, 1, numbers, [[numbers], [numbers]]) for _ in hosts]
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, *(len(each.tables[rounds.TABLE].totals) for each in hosts))

    for number, host in enumerate(hosts):
        host.at_distance(1 - number, 0.0)
        host.attach(rounds.TABLE, staged[number])
        Neighbour(host, 1 - number).connect(1)
        host.begin(rounds.TABLE)
    for ready in range(3):
        for each in staged:
            each.ready = ready
        _exchange(hosts, count)
    assert [len(each.values) for each in staged] == [3, 3]
    assert np.array_equal(staged[0].values[2], staged[1].values[2])
    assert most <= 8, "as many as are under way, and those of the last sum"
    way = hosts[1].ways[0]
    # all totals that there are; then, none
    lie = RoundHeader(frames.SUM, 0, 31 << 8, rounds.TABLE, 1, 4, 31, way._received + 1, way._sent)
    for flags, why in ((0, "is said to be known"), (20 << 8, "is said to be known")):
        with pytest.raises(ProtocolError, match=why):
            way.accept(lie._replace(flags=flags))


def test_values_come_past_a_host_that_has_come_again_and_not_made_the_table_yet() -> None:
    """Two hosts come again at once, and only the first one asks for the values."""
    numbers = np.arange(4, dtype=np.float32)
    hosts = [Rounds(0, [0], lambda peer: None), *(Rounds(n, range(3), lambda peer: None) for n in (1, 2))]
    there = rejoining.Kept(4, 2, numbers, [])
    hosts[0].attach(rounds.TABLE, there)
    hosts[0].begin(rounds.TABLE)
    hosts[0].regroup(range(3))
    blank = [rejoining.Kept(4, 2, numbers, [], blank=True, away=True) for _ in hosts[1:]]
    told: list[bool] = []
    for number, host in enumerate(hosts):
        if number:
            host.form(range(3), 1)
        for peer in {0, 1, 2} - {number}:
            Neighbour(host, peer).connect(1)
    hosts[1].attach(rounds.TABLE, blank[0], {})
    hosts[1].refill(rounds.TABLE, told.append)
    _exchange(hosts)
    assert not told, "they have not gone through the whole chain"
    hosts[2].attach(rounds.TABLE, blank[1], {})
    _exchange(hosts)
    assert told == [True], "nobody goes on before it is told"
    assert np.array_equal(blank[0].values[0], numbers)
