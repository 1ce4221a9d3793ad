"""The publisher's thread: lends the memory to readers, and knows which of them are there."""

from __future__ import annotations

import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from io import FileIO

import msgspec
import numpy as np

from multiverso.errors import MultiversoError, StartupError
from multiverso.layout import publications as at
from multiverso.memory import mutex
from multiverso.memory.heap import create, for_reading
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64, store64
from multiverso.publications.tensors import Layout
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.door import Door
from multiverso.runtime.node.entrance import Entrance
from multiverso.wake import Wake
from multiverso.wire import messages
from multiverso.wire.requests import Hello, Status, Subscribe, request_of


class Loan(msgspec.Struct, frozen=True):
    """What a reader is told beside the descriptors of the data, to read only, and of the readers' memory.

    Attributes:
        name: of the publication.
        line: which part of the readers' memory is its own.
        layout: where each tensor lies in one.
    """

    name: str
    line: int
    layout: Layout


class Lender:
    """Owner: its publication. Its thread serves until `close`.

    Args:
        listener: a listening socket that nobody reads from yet.
        loan: what each reader is told, with another ``line``.
        data: descriptor of the data; stays the caller's, open until `close`.
        on_reader: called with the newest version that a reader has seen before it is let in.
        status: returns what there is to say of the publication beside its readers.
    """

    def __init__(
        self,
        listener: socket.socket,
        loan: Loan,
        data: int,
        on_reader: Callable[[int], None],
        status: Callable[[], messages.Message],
    ) -> None:
        self._loan, self._data, self._on_reader, self._status = loan, data, on_reader, status
        self._lines: dict[Connection, int] = {}  # of readers, by their connections
        (self._readers,) = map(FileIO, map(create, ["readers"], [at.MOST_READERS * at.READER_BYTES]))
        self.memory = Segment(self._readers.fileno(), sparse=True)
        mutex.initialise(self.memory.address + at.LIFE, at.MOST_READERS, at.READER_BYTES)
        self.reached = 0  # lines that were ever lent
        self._stop = Wake()
        entrance = Entrance(listener, None)
        entrance.open(None)
        self._door = Door(entrance)
        self._thread = threading.Thread(target=self._serve, name="multiverso-publication", daemon=True)
        self._thread.start()

    @property
    def readers(self) -> int:
        """How many processes read just now."""
        return len(self._lines)

    def close(self) -> None:
        """Ends it: readers keep what they have. May be called again."""
        if self._thread.is_alive():  # which it is not in a forked child, whose `set` would stop it in the parent
            self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._door.close()
        self._stop.close()
        self._readers.close()
        # its publication can go now, with all of its memory
        self._on_reader, self._status = lambda seen: None, dict

    def release_dead(self) -> bool:
        """Takes the pins of readers that have died back; whether there were any."""
        found = False
        for line in range(self.reached):
            reader = self.memory.address + line * at.READER_BYTES
            pins = [reader + at.PINS + 8 * place for place in range(at.MOST_PINS)]
            if any(map(load64, pins)) and _is_free(reader + at.LIFE):
                found = True
                for pin in pins:
                    store64(pin, 0)
        return found

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            poll = select.poll()
            for each in (self._door, self._stop):
                poll.register(each, select.POLLIN)
            stop = self._stop.fileno()
            while stop not in [descriptor for descriptor, _ in poll.poll()]:
                for connection, message in self._door.read():
                    if message is None:
                        self._lines.pop(connection, None)
                    else:
                        self._answer(connection, message)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            print(f"multiverso: publication {self._loan.name!r} takes no more readers", file=sys.stderr)

    def _answer(self, connection: Connection, message: messages.Message) -> None:
        try:
            request = request_of(message)
            match request:
                case Hello():
                    connection.reply(request.id, {})
                case Subscribe():
                    self._lend(connection, request)
                case Status():
                    status = {"name": self._loan.name, "readers": self.readers, **self._oldest(), **self._status()}
                    connection.reply(request.id, {"status": status})
                case _:
                    raise StartupError("this is a publication, and no job's node")
        except MultiversoError as error:
            connection.refuse(message.get("id"), error)

    def _oldest(self) -> messages.Message:
        """Returns what the reader holds that is furthest behind, and its process; nothing where none holds any."""
        found = []
        for connection, line in self._lines.items():
            pins = self.memory.array(line * at.READER_BYTES + at.PINS, at.MOST_PINS, np.int64)
            pins = pins[pins & at.SLOT_MASK > 0]
            if pins.size:
                found.append((int(pins.max()) >> at.SLOT_BITS, connection.pid))
        return dict(zip(("oldest_version", "oldest_pid"), min(found, default=()), strict=False))

    def _lend(self, connection: Connection, request: Subscribe) -> None:
        line = self._lines[connection] if connection in self._lines else self._free_line()
        self._on_reader(request.seen)
        self.reached = max(self.reached, line + 1)
        self._lines[connection] = line
        loan = msgspec.to_builtins(msgspec.structs.replace(self._loan, line=line))
        with for_reading(self._data) as data:
            connection.reply(request.id, {"loan": loan}, (data.fileno(), self._readers.fileno()))

    def _free_line(self) -> int:
        lent = set(self._lines.values())
        for line in range(at.MOST_READERS):
            reader = self.memory.address + line * at.READER_BYTES
            if line not in lent and _is_free(reader + at.LIFE):
                for place in range(at.MOST_PINS):
                    store64(reader + at.PINS + 8 * place, 0)
                return line
        raise StartupError(
            f"publication {self._loan.name!r} has {at.MOST_READERS} readers on this host, and there is no room for more"
        )


def _is_free(life: int) -> bool:
    """Whether nobody holds a reader's life lock: it has not come yet, has gone, or has died."""
    code = mutex.try_lock(life)
    if code in (0, mutex.OWNER_DEAD):
        mutex.recover(life)
        mutex.unlock(life)
    return code != mutex.BUSY
