"""How much is under way: as much as the way is long."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
from fabric_support import new_shard

from multiverso.hosts.codecs import Wire
from multiverso.hosts.options import Every
from multiverso.hosts.peer.resources import Pace
from multiverso.hosts.transport.channel import FAR, Plain, megabytes_for
from multiverso.hosts.values.copies import Changes, Copy
from multiverso.hosts.values.link import Link
from multiverso.hosts.values.state import Held
from multiverso.spec.table import TableSpec


def test_a_long_way_asks_for_more_up_to_a_limit() -> None:
    assert [megabytes_for(seconds) for seconds in (0, 0.0002, 0.001, 0.003, 1, FAR)] == [2, 2, 4, 8, 8, 8]


def test_the_system_says_how_long_the_way_is() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        assert all(0 <= Plain(end).round_trip() < FAR for end in (one, other))
    one, other = socket.socketpair()  # which know no TCP
    with one, other:
        assert Plain(one).round_trip() == math.inf


@pytest.mark.parametrize(
    ("seconds", "kibibytes", "under_way"), [(0.0, 1024, 2), (0.0, 512, 4), (0.0, 64, 8), (FAR, 1024, 8)]
)
def test_a_link_pushes_as_many_bytes_before_an_answer(seconds: float, kibibytes: int, under_way: int) -> None:
    links = []
    elements = 10 * kibibytes * 256
    for me in range(2):
        copy = Copy(new_shard(TableSpec("array", 1, elements)), chunk_bytes=kibibytes * 1024)
        copy.shard.values()[:] = np.arange(elements)
        link = Link(me, 1 - me, Pace(0))
        link.attach(1, Held(copy, Changes(), [1] * len(copy.chunks), Wire.of("native", copy.dtype), Every()))
        link.connect(1)
        link.at_distance(seconds)
        links.append(link)
    sender, receiver = links

    def go(source: Link, target: Link) -> int:
        sent = 0
        while (out := source.next(0.0)) is not None:
            room = target.accept(out.header)
            if room is not None:
                room[:] = out.body
            target.arrived(out.header, room, 0.0)
            sent += 1
        return sent

    while go(sender, receiver) + go(receiver, sender):  # both open the table
        pass
    ticket = sender.settle(take=False)
    assert go(sender, receiver) == under_way
    while go(receiver, sender) + go(sender, receiver):
        pass
    assert ticket.done
    assert receiver._tables[1].held.copy.shard.values()[39] == 78
