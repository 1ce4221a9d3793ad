"""A reader's connection to one publisher: its memory, mapped, and the pins that keep versions in it."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from io import FileIO
from typing import Any

import msgspec
import numpy as np

from multiverso.errors import StartupError
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.memory import mutex
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64, store64
from multiverso.publications.lending import Loan
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire.requests import Subscribe


class Attachment:
    """Owner: its subscription, whose thread holds the life lock. Pins may be taken and given back in any thread.

    Args:
        address: of the publisher's socket.
        seen: the newest version that this reader has had.
        deadline: on time.monotonic(), for the publisher's answers.

    Raises:
        StartupError: nobody publishes there (any more), or it has no room for another reader.
        WaitTimeoutError: it does not answer.
    """

    def __init__(self, address: str, seen: int, deadline: float) -> None:
        self.link = NodeLink.to(address, deadline)
        try:
            answer, descriptors = self.link.ask(Subscribe(seen), deadline, "the publication's memory")
            data, readers = (FileIO(descriptors.pop(0)) for _ in range(2))
            with data, readers:
                self.memory_id = os.fstat(data.fileno()).st_ino  # no two publishers of a host have the same
                loan = msgspec.convert(answer["loan"], Loan)
                self._data = Segment(data.fileno(), sparse=True, writable=False)
                self._readers = Segment(readers.fileno(), sparse=True)
        except (KeyError, IndexError, msgspec.ValidationError) as error:
            self.link.close()
            raise StartupError(f"what answers at {address!r} is no publication ({error!r})") from error
        except BaseException:
            self.link.close()
            raise
        self.name, self.layout = loan.name, loan.layout
        self.by_name = self.layout.by_name
        self.current, self.event = self._data.address + at.CURRENT, self._data.address + at.EVENT
        self._slots = self._data.address + at.HEADER.size
        reader = self._readers.address + loan.line * at.READER_BYTES
        self._life = reader + at.LIFE
        self._places = deque(reader + at.PINS + 8 * place for place in range(at.MOST_PINS))
        self._pin, self._unpin = kernels.pin.compiled(), kernels.unpin.compiled()
        self._pid = os.getpid()
        self.connected = True  # False once the publisher has ended (the subscription's thread)

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return load64(self.current) >> at.SLOT_BITS

    def live(self) -> None:
        """Takes the life lock, without which pins count for nothing (the subscription's thread)."""
        if mutex.lock(self._life, 1.0) == mutex.OWNER_DEAD:  # of the reader before
            mutex.recover(self._life)

    def die(self) -> bool:
        """Gives the life lock back, if no pin is left; whether that is so (the subscription's thread)."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:  # so that nobody takes one meanwhile
                taken.append(self._places.pop())
        if len(taken) < at.MOST_PINS:
            self._places.extend(taken)
            return False
        mutex.unlock(self._life)
        return True

    @property
    def pinned(self) -> bool:
        """Whether any snapshot of it is there."""
        return len(self._places) < at.MOST_PINS

    def take(self) -> Pin | None:
        """Pins the current version, or returns None before the first.

        Raises:
            IndexError: this process keeps as many snapshots as it may.
        """
        place = self._places.pop()
        word = self._pin(self.current, place)
        if not word:
            self._places.append(place)
            return None
        return Pin(self, place, word)

    def share(self, word: int) -> Pin | None:
        """Pins what another reader keeps meanwhile, or returns None if none does.

        Raises:
            IndexError: as `take`.
        """
        lines = self._readers.array(0, at.MOST_READERS * at.READER_BYTES // 8, np.int64)
        if not (lines.reshape(at.MOST_READERS, -1)[:, at.PINS // 8 :] == word).any():
            return None
        place = self._places.pop()
        store64(place, word)
        return Pin(self, place, word)

    def give_back(self, place: int) -> None:
        """Gives a pin back; in a forked child nothing happens, as it is its parent's."""
        if self._pid == os.getpid():
            self._unpin(place)
            self._places.append(place)

    def slot_at(self, word: int) -> int:
        """Returns the address of the slot that a word names."""
        return self._slots + ((word & at.SLOT_MASK) - 1) * self.layout.slot_bytes


class Pin:
    """Keeps one version for as long as it is referred to: arrays of its memory refer to it."""

    __slots__ = ("_attachment", "_place", "word")

    def __init__(self, attachment: Attachment, place: int, word: int) -> None:
        self._attachment, self._place, self.word = attachment, place, word

    def __del__(self) -> None:
        self._attachment.give_back(self._place)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # not marked as for reading only, which torch would warn of: arrays of it are
        size, place = self._attachment.layout.slot_bytes, (self._attachment.slot_at(self.word), False)
        return {"shape": (size,), "typestr": "|u1", "data": place, "version": 3}
