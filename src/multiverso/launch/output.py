"""The workers' output: whole lines, each with its worker's number, never mixed within a line."""

import json
import os
import re
import select
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, Protocol, TextIO

Stream = Literal["stdout", "stderr"]

TAIL_LINES = 10
_LONGEST_PARTIAL_LINE = 1 << 20
_HURRY_SECONDS = 1.0
# What a worker has started may hold its pipes open after its end.
_LEFT_OPEN_SECONDS = 2.0
_COLOURS = (36, 33, 32, 35, 34, 31)


class Sink(Protocol):
    """Where output goes: gets one or more complete lines, each with its newline."""

    def __call__(self, worker_id: int, stream: Stream, lines: bytes) -> None: ...


def prefix_sink(stdout: BinaryIO, stderr: BinaryIO, *, colours: tuple[bool, bool] = (False, False)) -> Sink:
    """Write every line with `[i] ` before it, byte for byte otherwise.

    Args:
        stdout: For the workers' standard output.
        stderr: For the workers' standard error.
        colours: Whether to colour the prefix on the one and the other.
    """
    files = {"stdout": (stdout, colours[0]), "stderr": (stderr, colours[1])}

    def write(worker_id: int, stream: Stream, lines: bytes) -> None:
        file, colour = files[stream]
        write_all(file, _prefixed(_prefix(worker_id, colour), lines))

    return write


def json_sink(stdout: BinaryIO) -> Sink:
    """Write every line as a JSON object: event, worker, stream, text (undecodable bytes as \\xNN)."""

    def write(worker_id: int, stream: Stream, lines: bytes) -> None:
        for line in lines.removesuffix(b"\n").split(b"\n"):
            text = line.decode("utf-8", "backslashreplace")
            write_event(stdout, "line", worker=worker_id, stream=stream, text=text)

    return write


def text_sink(stdout: TextIO, stderr: TextIO) -> Sink:
    """Write prefixed lines to text streams, such as a notebook's."""

    def write(worker_id: int, stream: Stream, lines: bytes) -> None:
        file = stdout if stream == "stdout" else stderr
        file.write(_prefixed(_prefix(worker_id, False), lines).decode("utf-8", "backslashreplace"))
        file.flush()

    return write


def write_event(stdout: BinaryIO, event: str, **fields: Any) -> None:
    """Write one JSON object on one line."""
    write_all(stdout, json.dumps({"event": event, **fields}).encode() + b"\n")


def unbuffered(file: TextIO) -> BinaryIO:
    """Return the file under a text stream, without the buffer: its lock, held by a thread whose write blocks,
    would stop the interpreter's own end."""
    file.flush()
    return getattr(file.buffer, "raw", file.buffer)


def write_all(file: BinaryIO, text: bytes) -> None:
    """Write all of it to a file without a buffer."""
    rest = memoryview(text)
    while rest:
        written: int | None = file.write(rest)
        if written is None:  # somebody made it non-blocking, and it is full
            select.select([], [file], [])
        else:
            rest = rest[written:]


def wants_colour(file: IO[Any]) -> bool:
    """Colour is for people: on a terminal, unless NO_COLOR says otherwise."""
    return file.isatty() and not os.environ.get("NO_COLOR")


