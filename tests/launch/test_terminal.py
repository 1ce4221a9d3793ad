"""What `multiverso top` does to a terminal: no line is longer than it is wide, and whatever ends it gives it back."""

import io
import os
import pty
import re
import signal
import sys
import termios

import click
import pytest
from launch_support import OnTerminal, command

from multiverso.cli.screen import screen
from multiverso.columns import cut, in_columns, width

# as `timeout` does
_IN_THE_BACKGROUND = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:], process_group=0)
print(process.pid, flush=True)
sys.exit(process.wait())
"""


def test_lines_are_cut_where_the_terminal_ends() -> None:
    running = OnTerminal(command("top", "--interval", "60"), TERM="xterm", COLUMNS="30", LINES="10")
    running.read_until(b"\x1b[Jq", b"\x1b[J\x1b[2mq")
    os.write(running.terminal, b"h")
    seen = running.read_until(b"any key: back").decode()
    os.write(running.terminal, b"qq")
    assert running.end() == 0
    lines = [click.unstyle(line) for line in re.split(r"\r\n|\x1b\[H", seen)]
    assert max(map(width, lines)) == 30
    assert "q ends   h help   s: the slowe" in lines
    assert "\x1b[K" not in re.sub(r"\x1b\[K(?=[^\n]*\r\n)", "", seen), "the last column is not cleared again"


def test_a_line_is_cut_by_what_it_takes_on_the_terminal() -> None:
    styled = click.style("abc", bold=True) + "def"
    assert cut(styled, 6) == styled
    assert cut(styled, 5) == click.style("abc", bold=True) + "de"
    assert cut(styled, 2) == click.style("ab", bold=True), "its style ends with it"
    assert (width("訓練.py"), width("e\u0301"), width(click.style("é", fg="red"))) == (7, 1, 1)
    assert (cut("訓練.py", 4), cut("訓練.py", 3)) == ("訓練", "訓"), "half a character is none"
    assert in_columns(["a", "b"], [["訓練", "x"], ["abcd", "y"]]).splitlines()[1:] == ["訓練  x", "abcd  y"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_come_one_after_the_other_give_the_terminal_back(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    set_modes = termios.tcsetattr

    def interrupted(*arguments: object) -> None:
        signal.raise_signal(number)
        set_modes(*arguments)  # type: ignore[arg-type]

    with os.fdopen(ours, "rb"), os.fdopen(theirs, "r") as keyboard, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", keyboard)
        patched.setattr(sys, "stdout", io.StringIO())
        handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises((SystemExit, KeyboardInterrupt)), screen():
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
            patched.setattr(termios, "tcsetattr", interrupted)
            signal.raise_signal(number)
        assert termios.tcgetattr(theirs)[3] & termios.ECHO
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_in_the_background_it_shows_what_there_is_and_ends_when_it_is_told_to() -> None:
    asked = [sys.executable, "-c", _IN_THE_BACKGROUND, *command("top", "--interval", "60")]
    running = OnTerminal(asked, TERM="xterm", COLUMNS="200")
    seen = running.read_until(b"s: the slowest first")
    os.kill(int(seen.split()[0]), signal.SIGTERM)
    running.read_until(b"\x1b[?1049l")
    assert running.end() == 143
