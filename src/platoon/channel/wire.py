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
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from platoon.util import PlatoonError

Array = npt.NDArray[Any]

RESERVED = "platoon-"
MOST_REQUEST_BYTES = 32 << 20

# What NumPy has in plain memory: numbers, truth values, times, and strings of a fixed length.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[mM]8(?:\[\w+\])?|[SU][1-9]\d{0,8})")
_OTHER_DTYPE = re.compile(r"(?:bfloat16|float[468]_e\w{2,12}|u?int[124])")
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
        if not (_DTYPE.fullmatch(dtype) or _OTHER_DTYPE.fullmatch(dtype)):
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
            file.seek(begin)
            view = _bytes_of(part)
            while view:  # one call takes 2 GiB at most
                view = view[file.write(view) :]
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
    try:
        (descriptor,) = descriptors
        described = msgspec.convert(header, list[_Described])
        dtypes = [_dtype_named(each.dtype) for each in described]
        begins = [0]
        for each, dtype in zip(described, dtypes, strict=True):
            begins.append(begins[-1] + _room_of(math.prod(each.shape) * dtype.itemsize))
        size = os.fstat(descriptor).st_size
        if size != begins[-1]:
            raise ValueError(f"the memory has {size} bytes, and {begins[-1]} by the header")
        memory = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE) if size and not copy else None
        arrays: list[Array] = []
        for begin, each, dtype in zip(begins, described, dtypes, strict=False):
            order: Literal["C", "F"] = "F" if each.fortran_order else "C"
            if memory is not None and 0 not in each.shape:
                arrays.append(np.ndarray(each.shape, dtype, memory, begin, order=order))
                continue
            arrays.append(np.empty(each.shape, dtype, order))
            _read(descriptor, _bytes_of(arrays[-1].T if each.fortran_order else arrays[-1]), begin)
    except (msgspec.ValidationError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise PlatoonError(
            f"a minibatch came in {len(descriptors)} pieces of memory, with the header {header!r:.200}", error
        ) from error
    return arrays


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    """One array of a minibatch."""

    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 62)]], Meta(max_length=32)]
    dtype: str
    fortran_order: bool


def _room_of(count: int) -> int:
    """Returns how many bytes of a minibatch's memory an array takes: each begins where any dtype may."""
    return -(-count // _ALIGNED) * _ALIGNED


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size and array.itemsize else memoryview(b"")


def _read(descriptor: int, view: memoryview, begin: int) -> None:
    """Reads all of it, where one call moves 2 GiB at most; the position in the file is the sender's, too."""
    while view:
        moved = os.preadv(descriptor, [view], begin)
        if not moved:
            raise ValueError("its memory is shorter than it was")
        view, begin = view[moved:], begin + moved


def _dtype_named(name: str) -> np.dtype[Any]:
    """Returns the dtype that a message names: never one of Python objects."""
    dtype: np.dtype[Any]
    if _DTYPE.fullmatch(name):
        dtype = np.dtype(name)
    elif _OTHER_DTYPE.fullmatch(name):
        import ml_dtypes  # bfloat16 and its kin are NumPy dtypes once this is imported

        dtype = np.dtype(getattr(ml_dtypes, name))
    else:
        raise TypeError(f"{name!r:.100} is no dtype of plain numbers or bytes")
    return dtype
