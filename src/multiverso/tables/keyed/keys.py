"""Keys as users hand them in, and keys from texts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.checks import whole
from multiverso.errors import RowIdError
from multiverso.tables.convert import Array, as_int64, as_numpy

Keys = npt.NDArray[np.int64]


def as_keys(keys: Any) -> Keys:
    """Returns keys as int64, C-contiguous, in their shape.

    Raises:
        RowIdError: no integers, or too large for 64 bits with a sign.
    """
    try:
        array = as_numpy(keys, "keys")
    except ValueError as error:
        raise RowIdError(f"keys must be integers: {error}") from error
    if array.size == 0 and array.dtype.kind in "iuf":
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        hint = "; KeyedTable.add takes (delta, keys)" if array.ndim > 1 and array.dtype.kind == "f" else ""
        raise RowIdError(f"keys must be integers of at most 64 bits; got {array.dtype} of shape {array.shape}{hint}")
    if array.dtype == np.uint64 and array.max() >= 2**63:
        raise RowIdError(f"keys must fit in 64 bits with a sign; got {array.max()}: take view('int64')")
    return as_int64(array)


def keys(names: Any, *, seed: int = 0) -> Keys:
    """Returns a 64-bit key for each name: the same in every run, on every machine and version of Python.

    It is XXH3 (64 bits) of the name's bytes (of a string its UTF-8) as a signed number. Among n different names two
    have the same key, and share a row, with a probability of about n^2 / 2^65: 3e-8 for a million names, 3 % for a
    billion.

    Args:
        names: a sequence of texts or bytes, or a one-dimensional NumPy array of them (fixed-width texts have lost the
            zeros at their ends).
        seed: of the hash, from 0, less than 2^64: another seed gives other keys.

    Returns:
        int64, of shape (len(names),), as `KeyedTable` takes them.

    Raises:
        TypeError: something else than a sequence of texts or bytes.
        ValueError: a text that has no UTF-8 (a lone surrogate), or a seed that is no number of 64 bits.

    Examples:
        >>> import multiverso as mv
        >>> mv.keys(["user:1", b"user:1", "user:2"]).tolist()
        [4276021600403166465, 4276021600403166465, 7611143205425994754]
    """
    from xxhash import xxh3_64_intdigest as digest

    if isinstance(names, str | bytes | bytearray) or not isinstance(names, Iterable):
        raise TypeError(
            f"keys takes a sequence of names, such as keys(['user:1']); got {names!r:.40} ({type(names).__name__})"
        )
    if isinstance(names, np.ndarray):
        if names.ndim != 1:
            raise TypeError(f"keys takes a one-dimensional array of names; got shape {names.shape}")
        names = names.tolist()
    seed = whole(seed, "seed", 0, (1 << 64) - 1)
    found = [name.encode() if isinstance(name, str) else name for name in names]
    if not all(issubclass(kind, bytes) for kind in set(map(type, found))):  # numbers and arrays have bytes to hash, too
        wrong = next(name for name in found if not isinstance(name, bytes))
        raise TypeError(f"names are texts or bytes; got {wrong!r:.80} ({type(wrong).__name__})")
    hashes = np.fromiter(map(digest, found, repeat(seed)), np.uint64, len(found))
    return hashes.view(np.int64)


def summed(keys: Keys, delta: Array, dim: int) -> tuple[Keys, Array]:
    """Returns each different key once, with the sum of its deltas."""
    different, place = np.unique(keys, return_inverse=True)
    if different.size == keys.size:
        return keys, delta
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(different.size))
    total = np.add.reduceat(delta.reshape(-1, dim)[order], starts, axis=0)
    return different, np.ascontiguousarray(total, delta.dtype).reshape(-1)
