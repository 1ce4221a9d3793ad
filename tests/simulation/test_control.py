"""Control connections that are cut, silent or slow lose nothing, and who is lost is so for a reason."""

from __future__ import annotations

import pytest
from simulated.control import Control

from multiverso.hosts.peer.frames import Header, ProtocolError
from multiverso.hosts.peer.messages import MESSAGE
from multiverso.hosts.peer.watched_stream import ENDS, Timeouts, WatchedStream

SCHEDULES = 300


def test_every_order_arrives_once_and_nobody_waits_for_ever() -> None:
    faults = lost = 0
    for seed in range(SCHEDULES):
        control = Control(seed)
        try:
            control.run()
        except Exception as error:
            raise AssertionError(f"make simulate SEED={seed} ARGS='--control --replay': {error}") from error
        faults, lost = faults + control.faults, lost + control.lost
    assert faults > SCHEDULES
    assert lost, "these schedules have lost no host"


def test_a_seed_makes_the_same_schedule_again() -> None:
    lines: list[list[str]] = [[], []]
    for kept in lines:
        Control(11, kept.append).run()
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (Header(MESSAGE, number=1, received=1), "said to be received"),
        (Header(MESSAGE, number=3), "came after message"),
        (Header(MESSAGE, length=5), "a message of 5 bytes"),
        (Header(MESSAGE, flags=ENDS, length=1 << 20), "a message of"),
    ],
)
def test_what_the_other_end_may_not_say_ends_the_conversation(header: Header, match: str) -> None:
    heard: list[bytes] = []
    conversation = WatchedStream(lambda message: heard.append(bytes(message)), Timeouts())
    conversation.connect(1)
    first = Header(MESSAGE, number=1, length=2)
    room = conversation.accept(first)
    assert room is not None
    room[:] = b"{}"
    conversation.arrived(first, room, 0.0)
    assert conversation.accept(first) is None, "once is enough"
    assert heard == [b"{}"]
    with pytest.raises(ProtocolError, match=match):
        conversation.accept(header)
    assert "what no node sends" in (conversation.ended or "")
