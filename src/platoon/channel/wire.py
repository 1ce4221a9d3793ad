"""The bytes of the two channels: control requests are JSON, minibatches are raw arrays behind a JSON header.

No pickle: nothing that arrives is executed.

Control, worker to controller ``[number, {"worker_id", "req", "req_info"}]``; back ``[number, {"ok"} |
{"error"}]``. The number lets a worker that gave up on an answer ignore it when it comes late.

Data, worker to controller ``[]`` (one credit: it has room for one more minibatch); back ``[header, array,
...]``, where the header lists shape, dtype and order of each array, and ``[b"null"]`` when there are no more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from platoon.util import PlatoonError

Array = npt.NDArray[Any]

END_OF_DATA = b"null"
RESERVED = "platoon-"


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
    except ValueError as error:
        raise PlatoonError("a message is not JSON: is something else talking on this port?", error) from error


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encoder = json.JSONEncoder(default=_plain, separators=(",", ":"))
_decoder = json.JSONDecoder()


def pack_arrays(arrays: Sequence[object]) -> list[Any]:
    """Returns the frames of a minibatch: a header, then each array's memory, without a copy if contiguous.

    Raises:
        PlatoonError: there is no array, or one holds Python objects or records.
    """
    if not arrays:
        raise PlatoonError("a minibatch has at least one array; end_mb() says that there are no more")
    header: list[dict[str, object]] = []
    frames: list[Any] = []
    for item in arrays:
        array = np.asarray(item)
        if array.dtype.hasobject or array.dtype.names is not None:
            raise PlatoonError(f"an array of dtype {array.dtype} cannot be sent; send plain numbers or bytes")
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        array = array.T if fortran else np.ascontiguousarray(array).reshape(array.shape)
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        shape = array.shape[::-1] if fortran else array.shape
        header.append({"shape": shape, "dtype": dtype, "fortran_order": fortran})
        frames.append(array.reshape(-1).view(np.uint8).data if array.size and array.itemsize else b"")
    return [dumps(header), *frames]


def unpack_arrays(frames: Sequence[Any], copy: bool = True) -> list[Array]:
    """Returns the arrays of a received minibatch.

    Args:
        frames: the frames as ZeroMQ gave them (`zmq.Frame`).
        copy: fresh, aligned, writable arrays; otherwise arrays on the received memory, aligned or not.

    Raises:
        PlatoonError: header and frames do not fit each other.
    """
    header = loads(bytes(frames[0].buffer))
    if not isinstance(header, list) or len(header) != len(frames) - 1:
        raise PlatoonError(f"a minibatch came as {len(frames) - 1} arrays, but its header is {header!r:.200}")
    arrays: list[Array] = []
    for entry, frame in zip(header, frames[1:], strict=True):
        shape, dtype = tuple(entry["shape"]), _dtype(entry["dtype"])
        expected = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if len(frame) != expected:
            raise PlatoonError(
                f"an array of shape {shape} and {dtype} has {len(frame)} bytes, not {expected}"
            )
        order: Literal["C", "F"] = "F" if entry["fortran_order"] else "C"
        if not expected:
            arrays.append(np.empty(shape, dtype, order))
            continue
        array: Array = np.ndarray(shape, dtype, buffer=frame.buffer, order=order)
        arrays.append(array.copy(order) if copy else array)
    return arrays


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its kin are NumPy dtypes once this is imported

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
