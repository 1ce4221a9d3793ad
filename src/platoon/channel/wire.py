"""What goes over the two channels: control requests are JSON, minibatches are raw arrays beside a JSON header.

No pickle: nothing that arrives is executed, and no array is made before its dtype is known to be one of plain
memory and its shape to fit the bytes.

Each message is one of `multiverso.wire.messages`. Control, worker to controller ``{"do": "ask", "query"}``, the query
being JSON of ``{"req", "req_info"}``; back ``{"answer"}``, JSON too, or ``{"failed"}``, a text.

Data, worker to controller ``{"do": "grant", "room"}``: it has room for so many more minibatches; with ``"received"`` it
has got one, and with ``"kept"`` it continues using its memory. Back ``{"arrays"}``, the shape, dtype and order of each,
and a descriptor of the memory where they lie; or ``{"end"}`` when there are no more.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from platoon.util import PlatoonError

Array = npt.NDArray[Any]

RESERVED = "platoon-"
MOST_REQUEST_BYTES = 32 << 20

# What NumPy has in plain memory: numbers, truth values, times, and strings of a fixed length.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[mM]8(?:\[\w+\])?|[SU][1-9]\d{0,8})")
_OTHER_DTYPE = re.compile(r"(?:bfloat16|float[468]_e\w{2,12}|u?int[124])")
_MOST_DIMENSIONS = 32
_ALIGNED = 64


def socket_name(channel: str, port: int) -> str:
    """Returns the name of the Unix socket that is a controller's port, ``"control"`` or ``"data"``."""
    return f"platoon-{os.geteuid()}-{channel}-{port}"


def dumps(value: object) -> str:
    """Returns a value as JSON; NumPy's numbers and arrays become plain ones.

    Raises:
        PlatoonError: the value cannot be written as JSON.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError) as error:
        raise PlatoonError(
            "requests and answers must be made of None, bool, int, float, str, lists and dicts", error
        ) from error


def loads(text: str) -> Any:
    """Returns the value that `dumps` wrote.

    Raises:
        PlatoonError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlatoonError("a message is not JSON: is something else talking on this port?", error) from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encoder = json.JSONEncoder(default=_plain, separators=(",", ":"))


@dataclass(frozen=True, eq=False)
class Minibatch:
    """A minibatch to be sent.

    Attributes:
        header: shape, dtype and order of each array.
        file: the memory where they lie, one after another.
    """

    header: list[dict[str, object]]
    file: FileIO

    def close(self) -> None:
        """Frees the memory, once no other process has it."""
        self.file.close()


def pack_arrays(arrays: Sequence[object] | Array, spare: list[FileIO]) -> Minibatch:
    """Returns a minibatch, with a copy of the arrays.

    Args:
        arrays: what it has.
        spare: unused memory; one of these is taken, if there is any.

    Raises:
        PlatoonError: there is no array, or one holds Python objects or records; or there is no memory.
    """
    if isinstance(arrays, np.ndarray) and arrays.ndim == 0:
        raise PlatoonError("a minibatch is a list of arrays, or an array whose rows are sent; got one number")
    if len(arrays) == 0:
        raise PlatoonError("a minibatch has at least one array; end_mb() says that there are no more")
    header: list[dict[str, object]] = []
    parts: list[Array] = []
    for item in arrays:
        array = np.asarray(item)
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        if array.dtype.hasobject or array.dtype.names is not None or not _is_plain(dtype):
            raise PlatoonError(f"an array of dtype {array.dtype} cannot be sent; send plain numbers or bytes")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        header.append({"shape": array.shape, "dtype": dtype, "fortran_order": fortran})
        parts.append(array.T if fortran else np.ascontiguousarray(array))
    try:
        file = spare.pop() if spare else FileIO(os.memfd_create("platoon-minibatch", os.MFD_CLOEXEC), "r+")
    except OSError as error:
        raise PlatoonError("there is no descriptor for another minibatch (ulimit -n)", error) from error
    batch = Minibatch(header, file)
    try:
        begin = 0
        for part in parts:
            _all_of(os.pwrite, file.fileno(), _bytes_of(part), begin)
            begin += _room_of(part.nbytes)
        file.truncate(begin)
    except BaseException as error:
        batch.close()
        if isinstance(error, OSError):
            raise PlatoonError("there is no memory for another minibatch", error) from error
        raise
    return batch


