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
