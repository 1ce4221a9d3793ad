"""The workers' output: whole lines, each with its worker's number, never mixed within a line."""

import contextlib
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

from multiverso.launch.lines import Seen, Tracebacks, drawn, folded, kept, seen_now, whose, words_of
from multiverso.launch.sinks import Sink, Stream, unbuffered, write_all
from multiverso.wake import Wake

_LONGEST_PARTIAL_LINE = 1 << 20
_HURRY_SECONDS = 1.0
# What a worker has started may hold its pipes open after its end.
_LEFT_OPEN_SECONDS = 2.0
# Python writes a line and its newline one after the other: only what stays without one is a question or a row of dots.
_BEGUN_SECONDS = 0.1


class Output:
    """Reads the workers' pipes in a thread of its own, which alone writes while it runs.

    So nothing that happens to our own output, a terminal that is stopped or a reader that is slow, keeps the
    job's thread from ending the job. Made and closed by that thread.

    Attributes:
        broken: whether our output has no reader any more.
        on_broken: called once when that happens, from the thread that writes.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        log_files: Mapping[int, Path] | None = None,
        append: bool = False,
        folds: bool = False,
        of_hosts: bool = False,
    ) -> None:
        """Opens the log files: all that a worker writes goes to `log_files[worker_id]` as it is.

        With `folds` a traceback that several workers write is shown once, and at the end who else wrote it. With
        `of_hosts` the workers are hosts' launchers, whose lines have their workers' numbers before them.
        """
        self.broken = False
        self.on_broken: Callable[[], None] = lambda: None
        self._sink = sink
        self._logs = {
            worker: path.open("ab" if append else "wb", buffering=0) for worker, path in (log_files or {}).items()
        }
        self._last_words: dict[int, bytes] = {}
        self._in_traceback: set[int] = set()
        self._begun: dict[tuple[int, Stream], bytes] = {}
        self._show_at: dict[tuple[int, Stream], float] = {}
        self._tracebacks: dict[int, dict[bytes, Tracebacks]] = {}  # by what stands before a line
        self._seen: Seen | None = {} if folds else None
        self._of_hosts = of_hosts
        self._interrupted = False
        self._notices: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake = Wake()
        self._give_up_at: float | None = None
        self._told_of_loss = False
        self._thread = threading.Thread(target=self._read_all, name="multiverso-output", daemon=True)

    def add(self, worker_id: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Takes over a worker's two pipes, perhaps in the place of those that it had."""
        if self._thread.is_alive():
            self.notice(lambda: self._register(worker_id, stdout, stderr))
        else:
            self._register(worker_id, stdout, stderr)

    def _register(self, worker_id: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        streams: tuple[tuple[Stream, IO[bytes]], ...] = (("stdout", stdout), ("stderr", stderr))
        for stream, pipe in streams:
            self._begun.setdefault((worker_id, stream), b"")
            self._selector.register(pipe, selectors.EVENT_READ, (worker_id, stream))

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def last_words(self, worker_id: int) -> str:
        """Returns the worker's last line on standard error that is not blank, or nothing; after `close`."""
        return self._last_words.get(worker_id, b"").decode("utf-8", "backslashreplace")

    def interrupted(self) -> None:
        """From now on leave out the tracebacks of KeyboardInterrupt: a Ctrl-C says where each worker was."""
        self._interrupted = True

    def notice(self, write: Callable[[], None]) -> None:
        """Calls `write` between two lines of output, at once; it is lost if our output has no reader."""
        self._notices.append(write)
        if self._thread.is_alive():
            self._wake.set()
        elif self._give_up_at is not None:  # closed: no other thread writes any more
            self._write_notices()

    def close(self, in_no_hurry: Callable[[], bool] = lambda: False) -> None:
        """Waits until all is read and written, and closes the pipes.

        Args:
            in_no_hurry: whether to wait for as long as a reader takes our output, however slowly; otherwise
                a second must do.
        """
        began = time.monotonic()
        self._give_up_at = began + _LEFT_OPEN_SECONDS if in_no_hurry() else began
        self._wake.set()
        while self._thread.is_alive() and (in_no_hurry() or time.monotonic() < began + _HURRY_SECONDS):
            self._thread.join(0.1)
        if not self._thread.is_alive():
            for key in list(self._selector.get_map().values()):
                self._drop(key)
            self._selector.close()
            self._wake.close()
            for log in self._logs.values():
                log.close()

    def _read_all(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        while len(self._selector.get_map()) > 1 or self._give_up_at is None:
            self._write_notices()
            patience = None if self._give_up_at is None else 0.2
            waits = self._show_at or any(map(self._holds, self._tracebacks))
            events = self._selector.select(_BEGUN_SECONDS if waits else patience)
            if not events and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                break
            for key, _ in events:
                if key.data is None:
                    self._wake.clear()
                    continue
                # Never more than what is there, so this does not block.
                block = os.read(key.fd, 1 << 16)
                self._take(key.data, block)
                if not block:
                    self._drop(key)
            self._show_begun(time.monotonic())
        self._selector.unregister(self._wake)
        for worker_id, said in folded(self._seen or {}):
            line = b"[%d] %s\n" % (worker_id, said) if self._of_hosts else said + b"\n"
            self._guarded(partial(self._sink, worker_id, "stderr", line, b""))
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
        text = self._begun[source] + block
        *lines, begun = text.split(b"\n")
        if begun and (not block or len(begun) > _LONGEST_PARTIAL_LINE):
            lines, begun = [*lines, begun], b""
        # only on standard error does Python write tracebacks
        lines, in_traceback = drawn(lines, stream == "stderr" and worker_id in self._in_traceback)
        self._begun[source] = begun = begun if in_traceback else kept(begun)
        if stream == "stderr":
            (self._in_traceback.add if in_traceback else self._in_traceback.discard)(worker_id)
            spoken = next(filter(None, map(words_of, reversed(lines))), None)
            self._last_words[worker_id] = spoken or self._last_words.get(worker_id, b"")
            lines = self._without_tracebacks(worker_id, lines, at_end=not block)
            if self._holds(worker_id):
                begun = b""
        complete = b"".join(line + b"\n" for line in lines)
        self._show_at.pop(source, None)
        if begun and b"\r" not in text:
            self._show_at[source], begun = time.monotonic() + _BEGUN_SECONDS, b""
            if not complete:
                return
        self._guarded(lambda: self._sink(worker_id, stream, complete, seen_now(begun)))

    def _without_tracebacks(self, worker_id: int, lines: list[bytes], at_end: bool) -> list[bytes]:
        if self._seen is None and not self._interrupted:
            return lines
        machines = self._tracebacks.setdefault(worker_id, {})
        shown = []
        for line in lines:
            worker, before, text = whose(line) if self._of_hosts else (worker_id, b"", line)
            machine = machines.setdefault(before, Tracebacks(worker, self._seen if worker >= 0 else None))
            machine.interrupted = self._interrupted
            shown += [before + one for one in machine.take([text])]
        if at_end:
            shown += [before + one for before, machine in machines.items() for one in machine.rest()]
        return shown

    def _holds(self, worker_id: int) -> bool:
        return any(machine.holds for machine in self._tracebacks.get(worker_id, {}).values())

    def _show_begun(self, now: float) -> None:
        for worker_id, machines in self._tracebacks.items():
            late = [before + one + b"\n" for before, machine in machines.items() for one in machine.late()]
            if late:
                self._guarded(partial(self._sink, worker_id, "stderr", b"".join(late), b""))
        for source in [source for source, at in self._show_at.items() if at <= now]:
            del self._show_at[source]
            self._guarded(partial(self._sink, *source, b"", seen_now(self._begun[source])))

    def _guarded(self, write: Callable[[], None]) -> None:
        if self.broken:
            return
        try:
            write()
        except (BrokenPipeError, ValueError):  # the reader went away, or the file is closed
            self.broken = True
            self.on_broken()
        except OSError as error:  # a full disk: what comes is read and left out, or the workers would wait for ever
            if not self._told_of_loss:
                self._told_of_loss = True
                text = f"multiverso: what the workers write is lost: {error.strerror}; the job continues\n"
                with contextlib.suppress(OSError):
                    write_all(unbuffered(sys.stderr), text.encode())

    def _log(self, worker_id: int, block: bytes) -> None:
        try:
            self._logs[worker_id].write(block)
        except OSError as error:
            message = f"multiverso: stopped logging, {self._logs[worker_id].name}: {error.strerror}\n"
            for log in self._logs.values():
                log.close()
            self._logs = {}
            self._guarded(lambda: write_all(unbuffered(sys.stderr), message.encode()))
