"""A reader's connection to one publisher: its memory, mapped, and the pins that keep versions in it."""

from __future__ import annotations

import functools
import os
import weakref
from io import FileIO
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.errors import StartupError
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.memory import mutex
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64
from multiverso.publications.lending import Loan
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire.requests import Subscribe

_made: weakref.WeakSet[Attachment] = weakref.WeakSet()


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
                self.data = Segment(data.fileno(), sparse=True, writable=False)
                self._readers = Segment(readers.fileno(), sparse=True)
        except (KeyError, IndexError, msgspec.ValidationError) as error:
            self.link.close()
            raise StartupError(f"what answers at {address!r} is no publication ({error!r})") from error
        except BaseException:
            self.link.close()
            raise
        self.name, self.layout = loan.name, loan.layout
        self.by_name = self.layout.by_name
        self.current, self.event = self.data.address + at.CURRENT, self.data.address + at.EVENT
        self._slots = self.data.address + at.HEADER.size
        reader = self._readers.address + loan.line * at.READER_BYTES
        self._life = reader + at.LIFE
        self._pins = reader + at.PINS
        self._pin, self._unpin = kernels.pin.compiled(), kernels.unpin.compiled()
        self._references: list[weakref.ref[Pin]] = []  # whose callbacks give the pins back
        self.connected = True  # False once the publisher has ended (the subscription's thread)
        _made.add(self)

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
        if self.pinned:
            return False
        mutex.unlock(self._life)
        return True

    @property
    def pinned(self) -> bool:
        """Whether any snapshot of it is there."""
        return any(load64(self._pins + 8 * number) for number in range(at.MOST_PINS))

    def take(self) -> Pin | None:
        """Pins the current version, or returns None before the first.

        Raises:
            IndexError: this process keeps as many snapshots as it may.
        """
        return self._pinned_at(self.current)

    def share(self, word: int) -> Pin | None:
        """Pins what another reader keeps meanwhile, or returns None if none does.

        Raises:
            IndexError: as `take`.
        """
        kept = np.array([word])  # stands for what is current
        return self._pinned_at(kept.ctypes.data) if (self._all_pins == word).any() else None

    @property
    def versions(self) -> list[int]:
        """Those that are in memory: the newest, and what readers keep."""
        words = {load64(self.current), *self._all_pins[self._all_pins & at.SLOT_MASK > 0].tolist()} - {0}
        return sorted({word >> at.SLOT_BITS for word in words})

    @property
    def _all_pins(self) -> npt.NDArray[np.int64]:
        lines = self._readers.array(0, at.MOST_READERS * at.READER_BYTES // 8, np.int64)
        return lines.reshape(at.MOST_READERS, -1)[:, at.PINS // 8 :]

    def _pinned_at(self, current: int) -> Pin | None:
        if len(self._references) >= 2 * at.MOST_PINS:
            self._references = [one for one in self._references if one() is not None]
        pin, cell = Pin(self), np.zeros(1, np.int64)
        # before it is taken: whatever exception comes from here on, it is given back
        self._references.append(weakref.ref(pin, functools.partial(self._unpin, cell)))
        pin.word = self._pin(current, self._pins, cell)
        if pin.word < 0:
            raise IndexError
        return pin if pin.word else None

    def forget(self) -> None:
        """In a forked child: the pins are its parent's."""
        for reference in self._references:
            if reference.__callback__ is not None:
                reference.__callback__.args[0][0] = 0  # type: ignore[attr-defined]

    def slot_at(self, word: int) -> int:
        """Returns the address of the slot that a word names."""
        return self._slots + ((word & at.SLOT_MASK) - 1) * self.layout.slot_bytes


def is_read_only(address: int) -> bool:
    """Returns whether memory at an address is a publisher's: a write to it ends the process."""
    return any(0 <= address - one.data.address < one.data.size for one in _made)


class Pin:
    """Keeps one version for as long as it is referred to: arrays of its memory refer to it."""

    __slots__ = ("__weakref__", "_attachment", "word")

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self.word = 0

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # not marked as for reading only, which torch would warn of: arrays of it are
        size, place = self._attachment.layout.slot_bytes, (self._attachment.slot_at(self.word), False)
        return {"shape": (size,), "typestr": "|u1", "data": place, "version": 3}


def _after_fork_in_child() -> None:
    for attachment in list(_made):
        attachment.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
