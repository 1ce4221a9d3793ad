"""The publisher's side: versions of a model in a few slots of shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from multiverso.deadline import Deadline
from multiverso.errors import ClosedError
from multiverso.in_process import InProcess
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.memory.words import bump_and_wake, load64
from multiverso.publications import names
from multiverso.publications.history import History
from multiverso.publications.lending import Lender, Loan
from multiverso.publications.tensors import Leaf, Tensor, arranged, layout_of, leaves_of
from multiverso.runtime.session import current

_CHUNK_WORDS = 1 << 19  # 4 MiB: what one thread copies at a time
_MOST_THREADS = 4
_LOOK_SECONDS = 0.0005
_open: weakref.WeakSet[Publication] = weakref.WeakSet()


class Publication(InProcess):
    """Hands versions of a model to processes that are not workers; the counterpart is :func:`multiverso.subscribe`.

    Any process may publish, in a job or alone, without ``multiverso.init()``; one process at a time under a name. The
    model
    is copied into a slot of shared memory that nobody reads, and becomes current in one step: a reader has all
    tensors of one version, or none. Readers are processes of the same user on this host.

    Args:
        name: by which readers find it.
        like: a model whose tensors have the names, shapes and dtypes of what will be published: a PyTorch module, a
            Keras model, or arrays and tensors of any dtype in dicts and lists. Its values are not published.
        slots: versions that can be in memory at a time, 2 to 8. Two are taken at once, others when readers keep
            versions.

    Attributes:
        name: its name.
        left_out: versions that were not published, as readers kept every slot.

    Raises:
        StartupError: another process publishes under this name; the message names it. When it has ended, or is dead,
            the same call succeeds.
        OutOfMemoryError: there is no room for two slots. Nothing was taken.
        ValueError, TypeError: there is no tensor in ``like``, or something that is none.

    Example:
        >>> import numpy as np
        >>> weights = {"w": np.ones((2, 3), "float32"), "b": np.zeros(3, "float32")}
        >>> with mv.Publication("policy-of-docs", like=weights) as publication:
        ...     publication.publish(weights, step=7)
        1
    """

    def __init__(self, name: str, like: Any, *, slots: int = 3) -> None:
        self.name = names.checked(name)
        if isinstance(slots, bool) or not isinstance(slots, int) or not 2 <= slots <= at.MOST_SLOTS:
            raise ValueError(f"slots is a whole number from 2 to {at.MOST_SLOTS}; got {slots!r}")
        self._layout = layout_of(leaves_of(like))
        self._slots, self._size = slots, self._layout.slot_bytes
        self._pid = os.getpid()
        self._lock, self._naming = threading.RLock(), threading.Lock()
        self._copying: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._history = History()
        self.left_out = 0
        self._closed = False
        session = current.latest()
        listener = names.take(name, session.address if session is not None else os.environ.get("MULTIVERSO_NODE", ""))
        try:
            self._heap = Heap("publication")
            what = f"publication {name!r} ({self._layout.nbytes / 1e6:,.1f} MB, at least twice)"
            advice = "publish fewer tensors, or in a narrower dtype"
            self._heap.reserve(at.HEADER.size + 2 * self._size, what, advice)
            self._there = 2  # slots whose memory is there
            os.ftruncate(self._heap.descriptor, at.HEADER.size + slots * self._size)
            self._memory = Segment(self._heap.descriptor, sparse=True)
            self._current, self._event = (self._memory.address + word for word in (at.CURRENT, at.EVENT))
            loan = Loan(name, 0, slots, self._layout)
            self._lender = Lender(listener, loan, self._heap.descriptor, self._follow_on)
        except BaseException:
            listener.close()
            if hasattr(self, "_heap"):
                self._heap.close()
            raise
        _open.add(self)

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return load64(self._current) >> at.SLOT_BITS

    @property
    def readers(self) -> int:
        """How many processes read it just now."""
        return self._lender.readers

    def publish(self, model: Any, step: int | None = None, text: str = "", *, wait_seconds: float = 0.0) -> int | None:
        """Makes a copy of a model the current version.

        It never waits for a reader by itself: where readers keep every slot, this version is left out and counted.

        Args:
            model: as ``like`` was.
            step: of the training, for readers.
            text: what else readers are to know, up to 4,000 bytes.
            wait_seconds: how long to wait for a slot, if readers keep them all.

        Returns:
            The version, one higher than the last; None where it was left out.

        Raises:
            ShapeMismatchError, DtypeMismatchError: other tensors than those of ``like``. Nothing was published.
            ClosedError: it is closed, or this is a forked child.
        """
        deadline = Deadline.after(wait_seconds)
        leaves = arranged(leaves_of(model), self._layout)
        note = _checked_text(text)
        with self._lock:
            self._check()
            wait(self._copying)  # of a call that was interrupted
            slot = self._free_slot(deadline)
            if slot is None:
                self.left_out += 1
                return None
            place = at.HEADER.size + slot * self._size
            self._copy(leaves, place)
            meta = at.META.at(self._memory.address + place)
            meta["STEP"], meta["HAS_STEP"] = (step or 0, step is not None)
            meta["TIME"], meta["TEXT_BYTES"] = time.time(), len(note)
            self._memory.array(place + at.TEXT, len(note), np.uint8)[:] = np.frombuffer(note, np.uint8)
            with self._naming:
                return self._make_current(self._history.next(), slot)

    def accepts(self, version: int, lag: int) -> bool:
        """Returns whether a sample that was made with a version may still be learned from.

        The learner's version moves in ``publish`` only, so a run that is repeated accepts the same samples.

        Args:
            version: of the snapshot that the sample was made with.
            lag: how many versions newer the current one may be at most.

        Returns:
            False too for a version that another publisher of this name has made.
        """
        return self._history.accepts(version, lag)

    def close(self) -> None:
        """Ends it. Readers keep the version that they have. May be called again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            wait(self._copying)
            self._lender.close()
            self._heap.close()
            if self._pool is not None:
                self._pool.shutdown()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publication {self.name!r}, version {self.version}, {self.readers} readers>"

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"publication {self.name!r} belongs to process {self._pid}, and this is a child of it")
        if self._closed:
            raise ClosedError(f"publication {self.name!r} is closed")

    # -- slots -------------------------------------------------------------------------------------------------------

    def _free_slot(self, deadline: Deadline) -> int | None:
        """Returns a slot that nobody reads, or None at the deadline."""
        free_slot, readers = kernels.free_slot.compiled(), self._lender.memory.address
        while True:
            slot = free_slot(self._current, readers, self._lender.reached, self._there)
            if slot >= 0:
                return slot
            if self._lender.release_dead() or self._take_another():
                continue
            if deadline.passed:
                return None
            time.sleep(_LOOK_SECONDS)

    def _take_another(self) -> bool:
        """Takes the memory of one more slot, if there is any."""
        if self._there == self._slots:
            return False
        try:
            os.posix_fallocate(self._heap.descriptor, at.HEADER.size + self._there * self._size, self._size)
        except OSError:
            return False
        self._there += 1
        return True

    def _make_current(self, version: int, slot: int) -> int:
        kernels.make_current.compiled()(self._current, version << at.SLOT_BITS | (slot + 1))
        bump_and_wake(self._event)
        return version

    def _follow_on(self, seen: int) -> None:
        """A reader has had a version of another publisher: what is current gets a higher number (the lender)."""
        with self._naming:
            word = load64(self._current)
            if self._history.rise_above(seen) and word:
                self._make_current(self._history.next(same=True), (word & at.SLOT_MASK) - 1)

    # -- copying -----------------------------------------------------------------------------------------------------

    def _copy(self, leaves: list[Leaf], place: int) -> None:
        base = self._memory.address + place
        sums = self._memory.array(place + at.META.size, len(leaves), np.int64)
        sums[:] = 0
        pairs = list(zip(self._layout.tensors, leaves, strict=True))
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        if threads == 1 or self._layout.nbytes < 8 * _CHUNK_WORDS:
            for number, (tensor, leaf) in enumerate(pairs):
                sums[number] = _wrapped(_copy_part(base, tensor, leaf, 0, tensor.words))
            return
        parts = [
            (number, tensor, leaf, first, min(_CHUNK_WORDS, tensor.words - first))
            for number, (tensor, leaf) in enumerate(pairs)
            for first in range(0, tensor.words, _CHUNK_WORDS)
        ]
        parts.reverse()
        totals = [0] * len(pairs)
        adding = threading.Lock()

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    number, tensor, leaf, first, count = parts.pop()
                    total = _copy_part(base, tensor, leaf, first, count)
                    with adding:
                        totals[number] += total

        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads - 1, "multiverso-publish")
        try:
            self._copying = [self._pool.submit(work) for _ in range(threads - 1)]
            work()
        except BaseException:
            parts.clear()  # the others stop after the part in hand; the next call waits for them
            raise
        for copied in self._copying:
            copied.result()
        sums[:] = [_wrapped(total) for total in totals]


def _copy_part(base: int, tensor: Tensor, leaf: Leaf, first: int, count: int) -> int:
    """Copies words of a tensor into a slot, and returns their part of its checksum."""
    to, source = base + tensor.offset + 8 * first, leaf.address + 8 * first
    whole = min(count, tensor.nbytes // 8 - first)
    total = kernels.copy_summed.compiled()(to, source, whole, first) if whole > 0 else 0
    if whole < count:  # the end of a tensor that is no multiple of 8 bytes; what fills it up is zero
        left = tensor.nbytes % 8
        ctypes.memmove(to + 8 * whole, source + 8 * whole, left)
        total += kernels.summed.compiled()(to + 8 * whole, 1, first + whole)
    return total


def _wrapped(total: int) -> int:
    """Returns a sum as the int64 that it is modulo 2**64."""
    return (total + 2**63) % 2**64 - 2**63


def _checked_text(text: str) -> bytes:
    note = text.encode()
    if len(note) > at.MOST_TEXT:
        raise ValueError(f"text has {len(note)} bytes; {at.MOST_TEXT} at most")
    return note


def _after_fork_in_child() -> None:
    for publication in list(_open):
        publication._lender.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
