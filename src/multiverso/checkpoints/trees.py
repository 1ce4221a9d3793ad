"""State as trees: dictionaries, lists and tuples of numbers, strings and arrays, as JSON and safetensors.

No pickle: reading a file runs nothing, and what a file holds can be listed by other tools. What is not a plain
state (functions, objects, named tuples) is refused by its place in the tree.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import SnapshotError
from multiverso.files.opening import write_whole
from multiverso.files.parsing import tensors

Array = npt.NDArray[Any]
Tree = Any
"""None, bool, int, float, str, bytes, arrays and scalars of NumPy, tensors of torch, arrays of JAX; and lists,
tuples and dictionaries of trees."""

_FORMAT = "multiverso state 1"
_PLAIN = (type(None), bool, int, float, str)
_KEYS = (bool, int, float, str)
_STORED = frozenset(
    ["bool", "float16", "float32", "float64"] + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
ACCEPTED = (
    "numbers, strings, bytes, None, arrays of NumPy or JAX, tensors of torch, and lists, tuples and dictionaries of "
    "these"
)


def as_bytes(tree: Tree) -> bytes:
    """Returns a tree as the content of a file.

    Raises:
        TypeError: something in it is not plain state; the message says where.
    """
    from safetensors.numpy import save

    skeleton, arrays = _parts(tree)
    content: bytes = save(arrays, metadata={_FORMAT: skeleton})
    return content


def digest(tree: Tree) -> str:
    """Returns a hash of a tree's content, without a copy of its arrays.

    Raises:
        TypeError: as for `as_bytes`.
    """
    skeleton, arrays = _parts(tree)
    found = hashlib.blake2b(skeleton.encode(), digest_size=16)
    for array in arrays.values():
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _parts(tree: Tree) -> tuple[str, dict[str, Array]]:
    """Returns a tree's shape as JSON, and its arrays."""
    arrays: dict[str, Array] = {}
    try:
        return json.dumps(_pack(tree, "", arrays)), arrays
    except RecursionError:
        raise TypeError("state is nested too deeply, or contains itself") from None


def write_tree(path: Path, tree: Tree) -> None:
    """Writes a tree to a file, whole or not at all.

    Args:
        path: of a safetensors file; replaced if it is there.
        tree: nested dictionaries, lists and tuples of numbers, texts, bytes, None, arrays and tensors.

    Raises:
        TypeError: it holds something else; the message says where. Nothing was written.
        OSError: it cannot be written; what was there before stays.
    """
    write_whole(path, as_bytes(tree))


def read_tree(path: Path) -> Tree:
    """Returns the tree that a file holds; arrays are writable, tensors lie on the CPU, JAX's become NumPy's.

    Raises:
        SnapshotError: it cannot be read, or is something else.
    """
    with tensors(path, "saved state") as (header, read):
        if _FORMAT not in header:
            raise SnapshotError(f"{path} is a safetensors file, but not saved state of multiverso")
        return _unpack(json.loads(header[_FORMAT]), read())


def _pack(value: Any, where: str, arrays: dict[str, Array]) -> Any:
    """Returns what JSON can carry of it; arrays go into ``arrays``. Lists stand for themselves."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_pack(item, f"{where}[{index}]", arrays) for index, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": _pack(list(value), where, arrays)}
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in _KEYS:
                raise TypeError(f"{where} has the key {key!r}: keys are strings and numbers")
        return {
            "dict": [
                [key, _pack(item, f"{where}[{key!r}]" if where else str(key), arrays)] for key, item in value.items()
            ]
        }
    if kind is bytes:
        return {"bytes": value.hex()}
    library = kind.__module__.partition(".")[0]
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.ma.MaskedArray):
        return {"array" if isinstance(value, np.ndarray) else "scalar": _store(value, where, arrays)}
    if library == "torch" and hasattr(value, "untyped_storage"):
        return {"tensor": _store_tensor(value, where, arrays)}
    if library in ("jax", "jaxlib") and hasattr(value, "dtype") and hasattr(value, "__array__"):
        return {"array": _store(_from_jax(value, where), where, arrays)}
    raise TypeError(f"{where} is {value!r:.80} ({kind.__module__}.{kind.__name__}); state is made of {ACCEPTED}")


def _store(value: Any, where: str, arrays: dict[str, Array]) -> list[Any]:
    array = np.ascontiguousarray(value)
    narrow = array.dtype.type.__module__ == "ml_dtypes"  # bfloat16 and its like, of kind V
    if array.dtype.kind not in "biufc" and not narrow:
        raise TypeError(f"{where} is an array of {array.dtype}; state is made of arrays of numbers")
    array = array if narrow else array.astype(array.dtype.newbyteorder("="), copy=False)
    name = f"{len(arrays)} {where}"
    arrays[name] = array if array.dtype.name in _STORED else array.reshape(-1).view(np.uint8)
    return [name, array.dtype.name, list(np.shape(value))]


def _store_tensor(value: Any, where: str, arrays: dict[str, Array]) -> list[Any]:
    import torch

    if type(value.data) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"{where} is a {type(value).__name__} ({value.layout}); state is made of dense tensors")
    dtype = str(value.dtype).removeprefix("torch.")
    tensor = value.detach().cpu().contiguous()
    flat = tensor.numpy() if dtype in _STORED else tensor.reshape(-1).view(torch.uint8).numpy()
    name = _store(flat, where, arrays)[0]
    return [name, dtype, list(value.shape)]


def _from_jax(value: Any, where: str) -> Array:
    try:
        return np.asarray(value)
    except TypeError as error:
        raise TypeError(f"{where} is {value.dtype}: {error}; of a key, save jax.random.key_data(key)") from error


def _unpack(value: Any, arrays: dict[str, Array]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_unpack(content, arrays))
    if kind == "dict":
        return {key: _unpack(item, arrays) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    name, dtype, shape = content
    if kind == "tensor":
        import torch

        tensor = torch.from_numpy(_owned(arrays[name]))
        return (tensor if dtype in _STORED else tensor.view(getattr(torch, dtype))).reshape(shape)
    array = _owned(arrays[name])
    array = (array if dtype in _STORED else array.view(_dtype(dtype))).reshape(shape)
    return array[()] if kind == "scalar" else array


def _owned(array: Array) -> Array:
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its like

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
