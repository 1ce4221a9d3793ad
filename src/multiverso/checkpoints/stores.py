"""Where a job's state is kept: a directory, or whatever fsspec has a file system for (S3, GCS, HDFS, ...).

Names are relative, with slashes. A file is written whole or not at all on a disk; elsewhere a half-written one is
noticed by its hash, and the one that counts, the manifest, is written twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from multiverso.errors import SnapshotError
from multiverso.files.opening import (
    Buffer,
    below,
    locked,
    open_plain,
    read_own,
    read_plain,
    sync_directory,
    write_whole,
)

PathLike = str | os.PathLike[str]
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://")
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_LONGEST_RECORD = 1 << 26
_LONGEST_JOB = 4096
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/]*@")


def open_store(place: PathLike) -> Store:
    """Returns the store of a directory, or of a URL such as ``s3://bucket/run``.

    Raises:
        TypeError: it is neither.
        ImportError: the URL needs fsspec, or what it uses for this kind of URL.
        ValueError: this kind of URL is unknown, or it came as a `pathlib.Path`, which makes one slash of two.
    """
    if not isinstance(place, str | os.PathLike):
        raise TypeError(f"a directory or a URL to save in; got {place!r}")
    text = os.fspath(place)
    if text.startswith("file://"):
        return Directory(Path(text.removeprefix("file://")))
    if isinstance(place, PurePath) and _LOST_SLASH.match(text):
        raise ValueError(f"{text!r} was a URL before it became a Path: give it as a string")
    return Remote(text) if _URL.match(text) else Directory(Path(text))


def make_usable(store: Store) -> None:
    """Makes a store's own folder, if it is not there.

    Raises:
        SnapshotError: it cannot be made.
    """
    try:
        store.make()
    except (OSError, ValueError) as error:
        raise SnapshotError(f"nothing can be saved in {store}: {error}") from error


class Directory:
    """A directory of a file system that all workers see. Every method may raise OSError."""

    def __init__(self, place: Path) -> None:
        self._name = str(place)
        self._place = place.absolute()  # the program may go elsewhere meanwhile

    def __str__(self) -> str:
        return self._name

    def write(self, name: str, content: Buffer) -> str:
        """Writes a file and returns the SHA-256 of its bytes, once it is as safe as the store makes it."""
        self.replace(name, content)
        return hashlib.sha256(content).hexdigest()

    def replace(self, name: str, content: Buffer) -> None:
        """Writes the file that counts, in place of the one before."""
        with below(self._place, name) as path:
            write_whole(path, content)

    def versions(self, name: str) -> Iterator[bytes]:
        """Returns what `replace` wrote last, and what else may be it where that is half written."""
        with contextlib.suppress(FileNotFoundError), below(self._place, name) as path:
            yield read_plain(path, _LONGEST_RECORD)

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """Returns a path to read a file by."""
        with below(self._place, name) as path:
            yield path

    @contextlib.contextmanager
    def folder(self, name: str, make: bool = True) -> Iterator[Path]:
        """Gives a folder to write files into; they are kept under this name once it is left without error.

        Args:
            name: the folder's.
            make: it is new; False: it is there already, and what is written is on the disk.
        """
        if make:
            with below(self._place, name) as path:
                path.mkdir()
        with below(self._place, name, opened=True) as path:
            yield path
            for parent, _, names in os.walk(path) if make else ():  # others may write to one that was there
                for each in names:
                    with open_plain(Path(parent, each)) as file:
                        os.fsync(file.fileno())
                sync_directory(parent)

    def make(self, name: str = "") -> None:
        """Makes a folder; the store's own, and those above, where none is named."""
        self._place.mkdir(parents=True, exist_ok=True)
        for folder in [*reversed(PurePath(name).parents), PurePath(name)][1:]:
            with below(self._place, folder) as path:
                path.mkdir(exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """Returns what is in a folder; nothing where there is none."""
        try:
            return sorted(os.listdir(self._place / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def link(self, name: str, to: str) -> bool:
        """Gives a file the content of another one, if that exists and this store can."""
        try:
            with below(self._place, to) as there, below(self._place, name) as here:
                os.link(there, here, follow_symlinks=False)
        except OSError:
            return False
        return True

    def remove(self, folder: str) -> None:
        """Removes a folder and all that is in it, as far as that goes."""
        shutil.rmtree(self._place / folder, ignore_errors=True)

    @contextlib.contextmanager
    def alone(self, patience_seconds: float = 0.0, job: str = "") -> Iterator[None]:
        """Keeps other jobs out meanwhile, where there are locks; a process that dies loses its lock.

        Args:
            patience_seconds: how long to wait for another job.
            job: what this one is called: another of its workers may keep the others out already.
        """
        lock = self._place / ".lock"

        def is_ours() -> bool:
            with contextlib.suppress(OSError):
                return bool(job) and read_own(lock, _LONGEST_JOB) == job.encode()
            return False

        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(lock, 0.0 if is_ours() else patience_seconds, job.encode()))
            except TimeoutError:
                if not is_ours():
                    raise SnapshotError(
                        f"another job is saving to {self._place}; give each job a directory of its own"
                    ) from None
            yield

    def sync(self, folder: str) -> None:
        """Waits until a folder's entries are on the disk."""
        sync_directory(self._place / folder)

    def path(self, folder: str) -> Path | None:
        """Returns a folder's path, where this is a directory."""
        return self._place / folder


class Remote:
    """An object store, or another file system that fsspec reaches. Nothing is locked there, and nothing linked.

    Its methods are those of `Directory`.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(
                f'{_shown(url)} is reached through fsspec: pip install "multiverso[fsspec]", and the package for its '
                "kind of URL (s3fs, gcsfs, adlfs, pyarrow for hdfs); a directory needs neither"
            ) from error
        self._url = url.rstrip("/")
        self._system: Any
        self._system, self._root = url_to_fs(self._url)
        self._root = self._root.rstrip("/")

    def __str__(self) -> str:
        return _shown(self._url)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def write(self, name: str, content: Buffer) -> str:
        self._system.pipe_file(self._at(name), bytes(content))
        return hashlib.sha256(content).hexdigest()

    def replace(self, name: str, content: Buffer) -> None:
        for each in (f"{name}.new", name):  # killed in the middle of one, the other one is whole
            self.write(each, content)

    def versions(self, name: str) -> Iterator[bytes]:
        for each in (name, f"{name}.new"):
            with contextlib.suppress(FileNotFoundError):
                yield self._system.cat_file(self._at(each))

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="multiverso-") as folder:
            path = Path(folder, "file")
            self._system.get_file(self._at(name), str(path))
            yield path

    @contextlib.contextmanager
    def folder(self, name: str, make: bool = True) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="multiverso-") as folder:
            yield Path(folder)
            for parent, _, names in os.walk(folder):
                for each in names:
                    path = Path(parent, each)
                    self._system.put_file(str(path), self._at(f"{name}/{path.relative_to(folder).as_posix()}"))

    def make(self, name: str = "") -> None:
        self._system.makedirs(self._at(name), exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def link(self, name: str, to: str) -> bool:
        return False

    def remove(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            self._system.rm(self._at(folder), recursive=True)

    @contextlib.contextmanager
    def alone(self, patience_seconds: float = 0.0, job: str = "") -> Iterator[None]:
        yield

    def sync(self, folder: str) -> None:
        pass

    def path(self, folder: str) -> Path | None:
        return None


Store = Directory | Remote
"""Files in folders."""


def _shown(url: str) -> str:
    """Returns a URL as errors and lines on standard error may have it: without its password."""
    return _PASSWORD.sub(r"\1:...@", url)
