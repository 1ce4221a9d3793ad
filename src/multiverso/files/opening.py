"""Files and directories that another user of the machine can neither plant, replace, read half nor write.

For what a job keeps on disk: saved tables, compiled kernels (whose files run as us when they are loaded), secrets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from multiverso.errors import MultiversoError, SnapshotError
from multiverso.files import users
from multiverso.saying import Progress

Buffer = bytes | bytearray | memoryview
PathLike = str | os.PathLike[str]
_SECRET_MODE = 0o600
_LOOK_SECONDS = 0.02
_SLICE_BYTES, _LARGE_BYTES = 128 << 20, 1 << 30  # that are written at once; from which on each waits for the disk
_READ_BYTES = 1 << 20
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def own_directory(path: PathLike) -> Path:
    """Returns a directory of this user's own, of mode 0700, made if it is not there; or refuses it.

    What is in it was put there by this user, or by one who may do anything here anyway.

    Args:
        path: the directory. Missing ones above it are made, too (mode 0755).

    Returns:
        Its path without symbolic links: use this one.

    Raises:
        PermissionError: it, or one above it, belongs to another user, or another user may write to it.
        OSError: it cannot be made.
    """
    place = Path(path)
    for each, mode in (*((parent, 0o755) for parent in reversed(place.parents)), (place, 0o700)):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode)
    place = place.parent.resolve() / place.name
    directory = _Directory(place, os.O_NOFOLLOW)
    _check_own(place, directory.descriptor, 0o700)
    # a user who can write to a directory above can replace it between our look and our use
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    for parent in place.parents:
        status = parent.stat()
        if status.st_uid not in trusted:
            raise _refused(place, f"{parent} belongs to user {status.st_uid}")
        if _others_write(status) and not status.st_mode & stat.S_ISVTX:
            raise _refused(place, f"others may write to {parent} (mode {stat.S_IMODE(status.st_mode):04o})")
    return place


def write_whole(path: PathLike, content: Buffer | Iterable[Buffer], *, mode: int = 0o666, replace: bool = True) -> None:
    """Writes a file whole or not at all, and on disk: a reader sees the old content or the new, also after a crash.

    Any number of threads, processes and containers may write to one path at a time: the last one's content stays.
    What killed ones have left beside it is removed. A symbolic link of that name is replaced, not followed.

    Args:
        path: the file.
        content: its bytes, or pieces of them.
        mode: its permissions, less the umask; 0o600 keeps it to this user.
        replace: False leaves a file that is there as it is.

    Raises:
        FileExistsError: it is there, and ``replace`` is False.
        OSError: it cannot be written; its ``filename`` is ``path``. Nothing is left behind.
    """
    target = Path(path)
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    pieces = (content,) if isinstance(content, Buffer) else content
    try:
        _remove_leftovers(target)
        with _temporary(target, mode) as file:
            _write(
                file,
                [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes],
                f"writing {_shown(target)}",
            )
            file.flush()
            os.fsync(file)
            if replace:
                os.replace(file.name, target)
            else:
                os.link(file.name, target, follow_symlinks=False)
        sync_directory(target.parent)
    except OSError as error:
        error.filename = os.fspath(path)  # instead of the temporary file's name
        del error.filename2  # None would be told as "-> None"
        raise


@contextlib.contextmanager
def below(base: PathLike, name: PathLike, opened: bool = False) -> Iterator[Path]:
    """Gives a path to something below a directory that leads there whatever others put in its folders' places.

    Whoever may write to the directory may replace any folder in it, by a link to another one of this user's, too. So
    the folders are opened one in the other, no link among them is followed, and the path goes by what is open, where
    this system shows that (``/proc``).

    Args:
        base: the directory; links that lead to it are followed.
        name: what is meant in it, or in folders of it.
        opened: it is a folder, and opened as well.

    Raises:
        OSError: a folder is not there, or is a link; or the block has raised it. Where it names the path that was given
            its ``filename`` is the usual one.
    """
    plain = Path(base, name)
    *folders, last = (*Path(name).parts, ".") if opened else Path(name).parts
    try:
        directory = _Directory(base)
        for folder in folders:
            directory = _Directory(folder, os.O_NOFOLLOW, within=directory)
    except OSError as error:
        error.filename = os.fspath(plain)
        raise
    given = f"/proc/{os.getpid()}/fd/{directory.descriptor}"
    try:
        yield Path(given, last) if os.path.exists(given) else plain
    except OSError as error:
        if isinstance(error.filename, str) and f"{error.filename}/".startswith(f"{given}/"):
            error.filename = f"{plain if opened else plain.parent}{error.filename.removeprefix(given)}"
        raise


@contextlib.contextmanager
def writing_a_save(path: object) -> Iterator[None]:
    """Names what is being saved where the system does not let it be written.

    Raises:
        SnapshotError: an OSError came in the block, which is its cause.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, MultiversoError):  # a deadline, which is told as such
            raise
        why = "it is no directory" if isinstance(error, FileExistsError) else error.strerror or error
        raise SnapshotError(f"{_shown(path)} cannot be written: {why}") from error


