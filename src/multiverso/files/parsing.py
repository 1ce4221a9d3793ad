"""Reads what was saved: safetensors files and JSON records, which may come from strangers.

Whatever is not as it should be is a `SnapshotError` that names the file, and nothing that is put in a file's place (a
pipe, a device) can make a reader wait.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from multiverso.errors import SnapshotError
from multiverso.files import opening as files
from multiverso.saying import Progress

T = TypeVar("T")
_LONGEST_RECORD = 1 << 26
_LARGE_BYTES, _SLICE_BYTES = 1 << 30, 1 << 22

# What records are made of. A file's name is one below the folder of its record, and goes no way up.
FileName = Annotated[str, Meta(min_length=1, max_length=1024, pattern=r"\A(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\x00]+\Z")]
FileNameOrNone = Annotated[str, Meta(max_length=1024, pattern=r"\A(?!/)(?!(?:.*/)?\.\.(?:/|\Z))[^\x00]*\Z")]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[int, Meta(ge=1, lt=1 << 31)]


class _Format(msgspec.Struct):
    format: Any = ""


def parse(content: bytes | str, schema: type[T], path: object, what: str, format: str | None = None) -> T:
    """Returns a JSON record as its schema has it.

    Args:
        content: the text.
        schema: a `msgspec.Struct`.
        path: where it is from, for errors.
        what: what it should be, in words.
        format: what it has to say of its format.

    Raises:
        SnapshotError: it is something else.
    """
    try:
        if format is not None:
            found = msgspec.json.decode(content, type=_Format).format
            if found != format:
                raise SnapshotError(f"{path} is not {what}: its format is {found!r:.80}; expected {format!r}")
        return msgspec.json.decode(content, type=schema)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise SnapshotError(f"{path} cannot be read as {what}: {error}") from error


def read_record(path: files.PathLike, schema: type[T], what: str, format: str | None = None) -> T:
    """Returns the JSON record in a file; see `parse`.

    Args:
        path, schema, what, format: as for `parse`.

    Raises:
        SnapshotError: there is none, or something else.
    """
    try:
        content = files.read_plain(path, _LONGEST_RECORD)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path} cannot be read as {what}: {error}") from error
    return parse(content, schema, path, what, format)


def _bring_into_memory(file: BinaryIO, path: files.PathLike) -> None:
    """Reads a large file once, where that can be said how far it is; who reads it then finds it in the page cache."""
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes < _LARGE_BYTES:
        return
    progress, buffer = Progress(f"reading {path}", nbytes), bytearray(_SLICE_BYTES)
    while got := file.readinto(buffer):  # type: ignore[attr-defined]
        progress.add(got)


@contextlib.contextmanager
def tensors(
    path: files.PathLike, what: str
) -> Iterator[tuple[dict[str, str], Callable[[], dict[str, npt.NDArray[Any]]]]]:
    """Opens a safetensors file; gives its metadata, and what reads its arrays.

    Args:
        path: the file.
        what: what it should be, in words.

    Raises:
        SnapshotError: it cannot be read, or something in the block raised.
    """
    from safetensors import safe_open

    try:
        # by its descriptor: what is opened is what was looked at
        with files.open_plain(path) as plain, safe_open(files.path_of(plain), framework="numpy") as file:

            def read() -> dict[str, npt.NDArray[np.generic]]:
                _bring_into_memory(plain, path)
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

            yield file.metadata() or {}, read
    except (SnapshotError, MemoryError):
        raise
    except Exception as error:  # of whatever its text makes a parser raise
        raise SnapshotError(f"{path} cannot be read as {what}: {error}") from error
