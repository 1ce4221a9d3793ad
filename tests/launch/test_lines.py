"""What a worker's bytes mean as lines."""

import os
import queue
from traceback import format_exception

import pytest

from multiverso.launch.lines import Seen, Tracebacks, drawn, folded, kept, last_state, seen_now, words_of
from multiverso.launch.output import Output
from multiverso.launch.sinks import Stream


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


def test_what_an_error_says_is_no_progress_bar() -> None:
    traceback = [b"Traceback (most recent call last):", b'  File "train.py", line 3, in <module>', b"    f()"]
    bar = b"\r 10%\r 20%"
    shown, inside = drawn([bar, *traceback], False)
    assert (shown, inside) == ([b" 20%", *traceback], True)
    assert drawn([b"ValueError: a\rb\r", bar], inside) == ([b"ValueError: a b", b" 20%"], False)


def test_of_an_exception_group_its_last_error_is_quoted() -> None:
    group = ExceptionGroup("two", [ValueError("first"), ExceptionGroup("inner", [KeyError("last")])])
    with pytest.raises(ExceptionGroup) as raised:
        raise group
    text = "".join(format_exception(raised.value)).encode()
    said = [words_of(line) for line in drawn(text.split(b"\n"), False)[0]]
    assert [line for line in said if line][-1] == b"KeyError: 'last'"
    assert b"ValueError: first" in said
    assert not any(line.startswith(b"+-") for line in said)


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


def interruptions() -> Tracebacks:
    machine = Tracebacks(0)
    machine.interrupted = True
    return machine


def test_tracebacks_of_an_interruption_are_left_out_and_others_are_not() -> None:
    machine = interruptions()
    lines = [b"a", *TRACEBACK, b"KeyboardInterrupt", b"b", *TRACEBACK, b"ValueError: x", b"c"]
    assert machine.take(lines) == [b"a", b"b", *TRACEBACK, b"ValueError: x", b"c"]
    ignored = [b"Exception ignored in: <function f>", *TRACEBACK, b"KeyboardInterrupt: "]
    assert machine.take(ignored) == []
    # in pieces, and cut off
    assert [machine.take([line]) for line in (*TRACEBACK, b"KeyboardInterrupt", b"d")] == [[]] * 4 + [[b"d"]]
    assert machine.take(TRACEBACK) == []
    assert machine.rest() == TRACEBACK
    assert machine.take([*TRACEBACK, *TRACEBACK, b"KeyboardInterrupt"]) == TRACEBACK
    # as Python shows an interrupt at the begin of a function
    assert machine.take([*TRACEBACK, b"    def f(self):", b"", b"KeyboardInterrupt", b"e"]) == [b"e"]


def test_the_same_traceback_is_shown_once() -> None:
    seen: Seen = {}
    machines = [Tracebacks(worker, seen) for worker in range(4)]
    errors = [b"RuntimeError: worker %d (pid 12%d) at 0x7f%d" % (worker, worker, worker) for worker in range(4)]
    lines = [[b"a", *TRACEBACK, error, b"b"] for error in errors]
    assert machines[0].take(lines[0]) == lines[0]
    assert [machine.take(each) for machine, each in zip(machines[1:], lines[1:], strict=True)] == [[b"a", b"b"]] * 3
    assert machines[0].take(lines[0]) == lines[0]  # its own, once more, is news
    other = [*TRACEBACK, b"ValueError: another one"]
    assert machines[1].take(other) == other
    assert folded(seen) == [(0, b"the same from 3 others (workers 1, 2, 3): RuntimeError: worker 0 (pid 120) at 0x7f0")]


def test_errors_about_different_numbers_are_all_shown() -> None:
    seen: Seen = {}
    texts = (b"no worker 7", b"no worker 8", b"magic 0xdead", b"magic 0xbeef", b"pid 1", b"pid 2")
    for worker, text in enumerate(texts):
        lines = [*TRACEBACK, b"ValueError: " + text]
        assert Tracebacks(worker, seen).take(lines) == lines
    assert folded(seen) == []


def test_the_same_traceback_of_workers_on_several_hosts_is_shown_once() -> None:
    shown: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def sink(worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        for line in lines.splitlines():
            shown.put(line)

    def came(number: int) -> list[bytes]:
        return [shown.get(timeout=60) for _ in range(number)]

    output = Output(sink, folds=True, of_hosts=True)

    def says(host: int, lines: list[bytes]) -> None:
        """As its launcher does, whose standard output is empty."""
        (nothing, empty), (reading, writing) = os.pipe(), os.pipe()
        os.close(empty)
        with open(writing, "wb") as file:
            file.write(b"".join(line + b"\n" for line in lines))
        output.add(host, open(nothing, "rb"), open(reading, "rb"))  # noqa: SIM115  # it closes them

    lines = [*TRACEBACK, b"ValueError: x", b"b"]
    first, second = ([b"[%d] %s" % (worker, line) for line in lines] for worker in (0, 10))
    output.start()
    says(0, [line for pair in zip(first, second, strict=True) for line in pair])
    assert came(len(first) + 1) == [*first, second[-1]]
    unfinished = [b"[4] " + line for line in TRACEBACK]
    says(1, [line.replace(b"[0]", b"[3]") for line in first] + lines + unfinished)
    mine = [b"[3] b", *lines, *unfinished]  # a launcher's own are shown, and what has no end
    assert came(len(mine)) == mine
    output.close(lambda: True)
    assert came(1) == [b"[0] the same from 2 others (workers 3, 10): ValueError: x"]
    assert shown.empty()


def test_of_a_chain_of_errors_only_what_is_new_is_shown() -> None:
    seen: Seen = {}
    one, other = Tracebacks(0, seen), Tracebacks(1, seen)
    between = [b"", b"During handling of the above exception, another exception occurred:", b""]
    chain = [*TRACEBACK, b"KeyError: 1", *between, *TRACEBACK, b"ValueError: 2"]
    assert one.take(chain) == chain
    assert other.take([*chain, b"more"]) == [b"more"]
    new = [*TRACEBACK, b"KeyError: 1", *between, *TRACEBACK, b"ValueError: 3"]
    assert Tracebacks(2, seen).take(new) == [*between, *TRACEBACK, b"ValueError: 3"]


def test_a_traceback_without_an_end_is_not_held_for_ever() -> None:
    machine = Tracebacks(0, {})
    assert machine.take(TRACEBACK) == []
    assert machine.holds
    assert machine.rest() == TRACEBACK
    assert len(machine.take([*TRACEBACK, *[b"  deeper"] * 3000])) > 2000
