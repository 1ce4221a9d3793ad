"""What a worker's bytes mean as lines."""

import pytest

from multiverso.launch.lines import Interruptions, kept, last_state, seen_now


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (b"plain", b"plain"),
        (b"dos\r", b"dos\r"),
        (b"\r 10%\r 20%", b" 20%"),
        (b"bar\r\r", b"bar\r\r"),
        (b"bar\r   \r", b"bar\r"),
        (b"\r", b"\r"),
        (b"", b""),
    ],
)
def test_a_line_is_what_it_looks_like_at_its_end(line: bytes, state: bytes) -> None:
    assert last_state(line) == state


@pytest.mark.parametrize(
    ("begun", "shown"),
    [
        (b"", b""),
        (b"> ", b"> "),
        (b"\r 10%\r 20%", b" 20%"),
        (b"epoch 1\r", b"epoch 1"),
        (b"\r 100%\r     \r", b"     "),
    ],
)
def test_an_unfinished_line_needs_only_its_last_state(begun: bytes, shown: bytes) -> None:
    assert seen_now(begun) == shown
    assert seen_now(kept(begun)) == shown
    assert last_state(kept(begun)) == last_state(begun)
    assert len(kept(begun + b"\r 30%" * 1000)) == 4 if b"%" in begun else True


TRACEBACK = [b"Traceback (most recent call last):", b'  File "x.py", line 1', b"    f()"]


def test_tracebacks_of_an_interruption_are_left_out_and_others_are_not() -> None:
    machine = Interruptions()
    lines = [b"a", *TRACEBACK, b"KeyboardInterrupt", b"b", *TRACEBACK, b"ValueError: x", b"c"]
    assert machine.without(lines) == [b"a", b"b", *TRACEBACK, b"ValueError: x", b"c"]
    ignored = [b"Exception ignored in: <function f>", *TRACEBACK, b"KeyboardInterrupt: "]
    assert machine.without(ignored) == []
    # in pieces, and cut off
    assert [machine.without([line]) for line in (*TRACEBACK, b"KeyboardInterrupt", b"d")] == [[]] * 4 + [
        [b"d"]
    ]
    assert machine.without(TRACEBACK) == []
    assert machine.rest() == TRACEBACK
    assert machine.without([*TRACEBACK, *TRACEBACK, b"KeyboardInterrupt"]) == TRACEBACK
    # as Python shows an interrupt at the begin of a function
    assert machine.without([*TRACEBACK, b"    def f(self):", b"", b"KeyboardInterrupt", b"e"]) == [b"e"]