def _shown(path: object) -> str:
    """Returns a path of `below` as its directory is called."""
    text = str(path)
    return f"{os.path.realpath(os.path.dirname(text))}/{os.path.basename(text)}" if text.startswith("/proc/") else text


def remove_leftover(temporary: Path) -> None:
    """Removes a temporary file of `write_whole` if its writer is dead."""
    # another user's, gone, still written, or without locks
    with contextlib.suppress(OSError), _open(temporary, os.O_RDWR | os.O_NONBLOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


@contextlib.contextmanager
def locked(path: PathLike, timeout_seconds: float, content: bytes = b"") -> Iterator[bool]:
    """Admits one thread or process at a time, by a lock file that is removed when it is no longer needed.

    Nothing is written to a file that was there before: in a directory to which others may write, any file of this
    user's may have been given this name.

    Args:
        path: the lock file.
        timeout_seconds: how long to wait while another one is in.
        content: what the file holds meanwhile.

    Yields:
        False where nothing can be locked: the directory may not be written to, the file system has no locks, or
        the file is another user's.

    Raises:
        TimeoutError: another one is still in.
    """
    try:
        file = _lock(path, time.monotonic() + timeout_seconds, content)
    except TimeoutError:
        raise
    except OSError:
        yield False
        return
    with file:
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                _remove(path, file)


def read_own(path: PathLike, most_bytes: int = 1 << 20) -> bytes:
    """Returns the content of a file that only this user can have written and can read (mode 0600).

    Raises:
        PermissionError: it belongs to another user, or others may read or write it.
        OSError: it is not there, no plain file (a symbolic link is none), or longer than ``most_bytes``.
    """
    with open_plain(path, os.O_NOFOLLOW) as file:
        status = os.fstat(file.fileno())
        if stat.S_IMODE(status.st_mode) & ~_SECRET_MODE:
            raise _refused(path, f"others may read it (mode {stat.S_IMODE(status.st_mode):04o}; chmod 600 it)")
        _check_own(path, file.fileno(), _SECRET_MODE)
        return _read(file, most_bytes)


def read_plain(path: PathLike, most_bytes: int) -> bytes:
    """Returns a file's content.

    Raises:
        OSError: it is not there, no plain file (a pipe could be waited for without end), or too long.
    """
    with open_plain(path) as file:
        return _read(file, most_bytes)


@contextlib.contextmanager
def open_plain(path: PathLike, flags: int = 0) -> Iterator[BufferedReader]:
    """Opens a file to read it.

    Raises:
        OSError: it is not there, or no plain file (a pipe could be waited for without end).
        ValueError: this is no name of a file.
    """
    flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    path = os.fspath(path)  # a number would be a file that is open here, which would be closed
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "this is not a plain file", path)
        yield file


def sha256_of(path: PathLike) -> str:
    """Returns the SHA-256 of a file's bytes.

    Raises:
        OSError: as `open_plain`.
    """
    found = hashlib.sha256()
    with open_plain(path) as file:
        progress = Progress(f"reading {os.fspath(path)}", os.fstat(file.fileno()).st_size)
        while part := file.read(_READ_BYTES):
            found.update(part)
            progress.add(len(part))
    return found.hexdigest()


def path_of(file: BinaryIO) -> str:
    """Returns a path by which other code opens the very file that is open here, whatever its name leads to by now."""
    return f"/proc/self/fd/{file.fileno()}"


