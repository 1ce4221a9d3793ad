"""Two links, frame by frame: orders of events that real connections show seldom."""

from __future__ import annotations

import numpy as np
from fabric_support import new_shard

from multiverso.hosts import frames
from multiverso.hosts.changes import Changes
from multiverso.hosts.copies import Copy
from multiverso.hosts.link import Link
from multiverso.hosts.pace import Every, Pace
from multiverso.hosts.wires import Wire
from multiverso.spec import TableSpec


def carry(source: Link, target: Link) -> list[int]:
    """Carries what a link has to send to the other; returns the kinds of the frames."""
    kinds = []
    while (out := source.next(0.0)) is not None:
        room = target.accept(frames.Header(*out.header))
        if room:
            room[:] = out.body
        source.sent(out)
        target.arrived(frames.Header(*out.header), room, 0.0)
        kinds.append(out.header.kind)
    return kinds


def test_a_push_whose_answer_crosses_new_homes_does_not_go_again() -> None:
    links = []
    for me in range(2):
        copy = Copy(new_shard(TableSpec("array", 1, 4)))
        copy.shard.values()[:] = np.arange(4)
        link = Link(me, 1 - me, Pace(0))
        link.attach(1, copy, Changes(), [1], Wire.of("native", copy.dtype), Every())
        link.connect(1)
        links.append(link)
    pusher, home = links
    while carry(pusher, home) + carry(home, pusher):  # both open the table
        pass
    ticket = pusher.settle(take=False)
    assert carry(pusher, home) == [frames.PUSH]
    for link in links:  # another host is lost
        link.regroup(1, 1, {}, [])
    assert carry(home, pusher) == [frames.OPEN, frames.VALUE]
    assert ticket.done
    assert carry(pusher, home) == [frames.OPEN]
    assert carry(home, pusher) == []


def opened(elements: int, chunk_bytes: int) -> tuple[Link, Link, Copy, Changes]:
    """Returns a host's link and its home's, which have one table of zeros, with what the host has of it."""
    copies = [Copy(new_shard(TableSpec("array", 1, elements)), chunk_bytes) for _ in range(2)]
    changes = [Changes() for _ in range(2)]
    links = [Link(me, 1 - me, Pace(0), window=2) for me in range(2)]
    for link, copy, changed in zip(links, copies, changes, strict=True):
        homes = [1] * len(copy.chunks)
        link.attach(1, copy, changed, homes, Wire.of("native", copy.dtype), Every())
        link.connect(1)
    pusher, home = links
    pusher.settle(take=False)
    while carry(pusher, home) + carry(home, pusher):
        pass
    return pusher, home, copies[0], changes[0]


def test_memory_of_a_push_that_is_forgotten_while_it_is_sent_is_not_used_again() -> None:
    pusher, _, copy, changes = opened(4, 1 << 20)
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
