"""Reduces arrays of all workers of a host in shared memory: the process side of ``kernels.reduce``."""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import (
    DtypeMismatchError,
    InterruptedRoundError,
    NotInThisJobError,
    ShapeMismatchError,
    WorkerLostError,
)
from multiverso.hosts.options import refuse_across_hosts
from multiverso.kernels import reduce
from multiverso.layout import words as at
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import load64
from multiverso.runtime.collective.across_hosts import AcrossHosts
from multiverso.runtime.session.session import Session
from multiverso.signal_safety import turn
from multiverso.spec.table import DTYPES

Array = npt.NDArray[Any]

OPERATIONS = ("sum", "product", "max", "min", "average")
SMALL_BYTES = 32 * 1024
# Measured with 2 and 4 workers on 2 cores, 1e6 and 1e7 floats: 0.5 and 1 MiB are best, 16 MiB takes 1.4 times as long.
CHUNK_BYTES = 1024 * 1024
_LINES_BYTES = reduce.LINES
_OTHER_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "uint32")
_PHASE, _CHUNK, _STEP, _COMPLETE = range(4)


@functools.cache
def _kernels(dtype: np.dtype[Any]) -> tuple[Callable[..., int], Callable[..., int]]:
    """Returns the kernel for small arrays and the one for others."""
    return reduce.reduce_small.compiled(dtype.name), reduce.reduce_chunks.compiled(dtype.name)


@functools.cache  # a dtype's name is put together each time it is asked for
def working_dtype(dtype: np.dtype[Any], operation: str = "sum") -> np.dtype[Any]:
    """Returns the dtype in which an array is reduced: 16-bit floats in float32, small integers in int64.

    So are averages of int32, whose sum need not fit.

    Raises:
        DtypeMismatchError: arrays of this dtype cannot be reduced.
    """
    if dtype.name in DTYPES:
        return np.dtype(np.int64) if (dtype.name, operation) == ("int32", "average") else dtype
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.name in _OTHER_INTEGERS:
        return np.dtype(np.int64)
    accepted = ", ".join((*DTYPES, "float16", "bfloat16", *_OTHER_INTEGERS))
    raise DtypeMismatchError(f"an array of dtype {dtype} cannot be reduced; accepted are {accepted}")


@functools.cache
def _signature(operation: str, dtype: np.dtype[Any]) -> int:
    """Returns a number that differs between calls that do not belong together."""
    return zlib.crc32(f"{operation} {dtype}".encode()) << 31


def _writable(array: Array) -> Array:
    """Returns an array on the same memory that counts as writable: kernels are compiled for such ones only."""
    if array.flags.writeable:
        return array
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    alias: Array = np.frombuffer(memory, array.dtype)
    return alias


@dataclass(frozen=True)
class _Call:
    """A call of all_reduce that has not returned yet; it keeps its arrays until it has.

    ``direct``: the result is where the caller wanted it; ``divides``: it is the sum of an average; ``floors``: that is
    rounded down.
    """

    operation: str
    given: np.dtype[Any]
    shape: tuple[int, ...]
    flat: Array
    result: Array
    direct: bool
    floors: bool
    divides: bool

    def __str__(self) -> str:
        return f"all_reduce({self.operation}) of {self.flat.size} {self.given}"