def _check_own(path: PathLike, descriptor: int, mode: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise _refused(path, f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}")
    if _others_write(status):
        raise _refused(path, f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})")
    if stat.S_IMODE(status.st_mode) == mode and not users.look_alike():
        return
    try:
        os.fchmod(descriptor, mode)  # only its owner may, whatever number it is shown as
    except PermissionError as error:
        raise _refused(path, "it belongs to another user (its mode cannot be set)") from error


def _others_write(status: os.stat_result) -> bool:
    writable = status.st_mode & _WRITABLE_BY_OTHERS
    if writable == stat.S_IWGRP and _is_private_group(status.st_gid):
        return False
    return bool(writable)


def _is_private_group(gid: int) -> bool:
    """Returns whether a group is this user's alone, as distributions make one for each user (their umask is 0002)."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _refused(path: PathLike, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"this is not safe from other users: {why}", os.fspath(path))


@contextlib.contextmanager
def _temporary(target: Path, mode: int) -> Iterator[BinaryIO]:
    """Makes a new file beside ``target`` that is locked as long as its writer lives, and removes it at the end."""
    while True:
        path = target.with_name(f".{target.name}.{os.urandom(8).hex()}.tmp")
        with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
            try:
                with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
                    fcntl.flock(file, fcntl.LOCK_EX)
                if not os.fstat(file.fileno()).st_nlink:  # removed as a leftover before it was locked
                    continue
                yield file
                return
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()


def _remove_leftovers(target: Path) -> None:
    """Removes what killed writers of ``target`` have left: files that are not locked."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{16}\.tmp")
    try:
        names = os.listdir(target.parent)
    except PermissionError:  # a directory that may be written to and not be read
        return
    for name in names:
        if pattern.fullmatch(name):
            remove_leftover(target.with_name(name))


def _lock(path: PathLike, deadline: float, content: bytes) -> BinaryIO:
    """Returns a lock file that is locked, new, and the one of that name."""
    while True:
        try:
            file = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            _await_end(path, deadline)
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                file.write(content)
                file.flush()
                return file
        except BlockingIOError:  # who found it there has locked it, to remove it
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _await_end(path: PathLike, deadline: float) -> None:
    """Waits until a lock file's owner is out; removes the file of an owner that has died."""
    try:
        file = _open(path, os.O_RDWR | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _refused(path, "it belongs to another user, or is no plain file")
        _await_lock(file, deadline)
        with contextlib.suppress(FileNotFoundError):
            _remove(path, file)


def _remove(path: PathLike, file: BinaryIO) -> None:
    """Removes a file that is open, if this is its name still."""
    if os.path.samestat(os.lstat(path), os.fstat(file.fileno())):
        os.unlink(path)


def _await_lock(file: BinaryIO, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process or thread still holds this lock", file.name
                ) from None
        time.sleep(_LOOK_SECONDS)


def _open(path: PathLike, flags: int, mode: int = 0) -> BinaryIO:
    """Opens a file to write to it, never what a link leads to. An object: an interrupt at any moment closes it."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, mode))


def _write(file: BinaryIO, pieces: list[memoryview], what: str) -> None:
    nbytes = sum(piece.nbytes for piece in pieces)
    progress = Progress(what, nbytes)
    for piece in pieces:
        for start in range(0, piece.nbytes, _SLICE_BYTES):
            part = piece[start : start + _SLICE_BYTES]
            file.write(part)
            if nbytes >= _LARGE_BYTES:  # what only waits for the disk is not done
                os.fdatasync(file)
            progress.add(part.nbytes)


def _read(file: BinaryIO, most_bytes: int) -> bytes:
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"this has more than {most_bytes} bytes", file.name)
    return content


class _Directory:
    """An open directory, closed when nothing refers to it any more, as a file is: also after an interrupt."""

    descriptor: int

    def __init__(self, place: PathLike, flags: int = 0, within: _Directory | None = None) -> None:
        flags |= os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self.descriptor = os.open(place, flags, dir_fd=None if within is None else within.descriptor)

    def fileno(self) -> int:
        return self.descriptor

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be opened
            os.close(self.descriptor)


def sync_directory(place: PathLike) -> None:
    """Waits until a directory's entries are on the disk, where its file system can tell."""
    with contextlib.suppress(OSError):
        os.fsync(_Directory(place))
