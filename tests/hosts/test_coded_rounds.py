"""What a host keeps of sums that a format has rounded, and frames that there is no memory for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multiverso.hosts.codecs import Wire, encode, longest
from multiverso.hosts.peer.frames import Header
from multiverso.hosts.peer.resources import Buffers, view
from multiverso.hosts.rounds import coding
from multiverso.hosts.rounds.frames import AT, REACHED, SUM
from multiverso.hosts.rounds.memory import RoundMemory
from multiverso.hosts.rounds.neighbour import Neighbour
from multiverso.hosts.rounds.rounds import Rounds
from multiverso.hosts.rounds.state import OVERWRITES, RoundTable, Sum

SIZE = 4
STEP = 2  # the first chunk of the first round


class Staged(RoundMemory):
    """A table of one chunk to which nobody adds."""

    def __init__(self) -> None:
        self.elements = self.chunk = SIZE
        self.dtype, self.wire = np.dtype("float32"), Wire.of("topk:0.25", "float32")

    def members(self, number: int) -> int | None:
        return None


def made(table: RoundTable, values: list[float], pool: Buffers) -> Sum:
    found = Sum(1, pool.take(4 * SIZE), 4 * SIZE)
    found.buffer[: found.length].view(np.float32)[:] = values
    coding.code(table, STEP, found, coding.room_for(table, STEP, pool), pool)
    return found


@pytest.mark.parametrize(("earlier", "left"), [(True, [0, 1, 2, 3]), (False, [0, 0, 1, 0])])
def test_what_is_left_is_of_the_sum_that_counted(earlier: bool, left: list[float]) -> None:
    """A host was lost: its sum is made again, and the total of the earlier one may come all the same."""
    table, pool = RoundTable(1, Staged()), Buffers(4)
    made(table, [4, 1, 2, 3], pool)
    coding.made_again(table)
    made(table, [0, 2, 1, 0], pool)
    coding.keep_rest(table, STEP, Sum(1, np.empty(0, np.uint8), 0, earlier=earlier))
    assert table.rest is not None
    assert table.rest.tolist() == left
    assert not table.rests
    assert not table.rests_before


@pytest.mark.parametrize(("count", "left"), [(1, [0, 0, 0, 0]), (0, [0, 1, 0, 0])])
def test_values_that_are_set_have_no_rest(count: int, left: list[float]) -> None:
    """None were set if the host is lost whose they were to be."""
    table, pool = RoundTable(1, Staged()), Buffers(4)
    made(table, [4, 1, 0, 0], pool)
    coding.keep_rest(table, STEP, Sum(1, np.empty(0, np.uint8), 0))
    coding.keep_rest(table, STEP + 1, Sum(count, np.empty(0, np.uint8), 0, overwrites=OVERWRITES))
    assert table.rest is not None
    assert table.rest.tolist() == left


def test_a_sum_that_there_is_no_memory_to_decode_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(1, range(2), lambda peer: None)
    end = Neighbour(rounds, 0)
    rounds.attach(1, Staged())
    table = rounds.tables[1]
    end.connect(1)
    reached = Header(AT, table=1, length=REACHED.size, number=1)
    end.arrived(reached, memoryview(REACHED.pack(1, 1, SIZE, 0, SIZE)), 0.0)
    table.received = table.arrived = table.folded = 1
    numbers, coded = np.array([0, 5, 0, 0], np.float32), np.empty(longest(table.staged.wire.number, SIZE, 4), np.uint8)
    length = encode(table.staged.wire, numbers, coded)
    header = Header(SUM, 0, table.staged.wire.number << 3 | 1 << 8, 1, 1, length, STEP, 2)

    def sent() -> Any:
        body = end.accept(header)
        assert body is not None
        body[:] = view(coded, length)
        return body

    body = sent()
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(rounds.pool, "take", lambda nbytes: (_ for _ in ()).throw(MemoryError()))
        end.arrived(header, body, 0.0)
    assert table.received == 1
    end.arrived(header, sent(), 0.0)
    assert table.received == STEP
    assert table.incoming[STEP].buffer[: 4 * SIZE].view(np.float32).tolist() == [0, 5, 0, 0]
