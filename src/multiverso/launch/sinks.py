"""Writes the workers' output, each line with its worker's number: for people, notebooks and programs."""

import json
import os
import re
import select
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, BinaryIO, Literal, Protocol, TextIO

Stream = Literal["stdout", "stderr"]

_COLOURS = (36, 33, 32, 35, 34, 31)
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-_])|[\x00-\x08\x0b-\x1f\x7f]")


class Sink(Protocol):
    """Gets what a worker writes; called by one thread at a time."""

    def __call__(self, worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        """Takes complete lines, each with its newline (or none), and what stands behind the last newline.

        Args:
            worker_id: who wrote it.
            stream: where.
            lines: text to write, once.
            begun: what the worker's unfinished line looks like now; it is written again, changed or complete.
        """


def prefix_sink(stdout: TextIO, stderr: TextIO) -> "Lines":
    """Writes every line with `[i] ` before it, byte for byte otherwise, past the buffers of these files."""

    def target(file: TextIO) -> Target:
        return Target(partial(write_all, unbuffered(file)), wants_colour(file), _screen(file))

    return Lines(target(stdout), target(stderr))


def text_sink(stdout: TextIO, stderr: TextIO) -> "Lines":
    """Writes prefixed lines to text streams, such as a notebook's."""

    def target(file: TextIO) -> Target:
        def write(text: bytes) -> None:
            file.write(text.decode("utf-8", "backslashreplace"))
            file.flush()

        return Target(write, False, _screen(file))

    return Lines(target(stdout), target(stderr))


def json_sink(stdout: BinaryIO) -> Sink:
    r"""Writes every line as a JSON object: event, worker, stream, text (undecodable bytes as \xNN)."""

    def write(worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            text = line.decode("utf-8", "backslashreplace")
            write_event(stdout, "line", worker=worker_id, stream=stream, text=text)

    return write


def write_event(stdout: BinaryIO, event: str, **fields: Any) -> None:
    """Writes one JSON object on one line."""
    write_all(stdout, json.dumps({"event": event, **fields}).encode() + b"\n")


@dataclass(frozen=True)
class Target:
    """One of the two places for lines.

    Attributes:
        write: writes all of it, at once.
        colour: whether to colour the prefix.
        screen: the descriptor of a terminal that can move its cursor, or None.
    """

    write: Callable[[bytes], None]
    colour: bool = False
    screen: int | None = None


class Lines:
    """Prefixed lines for people.

    On a terminal the lines scroll, and below them stands what each worker has begun: a progress bar that it draws
    over and over, a question that it asks. Anywhere else an unfinished line waits for its end.
    Owner: the thread that reads the workers' output, while it runs.
    """

    def __init__(self, stdout: Target, stderr: Target) -> None:
        self._targets: dict[Stream, Target] = {"stdout": stdout, "stderr": stderr}
        self._screen = next((t for t in (stderr, stdout) if t.screen is not None), None)
        self._begun: dict[tuple[int, Stream], str] = {}
        self._drawn = 0  # rows below the lines; the cursor stands in the last one

    def __call__(self, worker_id: int, stream: Stream, lines: bytes, begun: bytes) -> None:
        """Writes complete lines, and shows the begun ones where they can be taken back."""
        target = self._targets[stream]
        changed = target.screen is not None and self._has_begun(worker_id, stream, begun)
        if lines or changed:
            self._write(target, _prefixed(_prefix(worker_id, target.colour), lines) if lines else b"")

    def say(self, text: str) -> None:
        """Writes whole lines of our own to standard error."""
        self._write(self._targets["stderr"], text.encode())

    def _write(self, target: Target, text: bytes) -> None:
        if target.screen is not None:
            text = self._erased() + text + self._drawing()
        target.write(text)

    def _has_begun(self, worker_id: int, stream: Stream, begun: bytes) -> bool:
        text = _ESCAPE.sub("", begun.decode("utf-8", "replace")).expandtabs().rstrip()
        if text == self._begun.get((worker_id, stream), ""):
            return False
        self._begun.pop((worker_id, stream), None)
        if text:
            self._begun[worker_id, stream] = text
        return True

    def _erased(self) -> bytes:
        rows, self._drawn = self._drawn, 0
        return b"\r\x1b[K" + b"\x1b[A\x1b[K" * (rows - 1) if rows else b""

    def _drawing(self) -> bytes:
        if not self._begun:
            return b""
        assert self._screen is not None
        assert self._screen.screen is not None
        columns, rows = _size(self._screen.screen)
        shown = sorted(self._begun.items())[: max(1, rows - 1)]
        self._drawn = len(shown)
        # A row that is as wide as the screen would take two, and could not be taken back.
        drawn = [
            _prefix(worker_id, self._screen.colour)
            + text[: max(0, columns - 1 - len(_prefix(worker_id, False)))].encode()
            for (worker_id, _), text in shown
        ]
        return b"\n".join(drawn)


def unbuffered(file: TextIO) -> BinaryIO:
    """Returns the file under a text stream, without the buffer.

    The buffer's lock, held by a thread whose write blocks, would keep the interpreter from ending.
    """
    file.flush()
    return getattr(file.buffer, "raw", file.buffer)


def write_all(file: BinaryIO, text: bytes) -> None:
    """Writes all of it to a file without a buffer."""
    rest = memoryview(text)
    while rest:
        written: int | None = file.write(rest)
        if written is None:  # it is non-blocking, and full
            select.select([], [file], [])
        else:
            rest = rest[written:]


def wants_colour(file: IO[Any]) -> bool:
    """Colour is for people: on a terminal, unless NO_COLOR says otherwise."""
    return file.isatty() and not os.environ.get("NO_COLOR")


def _screen(file: IO[Any]) -> int | None:
    """Returns the descriptor of a terminal that understands how to move its cursor."""
    return file.fileno() if file.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb") else None


def _size(descriptor: int) -> tuple[int, int]:
    try:
        size = os.get_terminal_size(descriptor)
    except OSError:
        return 80, 24
    return size.columns or 80, size.lines or 24


def _prefix(worker_id: int, colour: bool) -> bytes:
    if not colour:
        return b"[%d] " % worker_id
    return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[worker_id % len(_COLOURS)], worker_id)


def _prefixed(prefix: bytes, lines: bytes) -> bytes:
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
