"""What goes over the channels: any array comes out as it went in, and nothing is executed."""

from __future__ import annotations

import gc
import os
from io import FileIO

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from platoon.channel.wire import Array, dumps, loads, pack_arrays, unpack_arrays
from platoon.util import PlatoonError

DTYPES = hnp.scalar_dtypes() | st.sampled_from([np.dtype(ml_dtypes.bfloat16)])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dtype = draw(DTYPES)
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    size = int(np.prod(shape)) * max(1, dtype.itemsize)
    array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    array = (array % 2).view(dtype) if dtype.kind == "b" else array[: int(np.prod(shape)) * dtype.itemsize].view(dtype)
    array = array.reshape(shape)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if array.ndim and draw(st.booleans()):
        array = array[::2]
    return array


def through(items: list[Array], copy: bool) -> list[Array]:
    spare = [FileIO(os.memfd_create("written before"), "r+")]
    spare[0].write(b"something" * 100)
    batch = pack_arrays(items, spare)
    try:
        return unpack_arrays(loads(dumps(batch.header)), [batch.file.fileno()], copy)
    finally:
        batch.close()


@settings(max_examples=150)
@given(st.lists(arrays(), min_size=1, max_size=3), st.booleans())
def test_arrays_come_out_as_they_went_in(items: list[Array], copy: bool) -> None:
    for went, came in zip(items, through(items, copy), strict=True):
        assert came.shape == went.shape
        assert came.dtype == went.dtype
        assert came.tobytes() == went.tobytes()
        if went.flags.f_contiguous and not went.flags.c_contiguous:
            assert came.flags.f_contiguous
        assert came.flags.writeable or not copy


@pytest.mark.parametrize("bad", [[], [np.array([object()])], [np.zeros(2, [("a", int)])]])
def test_what_cannot_be_sent_is_refused(bad: list[Array]) -> None:
    with pytest.raises(PlatoonError):
        pack_arrays(bad, [])


def test_a_header_that_does_not_fit_its_memory_is_refused() -> None:
    batch = pack_arrays([np.zeros(3)], [])
    header, memory = loads(dumps(batch.header)), [batch.file.fileno()]
    with pytest.raises(PlatoonError, match="64 bytes, and 128"):
        unpack_arrays(header * 2, memory)
    with pytest.raises(PlatoonError, match="64 bytes, and 0"):
        unpack_arrays([], memory)
    for odd in ([], memory * 2):
        with pytest.raises(PlatoonError, match=f"{len(odd)} pieces of memory"):
            unpack_arrays(header, odd)
    batch.close()


def test_arrays_on_the_memory_itself_are_the_workers_own() -> None:
    batch = pack_arrays([np.arange(3.0), np.arange(7, dtype=np.int8)], [])
    header = loads(dumps(batch.header))
    one, other = (unpack_arrays(header, [batch.file.fileno()], copy=False) for _ in range(2))
    assert all(array.flags.aligned for array in one)
    one[0][:] = 9
    batch.close()
    del one
    gc.collect()
    assert other[0].tolist() == [0, 1, 2]
    assert other[1].tolist() == list(range(7))


def test_requests_are_json_and_numpy_numbers_are_plain() -> None:
    value = {"error": np.float32(0.5), "ids": np.arange(3), "done": [1, None, True]}
    assert loads(dumps(value)) == {"error": 0.5, "ids": [0, 1, 2], "done": [1, None, True]}
    with pytest.raises(PlatoonError, match="must be made of"):
        dumps({"model": object()})
