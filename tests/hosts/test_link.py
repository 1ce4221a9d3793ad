"""Two links, frame by frame: orders of events that real connections show seldom."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fabric_support import changed, new_shard

from multiverso.hosts import codecs
from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import Every
from multiverso.hosts.peer.frames import Header
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.values import frames
from multiverso.hosts.values.copies import Changes, Copy
from multiverso.hosts.values.link import Link
from multiverso.hosts.values.state import Held
from multiverso.spec.table import TableSpec


def carry(source: Link, target: Link) -> list[int]:
    """Carries what a link has to send to the other; returns the kinds of the frames."""
    kinds = []
    while (out := source.next(0.0)) is not None:
        room = target.accept(Header(*out.header))
        if room:
            room[:] = out.body
        target.arrived(Header(*out.header), room, 0.0)
        kinds.append(out.header.kind)
    return kinds


def test_a_push_whose_answer_crosses_new_homes_does_not_go_again() -> None:
    links = []
    for me in range(2):
        copy = Copy(new_shard(TableSpec("array", 1, 4)))
        copy.shard.values()[:] = np.arange(4)
        link = Link(me, 1 - me, Pace(0))
        link.attach(1, Held(copy, Changes(), [1], Wire.of("native", copy.dtype), Every()))
        link.connect(1)
        links.append(link)
    pusher, home = links
    while carry(pusher, home) + carry(home, pusher):  # both open the table
        pass
    ticket = pusher.settle(take=False)
    assert carry(pusher, home) == [frames.PUSH]
    for link in links:  # another host is lost
        link.regroup(1, 1, {}, [])
    assert carry(home, pusher) == [frames.VALUE, frames.OPEN]
    assert ticket.done
    assert carry(pusher, home) == [frames.OPEN]
    assert carry(home, pusher) == []


def opened(wire: str = "native", read: Callable[[], int] | None = None) -> tuple[list[Link], list[Copy], Changes]:
    """Returns a host's link and its home's with a table of zeros, what each has of it, and the host's changes."""
    copies = [Copy(new_shard(TableSpec("array", 1, 4))) for _ in range(2)]
    changes = [Changes(read), Changes()]
    links = [Link(me, 1 - me, Pace(0)) for me in range(2)]
    for link, copy, counted in zip(links, copies, changes, strict=True):
        link.attach(1, Held(copy, counted, [1], Wire.of(wire, copy.dtype), Every()))
        link.connect(1)
    links[0].settle(take=False)
    exchange(*links)
    return links, copies, changes[0]


def exchange(pusher: Link, home: Link) -> None:
    """Carries all that the two have for each other."""
    while carry(pusher, home) + carry(home, pusher):
        pass


def no_memory(*_: object) -> None:
    raise MemoryError


def test_memory_of_a_push_that_is_forgotten_while_it_is_sent_is_not_used_again() -> None:
    (pusher, _), (copy, _), changes = opened()
    copy.shard.values()[:] = 1.0
    changes.version += 1
    pusher.look(0.0)
    out = pusher.next(0.0)
    assert out is not None
    assert out.header.kind == frames.PUSH
    sent = bytes(out.body)
    pusher.detach(1)
    other = pusher._pool.take(len(out.body))
    other[:] = 0xFF
    assert bytes(out.body) == sent


def test_a_push_that_is_added_is_answered_also_when_memory_for_the_wire_format_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links, copies, changes = opened("int8")
    pusher, home = links
    for copy, value in zip(copies, (1.0, 2.0), strict=True):
        copy.shard.values()[:] = value
    changes.version += 1
    pusher.look(0.0)
    with monkeypatch.context() as patch:
        out = pusher.next(0.0)
        assert out is not None
        header = Header(*out.header)
        room = home.accept(header)
        assert room
        room[:] = out.body
        patch.setattr(codecs, "encode", no_memory)
        home.arrived(header, room, 0.0)
        answer = home.next(0.0)
        assert answer is not None
        assert answer.header.kind == frames.VALUE
    for link in links:  # the answer does not arrive, and another connection begins
        link.cut()
        link.connect(1)
    pusher.settle(take=True)
    exchange(pusher, home)
    assert [copy.shard.values().tolist() for copy in copies] == [[3.0] * 4] * 2


def test_a_push_for_which_memory_was_missing_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    links, copies, changes = opened()
    pusher, home = links
    copies[0].shard.values()[:] = 1.0
    changes.version += 1
    for waited_for in (False, True):
        pusher.settle(take=False) if waited_for else pusher.look(0.0)
        with monkeypatch.context() as patch:
            patch.setattr(pusher._pool, "take", no_memory)
            with pytest.raises(MemoryError):
                pusher.next(0.0)
        for link in links:
            link.cut()
            link.connect(1)
        exchange(pusher, home)
        assert waited_for or pusher.look(0.0) == 0.0
    ticket = pusher.settle(take=False)
    exchange(pusher, home)
    assert ticket.done
    assert np.all(copies[1].shard.values() == 1)


def test_the_end_of_a_pass_begins_the_next_where_workers_have_changed_the_table() -> None:
    times = [0]
    (pusher, home), (mine, theirs), changes = opened(read=lambda: times[0])
    mine.shard.values()[:], times[0] = 1, 1
    changes.look()
    pusher.look(0.0)
    assert carry(pusher, home) == [frames.PUSH]
    assert pusher.passing  # nobody has to look before it is over
    assert carry(home, pusher) == [frames.ANSWER]
    assert carry(pusher, home) == [frames.PUSH]  # what the first may have left: nothing
    mine.shard.values()[:], times[0] = 2, 2
    assert carry(home, pusher) == [frames.ANSWER]
    assert pusher.passing
    assert carry(pusher, home) == [frames.PUSH]
    assert theirs.shard.values().tolist() == [2] * 4
    exchange(pusher, home)
    assert not pusher.passing


def test_a_copy_says_how_often_its_table_has_changed_and_remembers_it_when_it_is_closed() -> None:
    copy = Copy(new_shard(TableSpec("array", 1, 4)))
    before = copy.version()
    changed(copy.shard)
    assert copy.version() == before + 1
    copy.close()
    changed(copy.shard)
    assert copy.version() == before + 1


def test_how_far_copies_are_behind_counts_from_the_last_time_that_nothing_differed() -> None:
    (pusher, home), (copy, _), changes = opened()
    for link in (pusher, home):
        link.look(1.0)
    assert pusher.behind(5.0) == home.behind(5.0) == 0.0
    copy.shard.values()[:] = 1.0
    changes.version += 1
    pusher.look(5.0)  # a pass begins
    assert pusher.behind(7.0) == 6.0  # what was there at 1.0 is known to be at the home
    exchange(pusher, home)
    for now in (8.0, 8.5):  # the next pass finds nothing
        pusher.look(now)
        exchange(pusher, home)
    pusher.look(9.0)
    assert pusher.behind(10.0) == 0.0
    pusher.cut()
    assert pusher.behind(12.0) == 3.0
