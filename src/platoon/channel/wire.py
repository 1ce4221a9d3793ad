"""The bytes of the two channels: control requests are JSON, minibatches are raw arrays behind a JSON header.

No pickle: nothing that arrives is executed, and no array is made before its dtype is known to be one of plain
memory and its shape to fit the bytes.

Control, worker to controller ``[number, {"worker_id", "req", "req_info"}]``; back ``[number, proof + ({"ok"} |
{"error"})]``, the proof being the first 32 bytes. The number, which nobody can guess, lets a worker that gave up
on an answer ignore it when it comes late; the proof is the answer to it that the job's secret gives.

Data, worker to controller ``[nonce]`` (one credit: it has room for one more minibatch); back ``[proof, header,
array, ...]``, where the header lists shape, dtype and order of each array, and ``[proof, b"null"]`` when there
are no more. The proof is the answer to the nonce that the job's secret gives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from platoon.util import PlatoonError

Array = npt.NDArray[Any]

END_OF_DATA = b"null"
RESERVED = "platoon-"
MOST_REQUEST_BYTES = 32 << 20

# What NumPy has in plain memory: numbers, truth values, times, and strings of a fixed length.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f(?:2|4|8|16)|c(?:8|16|32)|[mM]8(?:\[\w+\])?|[SU][1-9]\d{0,8})")
_OTHER_DTYPE = re.compile(r"(?:bfloat16|float[468]_e\w{2,12}|u?int[124])")
_MOST_DIMENSIONS = 32


def dumps(value: object) -> bytes:
    """Returns a value as JSON; NumPy's numbers and arrays become plain ones.

    Raises:
        PlatoonError: the value cannot be written as JSON.
    """
    try:
        return _encoder.encode(value).encode()
    except (TypeError, ValueError) as error:
        raise PlatoonError(
            "requests and answers must be made of None, bool, int, float, str, lists and dicts", error
        ) from error


def loads(data: bytes) -> Any:
    """Returns the value that `dumps` wrote.

    Raises:
        PlatoonError: the bytes are not JSON.
    """
    try:
        text = data.decode()
        value, end = _decoder.raw_decode(text)
        if end != len(text):
            raise ValueError(f"{len(text) - end} characters too many")
        return value
    except (ValueError, RecursionError) as error:
        raise PlatoonError("a message is not JSON: is something else talking on this port?", error) from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encoder = json.JSONEncoder(default=_plain, separators=(",", ":"))
_decoder = json.JSONDecoder()


def pack_arrays(arrays: Sequence[object] | Array) -> list[Any]:
    """Returns the frames of a minibatch: a header, then each array's memory, without a copy if contiguous.

    Raises:
        PlatoonError: there is no array, or one holds Python objects or records.
    """
    if isinstance(arrays, np.ndarray) and arrays.ndim == 0:
        raise PlatoonError("a minibatch is a list of arrays, or an array whose rows are sent; got one number")
    if len(arrays) == 0:
        raise PlatoonError("a minibatch has at least one array; end_mb() says that there are no more")
    header: list[dict[str, object]] = []
    frames: list[Any] = []
    for item in arrays:
        array = np.asarray(item)
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        if array.dtype.hasobject or array.dtype.names is not None or not _is_plain(dtype):
            raise PlatoonError(f"an array of dtype {array.dtype} cannot be sent; send plain numbers or bytes")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        array = array.T if fortran else np.ascontiguousarray(array).reshape(array.shape)
        shape = array.shape[::-1] if fortran else array.shape
        header.append({"shape": shape, "dtype": dtype, "fortran_order": fortran})
        frames.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
    return [dumps(header), *frames]


def unpack_arrays(frames: Sequence[Any], copy: bool = True) -> list[Array]:
    """Returns the arrays of a received minibatch.

    Args:
        frames: the frames as ZeroMQ gave them (`zmq.Frame`).
        copy: fresh, aligned, writable arrays; otherwise arrays on the received memory, aligned or not.

    Raises:
        PlatoonError: header and frames do not fit each other, or a dtype is none of plain memory.
    """
    header = loads(bytes(frames[0].buffer))
    if not isinstance(header, list) or len(header) != len(frames) - 1:
        raise PlatoonError(f"a minibatch came as {len(frames) - 1} arrays, but its header is {header!r:.200}")
    return [_unpack(entry, frame, copy) for entry, frame in zip(header, frames[1:], strict=True)]


def _unpack(entry: Any, frame: Any, copy: bool) -> Array:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype", "fortran_order"}:
        raise PlatoonError(
            f"an array came with the description {entry!r:.200}; expected shape, dtype and order"
        )
    shape, dtype = shape_named(entry["shape"]), dtype_named(entry["dtype"])
    expected = math.prod(shape) * dtype.itemsize
    if len(frame) != expected:
        raise PlatoonError(f"an array of shape {shape} and {dtype} has {len(frame)} bytes, not {expected}")
    order: Literal["C", "F"] = "F" if entry["fortran_order"] else "C"
    if not expected:
        return np.empty(shape, dtype, order)
    array: Array = np.ndarray(shape, dtype, buffer=frame.buffer, order=order)
    return array.copy(order) if copy else array


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
            raise PlatoonError(
                f"an array came with the dtype {name!r}, which is not known here", error
            ) from error
        if not dtype.hasobject:
            return dtype
    raise PlatoonError(f"an array came with the dtype {name!r:.100}; expected one of plain numbers or bytes")


def _is_plain(name: str) -> bool:
    return _DTYPE.fullmatch(name) is not None or _OTHER_DTYPE.fullmatch(name) is not None
