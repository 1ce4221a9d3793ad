"""Versions as safetensors files (https://github.com/huggingface/safetensors), without a copy in between."""

from __future__ import annotations

import json
import math
import mmap
import os
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from multiverso.errors import SnapshotError
from multiverso.files import opening
from multiverso.publications.tensors import Layout, Leaf

PathLike = str | os.PathLike[str]
_DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2), "I16": ("int16", 2),
    "U32": ("uint32", 4), "I32": ("int32", 4), "U64": ("uint64", 8), "I64": ("int64", 8), "F16": ("float16", 2),
    "BF16": ("bfloat16", 2), "F32": ("float32", 4), "F64": ("float64", 8), "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
}  # fmt: skip
_CODES = {name: code for code, (name, _) in _DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, as the format has it
_ALIGNED = 8


class _Entry(msgspec.Struct):
    """What a file's header says of one tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def save(path: PathLike, memory: npt.NDArray[np.uint8], layout: Layout, metadata: dict[str, str]) -> None:
    """Writes the tensors of a slot to a file, whole or not at all.

    A tensor with several names is written under the first; the metadata have the others, as is usual.

    Raises:
        SnapshotError: it cannot be written, or a tensor has a dtype that the format does not know.
    """
    header: dict[str, Any] = {}
    pieces: list[memoryview] = []
    end = 0
    for tensor in layout.tensors:
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise SnapshotError(f"a safetensors file has no {tensor.dtype} ({tensor}): {', '.join(_CODES)}")
        header[tensor.names[0]] = {"dtype": code, "shape": tensor.shape, "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
        pieces.append(memory[tensor.offset : tensor.offset + tensor.nbytes].data)
    same = {other: tensor.names[0] for tensor in layout.tensors for other in tensor.names[1:]}
    text = json.dumps({"__metadata__": {**metadata, **same}, **header}).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with opening.writing_a_save(path):
        opening.write_whole(path, [len(text).to_bytes(8, "little") + text, *pieces])


def leaves_in(path: PathLike) -> dict[str, Leaf]:
    """Returns the tensors of a file as they lie in it, mapped into memory; several names of one tensor share it.

    Raises:
        SnapshotError: it is no safetensors file, or a damaged one.
    """
    try:
        with opening.open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise SnapshotError(f"{os.fspath(path)!r} is no safetensors file: its header would have {length} bytes")
            text = file.read(length)
            memory = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)[8 + length :]
    except OSError as error:
        raise SnapshotError(f"{os.fspath(path)!r} cannot be read: {error.strerror or error}") from error
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
        leaves = {n: _leaf(n, msgspec.json.decode(entry, type=_Entry), memory) for n, entry in header.items()}
    except (msgspec.DecodeError, UnicodeError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{os.fspath(path)!r} is a damaged safetensors file: {error}") from error
    return leaves | {name: leaves[first] for name, first in metadata.items() if first in leaves and name not in leaves}


def _leaf(name: str, entry: _Entry, memory: npt.NDArray[np.uint8]) -> Leaf:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has a dtype that is not known: {entry}")
    dtype, itemsize = _DTYPES[entry.dtype]
    first, end = entry.data_offsets
    nbytes = math.prod(entry.shape) * itemsize
    if any(extent < 0 for extent in entry.shape) or not 0 <= first <= end <= memory.size or end - first != nbytes:
        raise ValueError(f"tensor {name!r} does not lie in it: {entry}")
    part = memory[first:end]
    address = part.__array_interface__["data"][0]
    return Leaf(dtype, tuple(entry.shape), nbytes, (address, dtype, *entry.shape), address, part)
