"""All workers of a host reduce arrays together, in shared memory: the process side of ``kernels.reduce``."""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso import kernels
from multiverso.errors import DtypeMismatchError, MultiversoError, ShapeMismatchError, WorkerLostError
from multiverso.kernels.compiling import building, compile_kernel
from multiverso.memory.words import load32
from multiverso.runtime.session import Session
from multiverso.shards.shard import Shard
from multiverso.spec import DTYPES, TableSpec

Array = npt.NDArray[Any]

OPERATIONS = ("sum", "product", "max", "min", "average")
SMALL_BYTES = 32 * 1024
CHUNK_BYTES = 1024 * 1024
# With more workers than cores a barrier costs a turn of the scheduler, so there are fewer, larger chunks.
CROWDED_CHUNK_BYTES = 16 * 1024 * 1024
_LINES_BYTES = 128 * 64  # kernels.reduce.LINES, which would import Numba
_MISMATCH = 257
_OTHER_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "uint32")
_PHASE, _CHUNK, _STEP = range(3)


@functools.cache
def _kernels(dtype: str) -> Any:
    from numba import from_dtype, int64, uintp

    from multiverso.kernels import reduce

    data = from_dtype(np.dtype(dtype))[::1]
    common = (uintp, uintp, uintp, int64, int64, int64, int64, int64, data, data, int64[::1])
    with building(f"reduce-{dtype}"):
        return SimpleNamespace(
            small=compile_kernel(reduce.reduce_small, common),
            chunks=compile_kernel(reduce.reduce_chunks, (*common, int64)),
        )


