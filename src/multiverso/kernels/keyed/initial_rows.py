"""The initial row of a key is a function of seed, key and column, so a read need not enter what it does not find.

Steele, Lea and Flood, Fast splittable pseudorandom number generators (OOPSLA 2014): the finaliser of SplitMix64.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return"

from __future__ import annotations

from multiverso.compiling.atomics import (
    hash64,
    load_acquire64,
    load_double,
    move,
    store_float32,
    store_float64,
    store_int32,
    store_int64,
)
from multiverso.compiling.declaring import inner
from multiverso.layout.keyed import CONSTANT, FLOAT32, FLOAT64, INT32, UNIFORM, at

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
def _uniform(bits):
    """From -1 to below 1."""
    return (((bits >> 8) & (2 * _ONE - 1)) - _ONE) / _ONE


@inner
def _normal(bits, more):
    """Eight numbers of 16 bits, less their mean: variance 8 (2**32 - 1) / 12, at most 4.9 deviations."""
    total = -4 * 65535.0
    for part in range(4):
        total += ((bits >> (16 * part)) & 0xFFFF) + ((more >> (16 * part)) & 0xFFFF)
    return total / _DEVIATION


@inner
def _initial_number(kind, scale, seed, column):
    if kind == CONSTANT:
        return scale
    bits = hash64(seed ^ (column + 1))
    return scale * (_uniform(bits) if kind == UNIFORM else _normal(bits, hash64(bits ^ seed)))


@inner
def write_initial(base, key, place):
    """Writes the values of a key's initial row to an address, or those that the node gives a copy."""
    kind, scale = load_acquire64(base + at.KIND), load_double(base + at.SCALE)
    dtype, itemsize = load_acquire64(base + at.DTYPE), load_acquire64(base + at.ITEMSIZE)
    columns = load_acquire64(base + at.COLUMNS)
    given = load_acquire64(base + at.GIVEN)
    if given != 0:
        move(place, given, columns * itemsize)
        return
    seed = hash64(load_acquire64(base + at.SEED) ^ hash64(key))
    if dtype == FLOAT32:  # a loop for each kind, of stores alone: the compiler makes vectors of it
        if kind == UNIFORM:
            for column in range(columns):
                store_float32(place + 4 * column, scale * _uniform(hash64(seed ^ (column + 1))))
        elif kind == CONSTANT:
            for column in range(columns):
                store_float32(place + 4 * column, scale)
        else:
            for column in range(columns):
                store_float32(place + 4 * column, _initial_number(kind, scale, seed, column))
        return
    for column in range(columns):
        store_number(dtype, place + column * itemsize, _initial_number(kind, scale, seed, column))
