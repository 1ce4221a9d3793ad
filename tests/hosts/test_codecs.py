"""Laws of the wire formats: both sides read the same, nothing is lost in the end, no body is believed unread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiverso.errors import StartupError
from multiverso.hosts import codecs
from multiverso.hosts.codecs import INT8, NAMES, NATIVE, TOPK, Wire

LOSSY = ("float32", "bfloat16", "int8", "topk", "topk:0.2")
FLOATS = ("float32", "float64")


def send(wire: Wire, difference: Any) -> tuple[Any, int]:
    """What the other side reads, and the bytes that it took."""
    frame = difference.copy()
    if wire.number == NATIVE:
        return frame, frame.nbytes
    coded = np.full(codecs.longest(wire.number, frame.size, frame.itemsize), 0xAA, np.uint8)
    length = codecs.encode(wire, frame, coded)
    if length < 0:
        return difference, difference.nbytes
    assert codecs.fits(wire.number, length, frame.size, frame.itemsize)
    read = np.zeros_like(frame)
    if length:
        codecs.decode(wire.number, coded[:length].copy(), read)
        assert read.tobytes() == frame.tobytes(), "this side goes on with other numbers than the other"
    else:
        assert not frame.any()
    return read, length


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=40)
@given(data=st.data())
def test_both_sides_read_the_same_numbers(name: str, dtype: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((1, 2, 255, 256, 257, 600)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    largest = data.draw(st.sampled_from((0.0, 1e-44, 1e-40, 1e-3, 1.0, 1e30, 3.4e38)))
    random = np.random.default_rng(seed)
    difference = (random.standard_normal(size).clip(-1, 1) * largest).astype(dtype)
    difference[random.random(size) < 0.3] = 0
    read, _ = send(Wire.of(name, dtype), difference)
    assert np.all(np.isfinite(read))
    assert float(np.abs(read).max()) <= float(np.abs(difference).max()) * 1.01 + 2.0**-133


@pytest.mark.parametrize("name", LOSSY)
def test_whole_numbers_arrive_whole_and_all_of_them_after_some_frames(name: str) -> None:
    random = np.random.default_rng(1)
    left = random.integers(-(2**20), 2**20, 1000).astype(np.float32)
    arrived = np.zeros(1000, np.float32)
    for _ in range(200):
        if not left.any():
            break
        read, _ = send(Wire.of(name, "float32"), left)
        assert np.array_equal(read, np.rint(read))
        left -= read
        arrived += read
    assert not left.any()
    assert np.array_equal(arrived, np.random.default_rng(1).integers(-(2**20), 2**20, 1000))


@pytest.mark.parametrize(
    "name, most", [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1 + 2 / 256), ("topk:0.01", 0.01 * 12)]
)
def test_the_bytes_of_each_format(name: str, most: float) -> None:
    difference = np.random.default_rng(1).standard_normal(256 * 100)
    _, length = send(Wire.of(name, "float64"), difference)
    assert 0 < length <= most * difference.size


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e300])
def test_what_a_format_cannot_hold_travels_as_it_is(name: str, number: float) -> None:
    wire = Wire.of(name, "float64")
    frame = np.array([1.0, number])
    before = frame.tobytes()
    coded = np.zeros(codecs.longest(wire.number, 2, 8), np.uint8)
    if codecs.encode(wire, frame, coded) < 0:
        assert frame.tobytes() == before
    else:
        assert number == 1e300
        assert wire.number in (INT8, TOPK)


@settings(max_examples=300)
@given(wire=st.integers(0, 6), body=st.binary(max_size=400), size=st.integers(1, 300), dtype=st.sampled_from(FLOATS))
@example(wire=1, body=b"\0\0\x80\x7f", size=1, dtype="float32")  # an infinity
@example(wire=1, body=b"\0\0\x81\x7f", size=1, dtype="float64")  # a signalling NaN
def test_any_bytes_are_read_as_finite_numbers_in_place_or_refused(
    wire: int, body: bytes, size: int, dtype: str
) -> None:
    frame = np.zeros(size, dtype)
    if wire == NATIVE or not body or not codecs.fits(wire, len(body), size, frame.itemsize):
        return
    try:
        codecs.decode(wire, np.frombuffer(body, np.uint8), frame)
    except ValueError:
        return
    assert np.isfinite(frame).all()


def test_whole_numbers_and_equal_formats_travel_as_they_are() -> None:
    for name in NAMES:
        assert Wire.of(name, "int64").number == NATIVE
    assert Wire.of("float32", "float32").number == NATIVE


@pytest.mark.parametrize("name", ["", "int4", "topk:", "topk:0", "topk:2", "topk:x", "int8:0.5"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match="wire format"):
        Wire.of(name, "float32")
