"""A whole terminal for what changes all the time, and the keys that are pressed meanwhile."""

import os
import re
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from multiverso.columns import cut

# A screen of its own, without a cursor, where nothing goes on in the next line; and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_FIRST_LINE, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_NAMED = {
    "A": "up", "B": "down", "H": "home", "F": "end", "1~": "home", "4~": "end", "5~": "page up", "6~": "page down",
    "\x1b": "escape", "\n": "enter", "\r": "enter", "\x7f": "backspace", "\b": "backspace",
}  # fmt: skip
_KEY = re.compile(r"\x1b(?:\[[\d;]*[A-Za-z~]|O[A-Z])|.", re.S)  # held keys, or pasted ones, come together


def rows() -> int:
    """Returns how many lines can be seen, beside the last one."""
    return max(1, shutil.get_terminal_size().lines - 1)


def draw(lines: Sequence[str], last: str) -> None:
    """Shows lines from the top on, and one at the bottom, as far as they fit into its width."""
    shown = [*lines[: rows()], *[""] * (rows() - len(lines)), last]
    columns = shutil.get_terminal_size().columns
    # cleared before it is written: behind a full line the cursor stands on its last column
    *upper, lowest = (cut(line, columns) for line in shown)
    text = "".join(f"{_CLEAR_LINE}{line}\n" for line in upper)
    click.echo(_FIRST_LINE + text + _CLEAR_BELOW + lowest, nl=False)


@contextmanager
def screen() -> Iterator[Callable[[float], str]]:
    """Takes the terminal for as long as the block lasts.

    Yields:
        What waits so many seconds for a key: returns its letter or its name; nothing, when none was pressed.
    """
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() and _may_set(sys.stdin.fileno()) else None
    pressed: deque[str] = deque()
    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    ending = False

    def key(seconds: float) -> str:
        if keyboard is None:
            time.sleep(seconds)
        elif not pressed and select.select([keyboard], [], [], seconds)[0]:
            pressed.extend(_KEY.findall(os.read(keyboard, 256).decode(errors="replace")))
        if not pressed:
            return ""
        one = pressed.popleft()
        return _NAMED.get(one[2:] or one, one)

    def end(number: int, _: object) -> None:
        nonlocal ending
        if not ending:  # a second signal must not interrupt what gives the terminal back
            ending = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    click.echo(_ENTER, nl=False)
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
        yield key
    finally:
        ending = True
        if keyboard is not None and before is not None and _may_set(keyboard):
            termios.tcsetattr(keyboard, termios.TCSANOW, before)
        click.echo(_LEAVE, nl=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _may_set(terminal: int) -> bool:
    """Returns whether this process is in front: in the background, as below `timeout`, it would be stopped."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is not the terminal that controls us
        return True