def unpack_arrays(header: object, descriptors: Sequence[int], copy: bool = True) -> list[Array]:
    """Returns the arrays of a received minibatch.

    Args:
        header: what came with it.
        descriptors: its memory; the caller closes it.
        copy: fresh arrays; otherwise arrays on the memory itself; changes stay in this process.

    Raises:
        PlatoonError: header and memory do not fit each other, or a dtype is none of plain memory.
    """
    if not isinstance(header, list) or len(descriptors) != 1:
        raise PlatoonError(
            f"a minibatch came in {len(descriptors)} pieces of memory, and its header is {header!r:.200}"
        )
    described = [_described(entry) for entry in header]
    begins = [0]
    for shape, dtype, _ in described:
        begins.append(begins[-1] + _room_of(math.prod(shape) * dtype.itemsize))
    size = os.fstat(descriptors[0]).st_size
    if size != begins[-1]:
        raise PlatoonError(f"a minibatch has {size} bytes, and {begins[-1]} by its header: {header!r:.200}")
    memory = mmap.mmap(descriptors[0], size, mmap.MAP_PRIVATE) if size and not copy else None
    arrays: list[Array] = []
    for begin, (shape, dtype, order) in zip(begins, described, strict=False):
        if memory is not None and 0 not in shape:
            arrays.append(np.ndarray(shape, dtype, memory, begin, order=order))
            continue
        arrays.append(np.empty(shape, dtype, order))
        _all_of(_read_into, descriptors[0], _bytes_of(arrays[-1].T if order == "F" else arrays[-1]), begin)
    return arrays


def _described(entry: object) -> tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"]]:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype", "fortran_order"}:
        raise PlatoonError(f"an array came with the description {entry!r:.200}; expected shape, dtype and order")
    return shape_named(entry["shape"]), dtype_named(entry["dtype"]), "F" if entry["fortran_order"] else "C"


def _room_of(count: int) -> int:
    """Returns how many bytes of a minibatch's memory an array takes: each begins where any dtype may."""
    return -(-count // _ALIGNED) * _ALIGNED


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size and array.itemsize else memoryview(b"")


def _read_into(descriptor: int, view: memoryview, begin: int) -> int:
    return os.preadv(descriptor, [view], begin)


def _all_of(move: Callable[[int, memoryview, int], int], descriptor: int, view: memoryview, begin: int) -> None:
    """Reads or writes all of it, where one call moves 2 GiB at most."""
    while view:
        moved = move(descriptor, view, begin)
        if not moved:
            raise PlatoonError("a minibatch's memory is shorter than it was")
        view, begin = view[moved:], begin + moved


def shape_named(shape: Any) -> tuple[int, ...]:
    """Returns the shape that a message has.

    Raises:
        PlatoonError: it is not a list of at most 32 whole numbers from 0 to 2^62.
    """
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(length) is int and 0 <= length <= 1 << 62 for length in shape)
        or math.prod(max(1, length) for length in shape) > 1 << 62
    ):
        raise PlatoonError(f"an array came with the shape {shape!r:.200}; expected a list of lengths")
    return tuple(shape)


def dtype_named(name: Any) -> np.dtype[Any]:
    """Returns the dtype that a message names.

    Raises:
        PlatoonError: its elements are not plain memory: never an array of Python objects.
    """
    dtype: np.dtype[Any]
    if isinstance(name, str) and _is_plain(name):
        try:
            if _DTYPE.fullmatch(name):
                dtype = np.dtype(name)
            else:
                import ml_dtypes  # bfloat16 and its kin are NumPy dtypes once this is imported

                dtype = np.dtype(getattr(ml_dtypes, name))
        except (TypeError, AttributeError, ImportError) as error:
            raise PlatoonError(f"an array came with the dtype {name!r}, which is not known here", error) from error
        if not dtype.hasobject:
            return dtype
    raise PlatoonError(f"an array came with the dtype {name!r:.100}; expected one of plain numbers or bytes")


def _is_plain(name: str) -> bool:
    return _DTYPE.fullmatch(name) is not None or _OTHER_DTYPE.fullmatch(name) is not None