class Output:
    """Reads the workers' pipes in a thread of its own, which alone writes while it runs.

    So nothing that happens to our own output, a terminal that is stopped or a reader that is slow, keeps the
    job's thread from ending the job. Made and closed by that thread.

    Attributes:
        broken: Whether nobody reads what we write any more.
        on_broken: Called once when that happens, from the thread that writes.
    """

    def __init__(self, sink: Sink, *, log_files: Sequence[Path] = ()) -> None:
        """Open the log files: all that a worker writes goes to `log_files[worker_id]` as it is."""
        self.broken = False
        self.on_broken: Callable[[], None] = lambda: None
        self._sink = sink
        self._logs = [path.open("wb", buffering=0) for path in log_files]
        self._tails: dict[int, deque[bytes]] = {}
        self._partial: dict[tuple[int, Stream], bytes] = {}
        self._notices: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._give_up_at: float | None = None
        self._thread = threading.Thread(target=self._read_all, name="multiverso-output", daemon=True)

    def add(self, worker_id: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Take over a worker's two pipes; before `start`."""
        self._tails[worker_id] = deque(maxlen=TAIL_LINES)
        streams: tuple[tuple[Stream, IO[bytes]], ...] = (("stdout", stdout), ("stderr", stderr))
        for stream, pipe in streams:
            self._partial[worker_id, stream] = b""
            self._selector.register(pipe, selectors.EVENT_READ, (worker_id, stream))

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def tail(self, worker_id: int) -> list[bytes]:
        """Return the worker's last lines, of both streams in the order of arrival; after `close`."""
        return list(self._tails.get(worker_id, ()))

    def notice(self, write: Callable[[], None]) -> None:
        """Have `write` called between two lines of output, at once; it is lost if nobody takes our output."""
        self._notices.append(write)
        if self._thread.is_alive():
            self._wake()
        elif self._give_up_at is not None:  # closed: nobody else writes any more
            self._write_notices()

    def close(self, in_no_hurry: Callable[[], bool] = lambda: False) -> None:
        """Wait until all is read and written, and close the pipes.

        Args:
            in_no_hurry: Whether to wait for as long as somebody takes what we write, however slowly; otherwise
                a second must do.
        """
        began = time.monotonic()
        self._give_up_at = began + _LEFT_OPEN_SECONDS if in_no_hurry() else began
        self._wake()
        while self._thread.is_alive() and (in_no_hurry() or time.monotonic() < began + _HURRY_SECONDS):
            self._thread.join(0.1)
        if not self._thread.is_alive():
            for key in list(self._selector.get_map().values()):
                self._drop(key)
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()
            for log in self._logs:
                log.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except OSError:
            pass  # it has enough to wake up for

    def _read_all(self) -> None:
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        while len(self._selector.get_map()) > 1 or self._give_up_at is None:
            self._write_notices()
            events = self._selector.select(None if self._give_up_at is None else 0.2)
            if not events and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                break
            for key, _ in events:
                if key.data is None:
                    self._wake_reader.recv(4096)
                    continue
                # Never more than what is there, so this does not block.
                block = os.read(key.fd, 1 << 16)
                self._take(key.data, block)
                if not block:
                    self._drop(key)
        self._selector.unregister(self._wake_reader)
        self._write_notices()

    def _write_notices(self) -> None:
        while self._notices:
            self._guarded(self._notices.popleft())

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]

    def _take(self, source: tuple[int, Stream], block: bytes) -> None:
        worker_id, stream = source
        if block and self._logs:
            self._log(worker_id, block)
        text = self._partial[source] + block
        ending = not block or len(text) > _LONGEST_PARTIAL_LINE
        cut = len(text) if ending else text.rfind(b"\n") + 1
        self._partial[source] = text[cut:]
        if cut == 0:
            return
        lines = text[:cut] if text[:cut].endswith(b"\n") else text[:cut] + b"\n"
        self._tails[worker_id].extend(lines[:-1].split(b"\n")[-TAIL_LINES:])
        self._guarded(lambda: self._sink(worker_id, stream, lines))

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            write()
        except (BrokenPipeError, ValueError):  # the reader went away, or the file is closed
            self.broken = True
            self.on_broken()

    def _log(self, worker_id: int, block: bytes) -> None:
        try:
            self._logs[worker_id].write(block)
        except OSError as error:
            message = f"multiverso: stopped logging, {self._logs[worker_id].name}: {error.strerror}\n"
            for log in self._logs:
                log.close()
            self._logs = []
            self._guarded(lambda: write_all(unbuffered(sys.stderr), message.encode()))


def _prefix(worker_id: int, colour: bool) -> bytes:
    if not colour:
        return b"[%d] " % worker_id
    return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[worker_id % len(_COLOURS)], worker_id)


def _prefixed(prefix: bytes, lines: bytes) -> bytes:
    # A lone carriage return goes back to the start of the line: a progress bar would overwrite the prefix.
    if b"\r" in lines:
        lines = re.sub(rb"\r(?!\n)", lambda _: b"\r" + prefix, lines)
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
