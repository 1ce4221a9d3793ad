"""Large tables in pages of 2 MiB, of which the processor remembers more: random rows are read more quickly.

The system makes shared memory of small pages. ``MADV_COLLAPSE`` (Linux 6.1) puts 512 of them together, also while
others use them; a process that has mapped the memory at an address that fits then sees the large one. It costs about
2 s of a processor for a GiB, so it is done in the background, a part of the time.

Memory that is there only once it is used is looked at now and then: what is wholly there, and grows no more, follows.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

from multiverso.layout.words import HUGE_PAGE, PAGE
from multiverso.memory import system
from multiverso.memory.system import libc

LARGE = 4 * HUGE_PAGE  # tables that are worth it: the processor remembers as much in small pages
_SHARE = 0.25  # of one processor's time
_LOOK_SECONDS = 1.0  # between two looks at sparse parts
_GROWING = 64  # what has grown by one of so many parts since the last look is left to its users


def fits(address: int, offset: int) -> int:
    """Returns the first address from ``address`` on at which ``offset`` of a file can be mapped in huge pages."""
    return address + (offset - address) % HUGE_PAGE


class Collapser:
    """Makes the pages of a file's parts huge, one after another. Owner: its heap; a thread while there is work.

    What cannot be done is left as it is: small pages are right, too.

    Args:
        descriptor: of the memory, open until `close` has returned.
        rest: waits so many seconds, and returns whether it is to stop.
    """

    def __init__(self, descriptor: int, rest: Callable[[float], bool] | None = None) -> None:
        self._descriptor = descriptor
        self._stop = threading.Event()
        self._rest = rest or self._stop.wait
        # held for one page's time: a part that is discarded is not touched any more
        self._lock = threading.Lock()
        self._parts: list[tuple[int, int]] = []  # (offset, end) of what is still to be done
        self._sparse: dict[tuple[int, int], set[int]] = {}  # (offset, end): what has been tried there
        # of the file, at the last look and the last walk through sparse parts
        self._blocks = self._walked = 0
        self._thread: threading.Thread | None = None
        self.tried = self.made = 0  # huge pages

    def add(self, offset: int, size: int) -> None:
        """Begins with a part of the file, all of whose pages are there."""
        with self._lock:
            self._parts.append((offset + -offset % HUGE_PAGE, offset + size))
            self._begin()

    def add_sparse(self, offset: int, size: int) -> None:
        """Looks from here on which pages of a part are there. It grows in small ones: nothing waits for a large one."""
        with self._lock:
            self._sparse[offset, offset + size] = set()
            self._begin()

    def _begin(self) -> None:
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="multiverso-huge-pages", daemon=True)
            self._thread.start()

    def discard(self, offset: int, size: int) -> None:
        """Leaves a part alone that is given back: a hole that is made huge would be memory again."""
        with self._lock:
            self._parts = [part for part in self._parts if part[1] <= offset or offset + size <= part[0]]
            self._sparse.pop((offset, offset + size), None)

    def close(self) -> None:
        """Stops, and waits for the page in hand. May be called again."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self, seconds: float) -> bool:
        """Waits until nothing is left to do; False if it takes longer."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        place = libc.mmap(None, 2 * HUGE_PAGE, system.NONE, system.SET_ASIDE, -1, 0)
        if place in (None, system.FAILED):
            return
        try:
            self._go_through(place + -place % HUGE_PAGE)
        finally:
            libc.munmap(place, 2 * HUGE_PAGE)

    def _go_through(self, address: int) -> None:
        while True:
            began = time.thread_time()
            with self._lock:
                while self._parts and self._parts[0][0] + HUGE_PAGE > self._parts[0][1]:
                    del self._parts[0]
                if self._stop.is_set() or not (self._parts or self._sparse):
                    self._thread = None
                    return
                if self._parts:
                    offset, end = self._parts[0]
                    self._parts[0] = (offset + HUGE_PAGE, end)
                    code = self._collapse(address, offset)
                    if code == errno.EINVAL:  # an older system
                        self._parts.clear()
                        self._sparse.clear()
                    self.tried += 1
                    self.made += code == 0
                elif self._rests():
                    self._parts.extend(self._filled())
                nothing = not self._parts
            if nothing and self._rest(_LOOK_SECONDS):
                return
            spent = time.thread_time() - began
            if self._rest(spent * (1 / _SHARE - 1)):
                return

    def _rests(self) -> bool:
        """Whether something is there that has not been gone through, and little of it is new since the last look."""
        before, self._blocks = self._blocks, os.fstat(self._descriptor).st_blocks
        if self._blocks == self._walked or abs(self._blocks - before) > self._blocks // _GROWING:
            return False
        self._walked = self._blocks
        return True

    def _filled(self) -> Iterator[tuple[int, int]]:
        """Yields the huge pages of sparse parts all of whose small ones are there, once each."""
        for (offset, end), tried in self._sparse.items():
            place = offset
            while place < end:
                try:
                    start = os.lseek(self._descriptor, place, os.SEEK_DATA)
                    place = min(os.lseek(self._descriptor, start, os.SEEK_HOLE), end)
                except OSError:  # ENXIO: there is nothing after it
                    break
                for page in range(start + -start % HUGE_PAGE, place - HUGE_PAGE + 1, HUGE_PAGE):
                    if page not in tried:
                        tried.add(page)
                        yield page, page + HUGE_PAGE

    def _collapse(self, address: int, offset: int) -> int:
        flags = system.SHARED | system.FIXED
        rights = system.READ | system.WRITE
        if libc.mmap(address, HUGE_PAGE, rights, flags, self._descriptor, offset) == system.FAILED:
            return ctypes.get_errno()
        code = ctypes.get_errno() if libc.madvise(address, HUGE_PAGE, system.MADV_COLLAPSE) != 0 else 0
        libc.mmap(address, HUGE_PAGE, system.NONE, system.SET_ASIDE | system.FIXED, -1, 0)
        return code


def make_huge(address: int) -> bool:
    """Puts memory of this process into a huge page, whether it is there already or not; whether that could be done.

    Args:
        address: where the huge page begins, in a mapping of shared memory that `fits`.
    """
    # the system makes none of memory of which nothing is there
    some = libc.madvise(address, PAGE, system.MADV_POPULATE_WRITE) == 0
    made: bool = some and libc.madvise(address, HUGE_PAGE, system.MADV_COLLAPSE) == 0
    return made


def populate(address: int) -> None:
    """Has the system put small pages where a huge one could be, all at once, if it can."""
    libc.madvise(address, HUGE_PAGE, system.MADV_POPULATE_WRITE)


def wanted() -> bool:
    """Returns whether the environment leaves it to us (MULTIVERSO_HUGE_PAGES=0 does not)."""
    return os.environ.get("MULTIVERSO_HUGE_PAGES", "1") != "0"
