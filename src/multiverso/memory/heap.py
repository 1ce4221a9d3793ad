"""All shared memory of a job: one anonymous file that the kernel frees with its last user, even after SIGKILL.

It needs one descriptor in each process, whatever the number of tables, and grows by what is reserved.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import os
import resource
from io import FileIO
from pathlib import Path

from multiverso.errors import OutOfMemoryError, StartupError
from multiverso.layout.words import HUGE_PAGE, PAGE, round_up
from multiverso.memory import system
from multiverso.memory.huge_pages import LARGE, Collapser, wanted
from multiverso.memory.system import libc

_F_ADD_SEALS, _SEAL_SHRINK = 1033, 2
_BLOCK = 512  # what st_blocks counts, whatever the file system's blocks are
_UNASKED = 32 * 1024 * 1024
_SPARE = 256 * 1024 * 1024  # left for everything else
_ADVICE = "use a smaller table or fewer synchronous workers (each has a slot of the table's size)"


class Heap:
    """Parts of one memfd, given out and taken back. Owner: the node's thread.

    Args:
        name: what /proc/PID/maps shows.

    Raises:
        StartupError: the system has no anonymous shared memory, or no descriptor left for it.
    """

    def __init__(self, name: str) -> None:
        try:
            # in one step of the interpreter: an interruption between the two calls would leave the descriptor behind
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            (self._file,) = map(FileIO, map(os.memfd_create, [f"multiverso-{name}"], [flags]))
        except (AttributeError, OSError) as error:
            raise StartupError(_no_memfd(error)) from error
        # a shrunk file kills all that have it mapped
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEAL_SHRINK)
        self._end = 0
        self._free_memory = 0
        self._unasked = 0  # bytes that are given out before the system is asked again what is free
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset, never adjacent
        self._collapser: Collapser | None = None  # once there is something large

    @property
    def descriptor(self) -> int:
        """Of the memory; closed by `close`, or with the last reference to the heap."""
        return self._file.fileno()

    @property
    def used(self) -> int:
        """Bytes of memory that it takes, of sparse parts what is used of them; 0 once it is closed."""
        return 0 if self._file.closed else os.fstat(self.descriptor).st_blocks * _BLOCK

    def reserve(self, nbytes: int, what: str = "a table", advice: str = _ADVICE) -> int:
        """Returns the offset of zeroed memory that is really there, on a page's boundary.

        Raises:
            OutOfMemoryError: there is not as much. Without this check a program would be killed by SIGBUS later,
                at the first use of a page that is not there.
        """
        size = round_up(nbytes, PAGE)
        if size > self._unasked:
            self._free_memory = free_memory()
            self._unasked = min(_UNASKED, self._free_memory // 16)
        else:  # asking takes longer than a small table
            self._unasked -= size
        free = self._free_memory
        if size > free:
            raise OutOfMemoryError(
                f"{what} of {size / 1e6:,.0f} MB does not fit: {free / 1e6:,.0f} MB of memory are available; {advice}"
            )
        place = next((i for i, (_, room) in enumerate(self._free) if room >= size), None)
        offset = self._end if place is None else self._free[place][0]
        try:
            os.posix_fallocate(self.descriptor, offset, size)
        except OSError as error:
            raise OutOfMemoryError(_refused(error, size, free)) from error
        if place is None:
            self._end += size
        else:
            self._take_out(*self._free[place], offset, size)
        return offset

    def reserve_sparse(self, nbytes: int, what: str) -> int:
        """Returns the offset of zeroed memory that is there once it is used, on a huge page's boundary.

        Raises:
            OutOfMemoryError: the file may not become as large. The user of the memory looks whether there is
                some left.
        """
        size, gap = round_up(nbytes, PAGE), -self._end % HUGE_PAGE
        for offset, room in self._free:  # another's place, or a job that makes and closes them would run out
            inside = -offset % HUGE_PAGE
            if room >= inside + size:
                self._take_out(offset, room, offset + inside, size)
                return offset + inside
        try:
            os.ftruncate(self.descriptor, self._end + gap + size)
        except OSError as error:
            raise OutOfMemoryError(f"{what}: {_refused(error, size, free_memory())}") from error
        if gap:
            self._give_out(self._end, gap)
        self._end += gap + size
        return self._end - size

    def _take_out(self, offset: int, room: int, start: int, size: int) -> None:
        """Notes that a part of a free place is given out."""
        place = self._free.index((offset, room))
        left = [(offset, start - offset), (start + size, offset + room - start - size)]
        self._free[place : place + 1] = [part for part in left if part[1]]

    def make_huge(self, offset: int, nbytes: int, sparse: bool = False) -> None:
        """Lets reserved memory be put into huge pages in the background, if it is large; sparse memory as it fills."""
        if nbytes < LARGE or not wanted():
            return
        if self._collapser is None:
            self._collapser = Collapser(self.descriptor)
        (self._collapser.add_sparse if sparse else self._collapser.add)(offset, round_up(nbytes, PAGE))

    def release(self, offset: int, nbytes: int) -> None:
        """Takes memory back: its pages go to the system, and the place to the next that fits."""
        size = round_up(nbytes, PAGE)
        if self._collapser is not None:
            self._collapser.discard(offset, size)
        if libc.fallocate(self.descriptor, system.KEEP_SIZE | system.PUNCH_HOLE, offset, size) != 0:
            zeros = bytes(1 << 20)  # no holes here: then it stays, and must be zero for the next
            for start in range(0, size, len(zeros)):
                os.pwrite(self.descriptor, zeros[: size - start], offset + start)
        self._give_out(offset, size)

    def _give_out(self, offset: int, size: int) -> None:
        """Notes that a place may be given out (again)."""
        place = bisect.bisect(self._free, (offset, size))
        if place < len(self._free) and self._free[place][0] == offset + size:
            size += self._free.pop(place)[1]
        if place and sum(self._free[place - 1]) == offset:
            before, room = self._free.pop(place - 1)
            offset, size = before, room + size
            place -= 1
        self._free.insert(place, (offset, size))

    def close(self) -> None:
        """Closes the descriptor; the memory stays as long as it is mapped anywhere. May be called again."""
        if self._collapser is not None:
            self._collapser.close()
        self._file.close()


def create(name: str, size: int) -> int:
    """Returns the descriptor of memory of its own, zeroed and reserved."""
    heap = Heap(name)
    try:
        heap.reserve(size)
        return os.dup(heap.descriptor)
    finally:
        heap.close()


def for_reading(descriptor: int) -> FileIO:
    """Returns another open file of memory: what it cannot do, no copy of it can.

    Raises:
        StartupError: this system gives none.
    """
    try:
        return FileIO(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise StartupError(f"this system gives no memory that can only be read ({error})") from error


class Budget:
    """Looks what memory is free before sparse memory is used, now and then. One thread at a time may call."""

    def __init__(self) -> None:
        self._left = 0  # bytes that may be used before it looks again

    def shortage(self, nbytes: int) -> int | None:
        """Before so many more bytes are used: returns how many are free if these are not, else None."""
        self._left -= nbytes
        if self._left >= 0:
            return None
        free = free_memory()
        if free < nbytes + _SPARE:
            self._left = 0
            return free
        self._left = (free - _SPARE) // 16 - nbytes
        return None


def free_memory() -> int:
    """Returns the bytes that may still be used: the machine's, or a container's if that is less."""
    free: int | None = None
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_AVPHYS_PAGES") * PAGE
    return min([free, *left_in_groups()])


def left_in_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Returns what each control group above this process still allows, nested ones included."""
    try:
        rows = proc.read_text().splitlines()
    except OSError:
        rows = []
    places: list[tuple[Path, str, str]] = [(root, "memory.max", "memory.current")]
    places.append((root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    for row in rows:
        _, controllers, path = row.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        for above in [Path(path), *Path(path).parents]:
            inside = str(above).lstrip("/")
            if controllers:
                places.append((root / "memory" / inside, *places[1][1:]))
            else:
                places.append((root / inside, *places[0][1:]))
    left = []
    for place, limit, used in dict.fromkeys(places):
        try:
            most = (place / limit).read_text().strip()
            if most != "max":
                taken = int((place / used).read_text()) - _reclaimable(place)
                left.append(max(0, int(most) - taken))
        except (OSError, ValueError):
            continue
    return left


def _reclaimable(group: Path) -> int:
    """Returns the bytes of files that a control group's use counts, but that the system drops when needed."""
    try:
        rows = (row.split() for row in (group / "memory.stat").read_text().splitlines())
        return sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "total_inactive_file"))
    except (OSError, ValueError, IndexError):
        return 0


def _refused(error: OSError, size: int, free: int) -> str:
    what = f"the system refused {size / 1e6:,.1f} MB of shared memory"
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limited = f"all tables of a job may have {limit / 1e6:,.1f} MB together here (ulimit -f)"
        return f"{what}: {error.strerror}: {limited}"
    return f"{what}: {error.strerror} ({free / 1e6:,.0f} MB seemed free)"


def _no_memfd(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"no file descriptor is left for the job's memory: this process may have {limit} (ulimit -n)"
    why = error.strerror if isinstance(error, OSError) else "this Python was built without memfd_create"
    return f"this system gives no anonymous shared memory (memfd_create: {why}); run `multiverso doctor`"
