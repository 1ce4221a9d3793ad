"""Keeps object code on disk, in a directory that only this user can write to: it is run as code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from multiverso.files import opening as files
from multiverso.saying import say

_LOCK_SECONDS = 300.0
_QUIET_SECONDS = 10.0
_KEPT_SECONDS = 90 * 86400.0
_MOST_BYTES = 64 << 20
_DIGEST_BYTES = 32


@functools.cache
def cache_directory() -> Path | None:
    """Returns the directory of compiled kernels, or None (with one warning) where none can be used.

    ``multiverso`` in the first of ``MULTIVERSO_CACHE_DIR``, ``XDG_CACHE_HOME`` and ``~/.cache`` that is set; if that
    cannot be used, a directory of the user's own beside the temporary files, so that a job's processes share one.
    """
    home = os.environ.get("MULTIVERSO_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    wanted = Path(os.path.expanduser(home)) / "multiverso"
    found, reasons = None, []
    for directory in chain([wanted], _elsewhere()):
        try:
            found = _usable(directory)
            break
        except (OSError, RuntimeError) as error:
            reasons.append(error)
    if reasons:
        warnings.warn(
            f"multiverso cannot keep its compiled kernels in {wanted} ({reasons[0]}), so "
            + (f"it keeps them in {found}" if found else "each process compiles them again")
            + "; set MULTIVERSO_CACHE_DIR to a directory that you alone can write to",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _elsewhere() -> Iterator[Path]:
    """Yields directories for when the usual one cannot be used.

    Another user may have taken any name that can be guessed: these tell when they were made, and the oldest of this
    user's is the one that all find.
    """
    temporary, name = Path(tempfile.gettempdir()), f"multiverso-{os.geteuid()}"
    yield from sorted(temporary.glob(f"{name}-*"))
    with contextlib.suppress(OSError):
        (temporary / f"{name}-{time.time_ns()}").mkdir(0o700)
    yield from sorted(temporary.glob(f"{name}-*"))  # a process that has come at the same time may have made one, too


def _usable(directory: Path) -> Path:
    own = files.own_directory(directory)
    with tempfile.TemporaryFile(dir=own):  # on a disk that cannot be written to, this fails
        return own


def read(name: str) -> bytes | None:
    """Returns what was written under a name, or None: nothing was, or not all of it."""
    directory = cache_directory()
    if directory is None:
        return None
    try:
        content = files.read_own(directory / name, _MOST_BYTES)
    except OSError:
        return None
    return content[_DIGEST_BYTES:] if content[:_DIGEST_BYTES] == _digest(content[_DIGEST_BYTES:]) else None


def write(name: str, code: bytes) -> None:
    """Keeps object code under a name; where it cannot be kept (the disk is full, say), it is not."""
    directory = cache_directory()
    if directory is None:
        return
    with contextlib.suppress(OSError):
        files.write_whole(directory / name, [_digest(code), code], mode=0o600)
        _remove_old(directory, name)


def _digest(code: bytes) -> bytes:
    return hashlib.sha256(code).digest()


def forget(name: str) -> None:
    """Removes what was written under a name."""
    directory = cache_directory()
    if directory is not None:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _remove_old(directory: Path, name: str) -> None:
    """Removes the same kernels of other versions that were compiled long ago."""
    for path in directory.glob(f"{name.rpartition('-')[0]}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                path.unlink()


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Lets one process of this machine in, where the directory lets us lock; the kernel frees it when one dies.

    It only saves work: after five minutes a process enters all the same. One that waits for long says so, as the other
    may be stopped, or write to another terminal.
    """
    directory = cache_directory()
    with contextlib.ExitStack() as stack:
        if directory is not None:
            lock = directory / f"{what}.lock"
            try:
                stack.enter_context(files.locked(lock, _QUIET_SECONDS))
            except TimeoutError:
                minutes = f"{_LOCK_SECONDS / 60:g} minutes"
                say(f"waiting for another process that compiles kernels ({what}), for {minutes} at most")
                with contextlib.suppress(TimeoutError):
                    stack.enter_context(files.locked(lock, _LOCK_SECONDS))
        yield
