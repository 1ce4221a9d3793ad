"""Frames from bytes: however these are cut, and several that come at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from multiverso.hosts.peer.frames import LONGEST_BODY, Header, ProtocolError, Reader
from multiverso.hosts.values.frames import ANSWER, NEWS, PUSH


def bodies_of(stream: bytes, cuts: random.Random, skip: int) -> list[tuple[Header, bytes | None]]:
    """What a reader makes of a stream that comes in pieces; frames of table ``skip`` are not wanted."""
    reader = Reader()
    found: list[tuple[Header, bytes | None]] = []
    while stream:
        room = reader.room()
        count = min(len(room), len(stream), cuts.choice((1, 23, 24, 25, 4_000, 1 << 20)))
        room[:count], stream = stream[:count], stream[count:]
        reader.filled(count)
        while True:
            begun = reader.begin()
            whole = (
                reader.whole()
                if begun is None
                else reader.place(None if begun.table == skip else memoryview(bytearray(begun.length)))
            )
            if whole is None:
                break
            found.append((whole[0], None if whole[1] is None else whole[1].tobytes()))
    assert not reader.inside
    return found


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(seed: int) -> None:
    cuts, sent = random.Random(seed), []
    for number in range(60):
        body = os.urandom(cuts.choice((0, 0, 7, 4_000, 16_383, 16_384, 16_385, 100_000)))
        kind = cuts.choice((PUSH, ANSWER, NEWS))
        sent.append((Header(kind, table=cuts.randrange(3), length=len(body), number=number), body))
    stream = b"".join(header.pack() + body for header, body in sent)
    expected = [(header, None if header.table == 2 else body) for header, body in sent]
    assert bodies_of(stream, cuts, skip=2) == expected


def test_a_header_that_is_refused_ends_it() -> None:
    with pytest.raises(ProtocolError, match="was announced; the longest has"):
        bodies_of(Header(NEWS).pack() + Header(NEWS, length=LONGEST_BODY + 1).pack(), random.Random(1), skip=9)


def test_a_frame_enters_no_module_twice_on_its_way_to_the_other_host() -> None:
    script = Path(__file__).parents[2] / "scripts" / "frame_path.py"
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "\n0 stacks with a module that is entered again\n" in shown, shown