class Reducer:
    """This worker's part in the reductions of workers 0 to ``size - 1`` of a session's job.

    Every one of them has to call `all_reduce` equally often, with arrays of the same size and dtype.

    Args:
        session: this worker's session; its number is its rank.
        size: how many workers take part.

    Raises:
        ValueError: this worker is not one of them, or the session has a reducer of as many, as `all_reduce` makes.

    Owner: one thread at a time.
    """

    def __init__(self, session: Session, size: int) -> None:
        if not 0 <= session.worker_id < size:
            raise ValueError(f"worker {session.worker_id} is not one of the {size} that reduce together")
        if session.reducers.setdefault(size, self) is not self:
            raise ValueError(
                f"this session has a Reducer of {size} workers already, whose memory this one would share: use one for "
                "all reductions of these workers (multiverso.all_reduce makes that of all workers)"
            )
        self.size = size
        self.rank = session.worker_id
        self._session = session
        self._progress = np.zeros(4, np.int64)
        self._call: _Call | None = None
        self._broken: str | None = None
        self._chunks: SharedMemory | None = None
        self._across: AcrossHosts | None = None
        if session.hosts:
            if size != session.workers_num:
                refuse_across_hosts(session.hosts, "all_reduce by some of the workers", "reduce with all of them")
            self._across = AcrossHosts(session)
            # another host's memory says nothing of before
            if session.incarnation or not self._across.is_new:
                self._broken = f"worker {self.rank} was lost, and this process has taken its place"
            return
        self._lines = self._open("lines", _LINES_BYTES + 2 * size * SMALL_BYTES)
        self._lines_at = self._lines.address
        # What a dead one had written and not published was never read: its place is as good as new.
        if load64(self._lines_at + at.REDUCTION_STRIDE * self.rank + at.PHASE):
            self._broken = f"worker {self.rank} of this group was lost, and this process has taken its place"

    def all_reduce(
        self, source: Array, operation: str = "sum", out: Array | None = None, timeout_seconds: float | None = None
    ) -> Array:
        """Returns the reduction of all workers' arrays, the same bits in each; waits for all of them.

        Elements are combined in rank order, 16-bit floats in float32, and rounded once at the end. The
        average of integers is rounded down; the sum of int64 has to fit.

        Args:
            source: this worker's array, of any shape and layout.
            operation: one of OPERATIONS.
            out: where the result goes, of the same shape and dtype; may be ``source``.
            timeout_seconds: deadline, instead of the session's.

        Raises:
            ShapeMismatchError: ``out`` does not fit, or the workers called with different things.
            WorkerLostError: a worker died; ``out`` is then undefined, and nothing more can be reduced.
            WaitTimeoutError: a worker did not come.
            InterruptedRoundError: another call raised before it was done, and has to be finished first.

        A call that raised (a deadline, Ctrl-C) has not returned: call it again with the same array and operation, and
        it continues where it stopped, or returns what it had reduced.
        """
        self._session.check_may_wait()
        deadline = None if timeout_seconds is None else self._session.start_deadline(timeout_seconds)
        if operation not in OPERATIONS:
            raise ValueError(f"operation is one of {', '.join(OPERATIONS)}; got {operation!r}")
        dtype = working_dtype(source.dtype, operation)
        if out is None:
            out = np.empty(source.shape, source.dtype)
        elif (
            not isinstance(out, np.ndarray)
            or (out.shape, out.dtype) != (source.shape, source.dtype)
            or not out.flags.writeable
        ):
            got = f"{out.shape} {out.dtype}" if isinstance(out, np.ndarray) else type(out).__name__
            raise ShapeMismatchError(
                f"the result has to be a writable NumPy array of {source.shape} {source.dtype}; got {got}"
            )
        if self._broken is not None:
            raise WorkerLostError(f"nothing more can be reduced: {self._broken}; restart all workers of the group")
        call = self._begun(operation, source)
        fresh = call is None
        if call is None:
            flat = _writable(np.ascontiguousarray(source, dtype).reshape(-1))
            floors = operation == "average" and dtype.kind == "i"
            divides = operation == "average" and (floors or self._across is not None)
            direct = out.dtype == dtype and out.flags.c_contiguous and not divides
            result = out.reshape(-1) if direct else np.empty(flat.size, dtype)
            call = _Call(operation, source.dtype, source.shape, flat, result, direct, floors, divides)
            self._call = call
        self._reduce(call, deadline)
        if not (fresh and call.direct):
            result = call.result // self.size if call.floors else call.result
            if call.divides and not call.floors:
                result = call.result / call.result.dtype.type(self.size)
            out[...] = result.reshape(out.shape)
        # returned: no exception can come between the two
        self._progress[_COMPLETE] = 0
        self._call = None
        return out

    def _begun(self, operation: str, source: Array) -> _Call | None:
        """Returns the call that raised and whose repetition this is, or None.

        Raises:
            InterruptedRoundError: another one has to be finished first.
        """
        call = self._call
        if call is None or not (self._progress[[_CHUNK, _STEP, _COMPLETE]]).any():
            return None
        if (operation, source.dtype, source.shape) != (call.operation, call.given, call.shape):
            raise InterruptedRoundError(
                f"{call} was interrupted; call all_reduce again with the same things to finish it first"
            )
        return call

    def _reduce(self, call: _Call, deadline: Deadline | None) -> None:
        try:
            if self._across is None:
                self._reduce_here(call, deadline)
            elif not self._progress[_COMPLETE]:
                self._progress[_STEP] = 1
                operation = "sum" if call.operation == "average" else call.operation
                within = self._session.start_deadline() if deadline is None else deadline
                self._across.reduce(call.flat, call.result, operation, str(call), within)
                self._progress[_COMPLETE] = 1
                self._progress[_STEP] = 0
        except (WorkerLostError, ShapeMismatchError) as error:
            self._broken = f"in an earlier {call}: {error}"
            raise

    def _reduce_here(self, call: _Call, deadline: Deadline | None) -> None:
        more: tuple[int, ...] = ()
        flat, lines, small = call.flat, self._lines_at, call.flat.nbytes <= SMALL_BYTES
        if small:
            slots, stride = lines + _LINES_BYTES, SMALL_BYTES
        else:
            if self._chunks is None:
                self._chunks = self._open("chunks", 3 * self.size * CHUNK_BYTES)
            slots, stride = self._chunks.address, CHUNK_BYTES
            more = (CHUNK_BYTES // flat.itemsize,)
        kernel = functools.partial(
            _kernels(flat.dtype)[0 if small else 1],
            self._session.control.address,
            lines,
            self._lines.number,
            slots,
            stride,
            self.rank,
            self.size,
            reduce.SUM if call.floors else OPERATIONS.index(call.operation),
            _signature(call.operation, call.given) ^ flat.size,
            flat,
            call.result,
            self._progress,
            *more,
        )
        code = kernel()
        if code:
            self._session.resume(code, kernel, deadline, str(call))

    def _open(self, part: str, nbytes: int) -> SharedMemory:
        return self._session.shared_memory(f"multiverso-reduce-{self.size}-{part}", nbytes)


def all_reduce(
    session: Session,
    source: Array,
    operation: str = "sum",
    out: Array | None = None,
    timeout_seconds: float | None = None,
    size: int | None = None,
) -> Array:
    """Returns the reduction of the arrays of all workers of a session's job; a worker's threads take turns.

    Args:
        session: this worker's.
        source, operation, out, timeout_seconds: see `Reducer.all_reduce`, which says what else is raised.
        size: how many workers there are, in a job that does not know it.

    Raises:
        NotInThisJobError: the workers of this job come and go.
        LockStateError: a signal's handler has interrupted this thread's call of it to make another one.
    """
    with turn(session.reducing, "all_reduce"):
        size = size or session.fixed_num
        if size is None:
            raise NotInThisJobError(
                "all_reduce needs all workers, and those of this job come and go: give their number (multiverso run -n)"
            )
        reducer = session.reducers.get(size) or Reducer(session, size)
        return reducer.all_reduce(source, operation, out, timeout_seconds)
