"""Codes differences in frames. What a format leaves out goes with the next frame.

That is error feedback (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019,
arXiv:1901.09847). Between copies it needs no buffer of its own, it stays in V - S: sums are exact in the end, whatever
the format, as barriers, initial values and saving send the rest as it is. In rounds each host keeps it
(``hosts/rounds/coding.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import StartupError
from multiverso.hosts.peer.resources import Array

NATIVE, FLOAT32, BFLOAT16, INT8, TOPK = range(5)
NAMES = ("native", "float32", "bfloat16", "int8", "topk")
BLOCK = 256  # numbers that share a scale in INT8: a power of two, or sums of whole numbers would be rounded
_FRACTION = 0.01
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_BFLOAT16 = float.fromhex("0x1.fep127")


@dataclass(frozen=True)
class Wire:
    """A format.

    Attributes:
        number: what headers call it.
        fraction: of TOPK: the part of a chunk's numbers that travels, the largest ones.
    """

    number: int = NATIVE
    fraction: float = _FRACTION

    @classmethod
    def of(cls, name: str, dtype: npt.DTypeLike) -> Wire:
        """Returns the format that a user's name means for tables of a dtype; whole numbers always travel as they are.

        Args:
            name: ``"native"``, ``"float32"`` (of use for float64 tables), ``"bfloat16"``, ``"int8"`` (blocks of 256
                numbers with a power of two for each), ``"topk"`` or ``"topk:0.05"`` (the largest part of the numbers).
            dtype: of the table.

        Raises:
            StartupError: there is no such format.
        """
        kind, colon, fraction = name.partition(":")
        try:
            part = float(fraction) if colon else _FRACTION
        except ValueError:
            part = 0.0
        if kind not in NAMES or (colon and kind != "topk") or not 0 < part <= 1:
            raise StartupError(
                f"a wire format is one of {', '.join(NAMES)}, or topk:F with the part F of the numbers that travels; "
                f"got {name!r}"
            )
        number = NAMES.index(kind)
        kind_of = np.dtype(dtype)
        if kind_of.kind != "f" or (number == FLOAT32 and kind_of.itemsize == 4):
            number = NATIVE
        return cls(number, part)


def longest(wire: int, size: int, itemsize: int) -> int:
    """Returns the most bytes that so many numbers take in a format."""
    if wire == NATIVE:
        return size * itemsize
    if wire == FLOAT32:
        return 4 * size
    if wire == BFLOAT16:
        return 2 * size
    if wire == INT8:
        return size + 2 * -(-size // BLOCK)
    return size * (4 + itemsize)


def fits(wire: int, length: int, size: int, itemsize: int) -> bool:
    """Returns whether a body of so many bytes can be a coded difference of so many numbers."""
    if wire not in range(len(NAMES)):
        return False
    if wire == TOPK:
        return length % (4 + itemsize) == 0 and length <= longest(wire, size, itemsize)
    return length in (0, longest(wire, size, itemsize))


def encode(wire: Wire, frame: Array, coded: Array) -> int:
    """Codes a difference and makes it what the other side will read.

    Args:
        wire: the format, not NATIVE.
        frame: float32 or float64, flat; afterwards what is sent of it.
        coded: uint8, of at least ``longest`` bytes.

    Returns:
        the bytes; 0 if nothing is large enough for the format; -1 if it cannot hold these numbers (infinities, or
        beyond float32): then nothing has changed, and they travel as they are.
    """
    size = frame.size
    largest = float(np.max(np.abs(frame), initial=0.0))
    limit = {FLOAT32: _LARGEST, BFLOAT16: _LARGEST_BFLOAT16}.get(wire.number, float(np.finfo(frame.dtype).max))
    if not largest <= limit * (127 / 128 if wire.number == INT8 else 1):
        return -1
    length = longest(wire.number, size, frame.itemsize)
    if wire.number == FLOAT32:
        coded[:length].view(np.float32)[:] = frame
    elif wire.number == BFLOAT16:
        bits = frame.astype(np.float32).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        coded[:length].view(np.uint16)[:] = bits >> 16
    elif wire.number == INT8:
        powers, numbers = _int8_parts(coded, size)
        whole = np.zeros((powers.size, BLOCK), frame.dtype)
        whole.reshape(-1)[:size] = frame
        parts, exponents = np.frexp(np.abs(whole).max(axis=1))
        powers[:] = exponents - np.where(parts <= 127 / 128, 7, 6)  # the largest becomes 127 at most
        with np.errstate(under="ignore"):
            np.rint(np.ldexp(whole, -powers[:, None].astype(np.int32)), out=whole)
        numbers[:] = whole.reshape(-1)[:size]
    else:
        length = _encode_largest(wire.fraction, frame, coded)
    decode(wire.number, coded[:length], frame)
    return length if frame.any() else 0


def _encode_largest(fraction: float, frame: Array, coded: Array) -> int:
    count = max(1, int(fraction * frame.size))
    places = np.argpartition(np.abs(frame), frame.size - count)[frame.size - count :]
    places = np.sort(places[frame[places] != 0])
    at, values = _topk_parts(coded, places.size, frame.dtype)
    at[:], values[:] = places, frame[places]
    return places.size * (4 + frame.itemsize)


@np.errstate(invalid="ignore", over="ignore", under="ignore")  # a signalling NaN is refused below, and not warned of
def decode(wire: int, coded: Array, frame: Array) -> None:
    """Writes what was coded into ``frame``.

    Raises:
        ValueError: it is not a coded difference of so many numbers; ``frame`` has anything in it then.
    """
    size = frame.size
    if wire == FLOAT32:
        frame[:] = coded.view(np.float32)
    elif wire == BFLOAT16:
        frame[:] = (coded.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif wire == INT8:
        powers, numbers = _int8_parts(coded, size)
        frame[:] = np.ldexp(numbers.astype(frame.dtype), np.repeat(powers, BLOCK)[:size].astype(np.int32))
    elif wire == TOPK:
        at, values = _topk_parts(coded, coded.size // (4 + frame.itemsize), frame.dtype)
        if at.size and (int(at[-1]) >= size or np.any(np.diff(at.astype(np.int64)) <= 0)):
            raise ValueError("places that are out of order, or beyond the chunk")
        frame[:] = 0
        frame[at] = values
    else:
        raise ValueError(f"no wire format has the number {wire}")
    if not np.isfinite(frame).all():
        raise ValueError("numbers that no format codes: what is not finite travels as it is")


def _int8_parts(coded: Array, size: int) -> tuple[Array, Array]:
    blocks = -(-size // BLOCK)
    return coded[: 2 * blocks].view(np.int16), coded[2 * blocks : 2 * blocks + size].view(np.int8)


def _topk_parts(coded: Array, count: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Values first: they need not lie on their own boundary then."""
    cut = count * dtype.itemsize
    return coded[cut : cut + 4 * count].view(np.uint32), coded[:cut].view(dtype)
