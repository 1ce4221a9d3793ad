"""What has changed between two versions of a tensor, without a loss: positions, and the bits that differ.

After a step of a small learning rate most of the bits of 16-bit weights are the same (Miahi and Belilovsky,
"Understanding and exploiting weight update sparsity for communication-efficient distributed RL", arXiv:2602.03839), and
those that differ differ in the last place: gaps between positions and exclusive-ors are small numbers, which deflate
packs well.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 8 << 20  # of a tensor that are compared at once
_FAR = 255  # a gap of so many or more takes four bytes more
_LEVEL = 1

Bytes = npt.NDArray[np.uint8]


def difference(old: Bytes, new: Bytes, itemsize: int) -> bytes | None:
    """Returns what makes ``new`` of ``old``; None where that is no smaller than ``new`` itself.

    Args:
        old, new: bytes of numbers, of one size.
        itemsize: of a number: 1, 2, 4 or 8.
    """
    before, after = (array.view(f"u{itemsize}") for array in (old, new))
    places = np.flatnonzero(before != after)
    if not places.size:
        return b""
    if places.size * (itemsize + 1) >= new.size:
        return None
    gaps = np.diff(places, prepend=-1) - 1
    near, far = np.minimum(gaps, _FAR).astype(np.uint8), gaps[gaps >= _FAR].astype("<u4")
    bits = (before[places] ^ after[places]).astype(f"<u{itemsize}").view(np.uint8).reshape(-1, itemsize)
    head = np.array([places.size, far.size], "<u4").tobytes()
    # byte by byte: the upper ones are mostly zero
    body = head + zlib.compress(b"".join((near.tobytes(), far.tobytes(), bits.T.tobytes())), _LEVEL)
    return body if len(body) < new.size else None


def apply(to: Bytes, body: bytes, itemsize: int) -> None:
    """Makes the new version of the old one, in place.

    Raises:
        ValueError: this is no difference between tensors of this size; what is in ``to`` then means nothing.
    """
    if not body:
        return
    count, far_count = (int(number) for number in np.frombuffer(body[:8], "<u4"))
    size = count * (1 + itemsize) + 4 * far_count
    if not 0 < count <= to.size // itemsize or far_count > count:
        raise ValueError(f"a difference of {count} numbers, {far_count} of them far apart, in {to.size} bytes")
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(body[8:], size)
    except zlib.error as error:
        raise ValueError(f"a difference that cannot be unpacked ({error})") from error
    if len(raw) != size:
        raise ValueError(f"a difference of {len(raw)} bytes instead of {size}")
    gaps = np.frombuffer(raw, np.uint8, count).astype(np.int64)
    far = gaps == _FAR
    if np.count_nonzero(far) != far_count:
        raise ValueError("a difference whose gaps do not fit together")
    gaps[far] = np.frombuffer(raw, "<u4", far_count, count)
    places: npt.NDArray[Any] = np.cumsum(gaps + 1) - 1
    if places[-1] >= to.size // itemsize:
        raise ValueError(f"a difference of number {places[-1]} of {to.size // itemsize}")
    bits = np.frombuffer(raw, np.uint8, count * itemsize, count + 4 * far_count).reshape(itemsize, count)
    to.view(f"<u{itemsize}")[places] ^= np.ascontiguousarray(bits.T).view(f"<u{itemsize}")[:, 0]