def working_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Returns the dtype in which an array is reduced: 16-bit floats in float32, small integers in int64.

    Raises:
        DtypeMismatchError: arrays of this dtype cannot be reduced.
    """
    dtype = np.dtype(dtype)
    if dtype.name in DTYPES:
        return dtype
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.name in _OTHER_INTEGERS:
        return np.dtype(np.int64)
    accepted = ", ".join((*DTYPES, "float16", "bfloat16", *_OTHER_INTEGERS))
    raise DtypeMismatchError(f"an array of dtype {dtype} cannot be reduced; accepted are {accepted}")


def _writable(array: Array) -> Array:
    """Returns an array on the same memory that counts as writable: kernels are compiled for such ones only."""
    if array.flags.writeable:
        return array
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    alias: Array = np.frombuffer(memory, array.dtype)
    return alias


class Reducer:
    """This worker's part in the reductions of workers 0 to ``size - 1`` of a session's job.

    Every one of them has to call `all_reduce` equally often, with arrays of the same size and dtype.

    Args:
        session: this worker's session; its number is its rank.
        size: how many workers take part.

    Owner: one thread at a time.
    """

    def __init__(self, session: Session, size: int) -> None:
        if not 0 <= session.worker_id < size:
            raise ValueError(f"worker {session.worker_id} is not one of the {size} that reduce together")
        self.size = size
        self.rank = session.worker_id
        self._session = session
        self._progress = np.zeros(3, np.int64)
        self._broken: str | None = None
        self._lines = self._open("lines", _LINES_BYTES + 2 * size * SMALL_BYTES)
        self._chunk_bytes = CHUNK_BYTES if size <= (os.cpu_count() or 1) else CROWDED_CHUNK_BYTES
        self._chunks: Shard | None = None
        if load32(self._address(self._lines) + 128 * self.rank):
            self._broken = f"worker {self.rank} of this group was lost, and this process has taken its place"

    def all_reduce(
        self,
        source: Array,
        operation: str = "sum",
        out: Array | None = None,
        timeout_seconds: float | None = None,
    ) -> Array:
        """Returns the reduction of all workers' arrays, the same bits in each; waits for all of them.

        Elements are combined in rank order, 16-bit floats in float32, and rounded once at the end. The
        average of integers is rounded down.

        Args:
            source: this worker's array, of any shape and layout.
            operation: one of OPERATIONS.
            out: where the result goes, of the same shape and dtype; may be ``source``.
            timeout_seconds: deadline, instead of the session's.

        Raises:
            ShapeMismatchError: ``out`` does not fit, or the workers called with different things.
            WorkerLostError: a worker died; ``out`` is then undefined, and nothing more can be reduced.
            WaitTimeoutError: a worker did not come.
        """
        self._session.enter()
        if operation not in OPERATIONS:
            raise ValueError(f"operation is one of {', '.join(OPERATIONS)}; got {operation!r}")
        dtype = working_dtype(source.dtype)
        if out is None:
            out = np.empty(source.shape, source.dtype)
        elif out.shape != source.shape or out.dtype != source.dtype or not out.flags.writeable:
            raise ShapeMismatchError(
                f"the result has to be a writable array of {source.shape} {source.dtype}; "
                f"got {out.shape} {out.dtype}"
            )
        if self._broken is not None:
            raise WorkerLostError(
                f"nothing more can be reduced: {self._broken}; restart all workers of the group"
            )
        flat = _writable(np.ascontiguousarray(source, dtype).reshape(-1))
        direct = out.dtype == dtype and out.flags.c_contiguous
        result = out.reshape(-1) if direct else np.empty(flat.size, dtype)
        self._reduce(flat, operation, result, str(source.dtype), timeout_seconds)
        if operation == "average":
            divide = np.floor_divide if dtype.kind == "i" else np.divide
            divide(result, dtype.type(self.size), out=result)
        if not direct:
            out[...] = result.reshape(out.shape)
        return out

    def _reduce(
        self, flat: Array, operation: str, result: Array, given: str, timeout_seconds: float | None
    ) -> None:
        number = OPERATIONS.index(operation)
        signature = zlib.crc32(f"{operation} {given}".encode()) << 31 ^ flat.size
        more: tuple[int, ...] = ()
        kernel, control = _kernels(flat.dtype.name), self._session.control.address
        lines = self._address(self._lines)
        if flat.nbytes <= SMALL_BYTES:
            slots, stride, call = lines + _LINES_BYTES, SMALL_BYTES, kernel.small
        else:
            if self._chunks is None:
                self._chunks = self._open("chunks", 3 * self.size * self._chunk_bytes)
            slots, stride, call = self._address(self._chunks), self._chunk_bytes, kernel.chunks
            more = (self._chunk_bytes // flat.itemsize,)
        arguments = (control, lines, slots, stride, self.rank, self.size, number, signature, flat, result)

        def go() -> int:
            return int(call(*arguments, self._progress, *more))

        what = f"all_reduce({operation}) of {flat.size} {given}"
        self._broken = f"an earlier {what} was interrupted"
        code = go()
        if code not in (0, _MISMATCH):
            try:
                code = self._session.go_on(code, lambda: self._without_mismatch(go()), timeout_seconds, what)
            except MultiversoError as error:
                self._broken = f"in an earlier {what}: {error}"
                raise
            code = self._code
        if code == _MISMATCH:
            self._broken = f"in an earlier {what} the workers called with different things"
            raise ShapeMismatchError(
                f"the workers do not call all_reduce with the same things; this one: {what}"
            )
        self._broken = None

    _code = 0

    def _without_mismatch(self, code: int) -> int:
        # `go_on` takes any code that it does not know for an error of the operating system
        self._code = code
        return 0 if code == _MISMATCH else code

    def _open(self, part: str, size: int) -> Shard:
        spec = TableSpec(
            "array", 1, -(-size // 8), dtype="int64", name=f"multiverso-reduce-{self.size}-{part}"
        )
        return self._session.open_table(spec, lambda shard, last, of: None)[1]

    @staticmethod
    def _address(shard: Shard) -> int:
        return int(shard.values().ctypes.data)

    def missing(self) -> list[int]:
        """Returns the workers that are behind this one."""
        lines = self._address(self._lines)
        mine = load32(lines + 128 * self.rank)
        return [worker for worker in range(self.size) if load32(lines + 128 * worker) < mine]


__all__ = ["OPERATIONS", "Reducer", "kernels", "working_dtype"]
