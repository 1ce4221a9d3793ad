"""The memory of a publication, as the process has it that makes its versions."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import OutOfMemoryError
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.memory.words import bump_and_wake, load64
from multiverso.publications.lending import Lender, Loan
from multiverso.publications.tensors import Layout
from multiverso.wire import publications as names
from multiverso.wire.messages import Message

_LOOK_SECONDS = 0.0005


class Note(msgspec.Struct, frozen=True):
    """What is said of a version.

    Attributes:
        step: of the training, if there is one.
        time: seconds since 1970.
        text: what else there is to say.
    """

    step: int | None
    time: float
    text: str = ""

    @classmethod
    def now(cls, step: int | None, text: str) -> Note:
        """Returns the one of a version that is made now.

        Raises:
            ValueError: the text is none, or too long; or the step is not a whole number of 64 bits.
        """
        if not isinstance(text, str) or len(text.encode()) > at.MOST_TEXT:
            raise ValueError(f"text is a text of {at.MOST_TEXT} bytes at most; got {text!r:.100}")
        try:
            number = None if step is None else operator.index(step)
        except TypeError:
            raise ValueError(f"step is a whole number; got {step!r}") from None
        if number is not None and not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"step has 64 bits; got {step}")
        return cls(number, time.time(), text)


class Slots:
    """Slots, one of which is current. Owner: one thread at a time; its lender has a thread of its own.

    Attributes:
        layout: of each slot.
        left_out: versions that were not published, as readers kept every slot.

    Args:
        name, job: under which readers find it.
        layout: of each slot.
        number: how many there may be; two are taken at once, if there may be.
        on_reader: called by the lender with the newest version that a reader has had before it comes here.
        sent_bytes: returns how many bytes of it went to other hosts.

    Raises:
        StartupError: another process publishes under this name.
        OutOfMemoryError: there is no room for those that are taken at once.
    """

    def __init__(
        self,
        name: str,
        job: str,
        layout: Layout,
        number: int,
        on_reader: Callable[[int], None],
        sent_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.layout, self._number, self._size = layout, number, layout.slot_bytes
        self._sent_bytes = sent_bytes
        listener = names.take(name, job)
        try:
            self._heap = Heap("publication")
            self._there = min(2, number)  # slots whose memory is there
            what = f"publication {name!r} ({layout.nbytes / 1e6:,.1f} MB, {'twice' if self._there > 1 else 'once'})"
            self._heap.reserve(self.nbytes, what, "publish fewer tensors, or in a narrower dtype")
            self.left_out = 0
            self._step: int | None = None
            os.ftruncate(self._heap.descriptor, at.HEADER.size + number * self._size)
            self._memory = Segment(self._heap.descriptor, sparse=True)
            self._current, self._event = (self._memory.address + word for word in (at.CURRENT, at.EVENT))
            loan = Loan(name, 0, layout)
            self._lender = Lender(listener, loan, self._heap.descriptor, on_reader, self._status)
        except BaseException:
            listener.close()
            if hasattr(self, "_heap"):
                self._heap.close()
            raise

    @property
    def word(self) -> int:
        """Version and slot of what is current; 0 before the first version."""
        return load64(self._current)

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return self.word >> at.SLOT_BITS

    @property
    def slot(self) -> int:
        """The slot that is current; -1 before the first version."""
        return (self.word & at.SLOT_MASK) - 1

    @property
    def readers(self) -> int:
        """How many processes read it just now."""
        return self._lender.readers

    @property
    def nbytes(self) -> int:
        """Memory that is taken: of slots that are there."""
        return at.HEADER.size + self._there * self._size

    def bytes_of(self, slot: int) -> npt.NDArray[np.uint8]:
        """Returns the memory of a slot."""
        return self._memory.array(at.HEADER.size + slot * self._size, self._size, np.uint8)

    def sums_of(self, slot: int) -> npt.NDArray[np.int64]:
        """Returns the checksums in a slot."""
        place = at.HEADER.size + slot * self._size + at.META.size
        return self._memory.array(place, len(self.layout.tensors), np.int64)

    def take(self, deadline: Deadline, stopped: Callable[[], bool] = lambda: False) -> int | None:
        """Returns a slot that nobody reads, or None at the deadline or when there is no need any more."""
        free_slot, readers = kernels.free_slot.compiled(), self._lender.memory.address
        while True:
            slot = free_slot(self._current, readers, self._lender.reached, self._there)
            if slot >= 0:
                return slot
            if self._lender.release_dead() or self._take_another():
                continue
            if deadline.passed or stopped():
                return None
            time.sleep(_LOOK_SECONDS)

    def describe(self, slot: int, note: Note) -> None:
        """Writes what is said of a version into its slot."""
        memory = self.bytes_of(slot)
        meta, text = at.META.at(memory.__array_interface__["data"][0]), note.text.encode()
        meta["STEP"], meta["HAS_STEP"] = (note.step or 0, note.step is not None)
        meta["TIME"], meta["TEXT_BYTES"] = note.time, len(text)
        self._step = note.step
        memory[at.TEXT : at.TEXT + len(text)] = np.frombuffer(text, np.uint8)

    def make_current(self, version: int, slot: int) -> None:
        """Publishes a slot, in one step."""
        kernels.make_current.compiled()(self._current, version << at.SLOT_BITS | (slot + 1))
        bump_and_wake(self._event)

    def _status(self) -> Message:
        """What the lender says of it."""
        status = {"version": self.version, "step": self._step, "left_out": self.left_out, "memory_bytes": self.nbytes}
        return status | {"sent_bytes": self._sent_bytes()}

    def close(self) -> None:
        """Ends it: readers keep what they have. May be called again."""
        self._lender.close()
        self._heap.close()
        self._sent_bytes = lambda: 0

    def _take_another(self) -> bool:
        """Takes the memory of one more slot, if there is any: what lies behind the others."""
        if self._there == self._number:
            return False
        try:
            self._heap.reserve(self._size)
        except OutOfMemoryError:
            return False
        self._there += 1
        return True
