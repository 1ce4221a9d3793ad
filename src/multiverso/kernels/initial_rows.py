"""The initial row of a key is a function of seed, key and column, so a read need not enter what it does not find.

Steele, Lea and Flood, Fast splittable pseudorandom number generators (OOPSLA 2014): the finaliser of SplitMix64.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.kernels.atomics import (
    hash64,
    load_acquire64,
    load_double,
    store_float32,
    store_float64,
    store_int32,
    store_int64,
)
from multiverso.kernels.declaring import inner
from multiverso.keyed_layout import CONSTANT, FLOAT32, FLOAT64, INT32, UNIFORM, at

_ONE = 1 << 24  # a float32 holds every multiple of 2**-24 from -1 to 1
_DEVIATION = (8 * (2**32 - 1) / 12) ** 0.5


@inner
def store_number(dtype, address, value):
    """Stores a number, rounded to the table's dtype; integers are rounded towards 0."""
    if dtype == FLOAT32:
        store_float32(address, value)
    elif dtype == FLOAT64:
        store_float64(address, value)
    elif dtype == INT32:
        store_int32(address, value)
    else:
        store_int64(address, value)


@inner
def write_initial(base, key, place):
    """Writes the values of a key's initial row to an address."""
    kind, scale = load_acquire64(base + at.KIND), load_double(base + at.SCALE)
    dtype, itemsize = load_acquire64(base + at.DTYPE), load_acquire64(base + at.ITEMSIZE)
    columns = load_acquire64(base + at.COLUMNS)
    seed = hash64(load_acquire64(base + at.SEED) ^ hash64(key))
    for column in range(columns):
        value = scale
        if kind != CONSTANT:
            bits = hash64(seed ^ (column + 1))
            if kind == UNIFORM:
                value = scale * ((((bits >> 8) & (2 * _ONE - 1)) - _ONE) / _ONE)
            else:
                # eight numbers of 16 bits, less their mean: variance 8 (2**32 - 1) / 12, at most 4.9 deviations
                more = hash64(bits ^ seed)
                total = -4 * 65535.0
                for part in range(4):
                    total += ((bits >> (16 * part)) & 0xFFFF) + ((more >> (16 * part)) & 0xFFFF)
                value = scale * (total / _DEVIATION)
        store_number(dtype, place + column * itemsize, value)
