"""Control connections that are cut, silent or slow lose nothing, and who is lost is so for a reason."""

from __future__ import annotations

import pytest
from simulated.control import Control

from multiverso.hosts.peer.conversation import Conversation, Timeouts
from multiverso.hosts.peer.frames import ProtocolError

SCHEDULES = 300
FOUND = (5023, 7533)  # what was said again after a cut had changed meanwhile


def test_every_order_arrives_once_and_nobody_waits_for_ever() -> None:
    faults = lost = 0
    for seed in (*range(SCHEDULES), *FOUND):
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


def test_what_the_other_end_may_not_say_is_an_error() -> None:
    def heard() -> Conversation:
        conversation = Conversation(Timeouts(), 0.0)
        conversation.connected(0.0)
        conversation.receive(b'{"heard": 0, "number": 1, "say": {"do": "x"}}', 0.0)
        return conversation

    assert heard().receive(b'{"heard": 0, "number": 1, "say": {"do": "again"}}', 0.0) == (None, [])
    for body in (
        b"nonsense",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"heard": 1}',
        b'{"heard": -1}',
        b'{"heard": true}',
        b'{"heard": 0, "number": 3, "say": {}}',
        b'{"heard": 0, "number": 2}',
        b'{"heard": 0, "number": "2", "say": {}}',
    ):
        with pytest.raises(ProtocolError):
            heard().receive(body, 0.0)
