"""Takes snapshots from a launcher, a running job or a file, and hands them to the browsers that listen."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from multiverso.errors import MultiversoError, StartupError, WaitTimeoutError
from multiverso.page.address import FIRST_LINE
from multiverso.page.document import document
from multiverso.watching.history import Event, History, Point, point_of
from multiverso.watching.jobs import look_at
from multiverso.watching.slowest import Slowest, ending
from multiverso.watching.snapshot import Observer, Snapshot

LOOK_SECONDS = 0.5
# the file's lines come so much further apart as the job gets older: it grows with the logarithm of the time
_MOST_LINES = 2000
_MOST_WAITING = 32  # messages that a reader has not taken: it is cut off, and begins anew
_encode = msgspec.json.Encoder().encode


class Message(Struct, frozen=True):
    """What the browser gets: first the whole past, then each snapshot."""

    now: Snapshot | None
    slowest: Slowest | None
    verdict: str
    network: str
    points: list[Point]
    events: list[Event]
    whole: bool = False


class Feed:
    """A job's past and who listens. Owner: one thread.

    Args:
        file: of `new_file`: takes each snapshot as a line, at first all of them, then fewer; None for none.
        history: what has been so far; nothing by default.
    """

    def __init__(self, file: BufferedIOBase | None = None, history: History | None = None) -> None:
        self.history = history or History()
        self._file, self._written_at = file, float("-inf")
        self._listeners: set[asyncio.Queue[bytes | None]] = set()

    def add(self, now: Snapshot) -> None:
        """Takes the next snapshot."""
        news = self.history.add(now)
        if self._file is not None:
            apart = now.up_seconds / _MOST_LINES
            if news or now.over or now.at - self._written_at >= apart:
                self._write(_encode(now) + b"\n")
                self._written_at = now.at
        self._tell(_encode(self._message([point_of(now)], news)))

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            print(f"multiverso: the job's past is not written any more: {error.strerror}", file=sys.stderr, flush=True)
            self._file = None

    def everything(self) -> bytes:
        """Returns the message with the whole past."""
        return _encode(self._message(self.history.points, list(self.history.events), whole=True))

    def saved(self) -> str:
        """Returns the page as a document with the whole past."""
        now = self.history.now
        return document(self.everything(), f"{now.program} - multiverso" if now else "multiverso")

    def _message(self, points: list[Point], events: list[Event], *, whole: bool = False) -> Message:
        now, found = self.history.now, self.history.slowest
        verdict = ending(now) if now is not None and now.over else self.history.in_words(found)
        return Message(now, found, verdict, self.history.in_words(self.history.busiest), points, events, whole)

    # -- listeners -------------------------------------------------------------------------------------------

    def listen(self) -> asyncio.Queue[bytes | None]:
        """Returns a queue of messages, the whole past first; None in it: there are too many to keep."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_WAITING)
        queue.put_nowait(self.everything())
        self._listeners.add(queue)
        return queue

    def forget(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Ends what `listen` has begun."""
        self._listeners.discard(queue)

    def _tell(self, message: bytes) -> None:
        for queue in list(self._listeners):
            if queue.qsize() >= _MOST_WAITING - 1:
                queue.put_nowait(None)
                self.forget(queue)
            else:
                queue.put_nowait(message)


async def follow_job(feed: Feed, address: str) -> None:
    """Looks at a running job until it is over."""
    observer = Observer()
    while True:
        try:
            status = await asyncio.to_thread(look_at, address)
        except WaitTimeoutError:  # it is busy, or stopped
            continue
        except MultiversoError:
            if observer.last is not None:
                feed.add(ended(observer.last, "its node has ended", None))
            return
        feed.add(observer.see(status))
        await asyncio.sleep(LOOK_SECONDS)


async def follow_lines(feed: Feed, reader: asyncio.StreamReader) -> None:
    """Takes snapshots that a launcher writes, a line each, until it closes its end."""
    while line := await reader.readline():
        feed.add(msgspec.json.decode(line, type=Snapshot))
    now = feed.history.now
    if now is not None and not now.over:
        feed.add(ended(now, "the launcher has ended", False))


def ended(last: Snapshot, why: str, well: bool | None) -> Snapshot:
    """Returns the last snapshot of a job that is over."""
    return msgspec.structs.replace(last, over=why, well=well)


def read_file(path: Path, add: Callable[[Snapshot], object]) -> None:
    """Takes all snapshots of a file; a last line that was cut off by a writer's death is left out.

    Raises:
        StartupError: it is no such file, or nothing is in it.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}.") from None
    with file:
        if file.readline() != FIRST_LINE:
            raise StartupError(f"{path} is not a job's past, as `multiverso run --page --history` writes it.")
        number = 1
        for number, line in enumerate(_lines(file), 2):
            try:
                add(msgspec.json.decode(line, type=Snapshot))
            except msgspec.DecodeError as error:
                raise StartupError(f"{path}, line {number}: {error}.") from None
    if number == 1:
        raise StartupError(f"{path} has nothing to show: no worker had called multiverso.init() by its end.")


def _lines(file: Any) -> Iterator[bytes]:
    for line in file:
        if line.endswith(b"\n"):
            yield line
