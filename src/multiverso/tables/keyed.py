"""Rows by key: a table that grows with the keys that are added to."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from multiverso.errors import OutOfMemoryError, RowIdError, ShapeMismatchError
from multiverso.kernels import keyed as kernels
from multiverso.kernels.codes import FULL
from multiverso.memory.heap import free_memory
from multiverso.runtime.current import current
from multiverso.runtime.session import Session
from multiverso.spec import check_name, checked_count, checked_dtype
from multiverso.tables import keyed_saving
from multiverso.tables.convert import Array, Out, as_data, as_numpy, readable
from multiverso.tables.keyed_memory import KeyedMemory, KeyedSpec
from multiverso.tables.output import fresh, into
from multiverso.updaters import Updater, resolve

Keys = npt.NDArray[np.int64]
_MOST_AT_ONCE = 1 << 16
_SPARE_BYTES = 256 * 1024 * 1024


class KeyedTable:
    """Rows of ``dim`` numbers, each under a 64-bit key, that all workers of the job share.

    A row begins to exist when something is added to its key; until then it reads as its *initial row*, which depends
    on ``seed`` and the key alone, whoever asks. There is no size to give: the table grows in small steps, and no row
    ever moves. Workers reach it as they reach any table, by function calls on shared memory.

    Always asynchronous: an ``add`` is applied when it returns, row by row, and a row that is read is never torn. A
    worker that is killed in an ``add`` has applied it to a prefix of the keys, to each of them wholly or not at all,
    and the others go on; a key whose ``add`` has returned is never lost.

    With a ``name`` the first worker creates the table and others attach to it; without, the n-th keyed table of each
    worker is the same table.

    Args:
        dim: numbers in a row, 1 or more.
        dtype: float32 (default), float64, int32 or int64.
        initial: a number; or ``"uniform"`` or ``"normal"``, whose scale is 0.05; or ``(kind, scale)``: uniform in
            [-scale, scale), normal with this standard deviation. Integer tables take whole numbers only.
        seed: of the initial rows.
        updater: how adds reach a row: a name or an ``Updater``. Keys named twice in one call are summed first, unless
            the updater is plain addition: one call is one step of each row.
        name: create the table by this name, or attach to it.
        session: the session it belongs to; the current one by default.

    Raises:
        TableMismatchError: other workers asked for another table of this name.
        ValueError: a synchronous session or one with bounded staleness; an ``initial`` or a name that is none.

    Example:
        >>> import multiverso as mv
        >>> mv.init()
        >>> table = mv.KeyedTable(2)
        >>> table.add([[1, 1], [2, 2]], keys=[7, -3])
        >>> table.get([-3, 7, 1000])
        array([[2., 2.],
               [1., 1.],
               [0., 0.]], dtype=float32)
        >>> len(table)
        2
        >>> mv.shutdown()
    """

    def __init__(
        self,
        dim: int,
        *,
        dtype: npt.DTypeLike = "float32",
        initial: float | str | tuple[str, float] = 0.0,
        seed: int = 0,
        updater: str | Updater = "add",
        name: str | None = None,
        session: Session | None = None,
    ) -> None:
        check_name(name)
        self._session = session or current()
        self._session.check()
        if self._session.consistency.mode != "async":
            raise ValueError(
                f"keyed tables are asynchronous, and this session is {self._session.consistency.mode}: "
                "call init() without sync= and staleness=, or use a MatrixTableHandler"
            )
        self._session.refuse_across_hosts(
            "a KeyedTable",
            "use a MatrixTableHandler, whose rows have numbers, or start all workers on one host",
        )
        rule = resolve(updater)
        tables = self._session.keyed_tables
        called = (
            f"name:{name}"
            if name is not None
            else f"order:{sum(t.name is None for t in tables.values()) + 1}"
        )
        self._spec = KeyedSpec.of(checked_count(dim, "dim"), checked_dtype(dtype), initial, seed, rule, name)
        self._dtype = np.dtype(self._spec.dtype)
        twin: KeyedTable | None = tables.get(called)
        if twin is None:
            self._memory = KeyedMemory.of(self._session, called, self._spec)
            self._lock = threading.Lock()  # one hand for each worker
        else:
            twin._memory.check_equal(self._spec)
            self._memory, self._lock = twin._memory, twin._lock
        self._update = self._memory.updater(rule)
        self._sums_first = bool(rule.states or rule.hyper)
        self._budget = 0  # bytes that may be used before memory is looked at again
        tables.setdefault(called, self)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self._spec.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the shared memory."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """Its name, or None for one that was created by order."""
        return self._spec.name

    @property
    def spec(self) -> KeyedSpec:
        """Everything that the workers have agreed on."""
        return self._spec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec}>"

    def __len__(self) -> int:
        """Keys that have a row."""
        self._session.check()
        return self._memory.keys()

    # -- reading and adding ----------------------------------------------------------------------------------

    @overload
    def get(
        self,
        keys: Any,
        out: None = None,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Array: ...
    @overload
    def get(
        self, keys: Any, out: Out, *, dtype: npt.DTypeLike | None = None, timeout_seconds: float | None = None
    ) -> Out: ...
    def get(
        self,
        keys: Any,
        out: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Returns the rows of keys; of a key that has none, its initial row. It never makes one.

        Args:
            keys: integers that fit in 64 bits with a sign, in any shape and order, also repeated.
            out: written to and returned: keys' shape + (dim,), or flat.
            dtype: of the result, where ``out`` is not given: the table's, ``"float16"`` or ``"bfloat16"``.
            timeout_seconds: deadline, instead of the session's, of the wait for a worker that was stopped in the
                middle of a change; nothing else is waited for.

        Returns:
            Numbers of the table's dtype, of keys' shape + (dim,).

        Raises:
            RowIdError: keys that are no integers, or do not fit.
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
        """
        array = as_keys(keys)
        shape = (*array.shape, self.dim)
        output = fresh(shape, self._dtype, dtype) if out is None else into(out, shape, self._dtype, False)
        flat = array.reshape(-1)
        with self._lock:
            self._session.check()
            rows = self._find(flat, timeout_seconds)
            address = output.flat.ctypes.data
            self._call(kernels.read, (flat, rows, address), timeout_seconds)
        return output.give()

    def add(self, delta: Any, keys: Any, *, timeout_seconds: float | None = None) -> None:
        """Gives each key's delta to the table's updater; a key without a row gets one first.

        Args:
            delta: numbers of keys' shape + (dim,), or flat; not modified.
            keys: as for :meth:`get`.
            timeout_seconds: as for :meth:`get`.

        Raises:
            RowIdError, ShapeMismatchError, DtypeMismatchError: they do not fit; nothing was changed.
            OutOfMemoryError: there is no memory for more rows; nothing was added, but some of the keys may have got
                their initial rows.
            WaitTimeoutError: a worker was stopped while it held a row, for too long; a part of the keys is done.
        """
        array = as_keys(keys)
        values = as_numpy(delta, "delta")
        shape = (*array.shape, self.dim)
        if values.shape != shape and values.shape != (math.prod(shape),):
            raise ShapeMismatchError(
                f"delta has shape {values.shape}; expected {shape}, or {math.prod(shape)} flat"
            )
        data = as_data(values, self._dtype, "delta")
        flat = array.reshape(-1)
        if self._sums_first:
            flat, data = _summed(flat, data, self.dim)
        with self._lock:
            self._session.check()
            rows = self._admit(flat, timeout_seconds)
            self._call(kernels.add, (rows, data.ctypes.data), timeout_seconds, self._update)

    def contains(self, keys: Any) -> npt.NDArray[np.bool_]:
        """Returns for each key whether it has a row; in the keys' shape."""
        array = as_keys(keys)
        with self._lock:
            self._session.check()
            found: npt.NDArray[np.bool_] = self._find(array.reshape(-1), None) >= 0
        return found.reshape(array.shape)

    def items(self, batch: int = 65_536) -> Iterator[tuple[Keys, Array]]:
        """Yields all keys and their rows, in batches of at most ``batch`` keys, in no particular order.

        Every key that has a row when the iteration begins comes exactly once, with the row as it is when its batch is
        read; keys that get a row meanwhile may come or not.
        """
        for keys, rows in self._entries(checked_count(batch, "batch")):
            yield keys, self._read_rows(keys, rows)

    # -- keeping ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes keys, rows and updater state to a safetensors file, whole or not at all.

        Other workers' adds meanwhile may be in it or not: call ``barrier()`` first for an exact moment.
        """
        self._session.check()
        found = list(self._entries(_MOST_AT_ONCE))
        keys = np.concatenate([k for k, _ in found]) if found else np.empty(0, np.int64)
        rows = np.concatenate([r for _, r in found]) if found else np.empty(0, np.int64)
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        values = self._read_rows(keys, rows)
        keyed_saving.save(path, self._spec, keys, values, self._memory.states(rows))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Gives each key of a file that :meth:`save` wrote its row and state; all others read as their initial rows.

        Call it in one worker, and ``barrier()`` before anyone goes on.

        Raises:
            SnapshotError: no such file, not a saved keyed table, or another dim, dtype or updater.
        """
        self._session.check()
        self._replace(*self._read(path))

    def _read(self, path: str | os.PathLike[str]) -> tuple[Keys, Array, list[Array]]:
        """Returns the keys, values and updater state that :meth:`save` wrote, if they fit this table."""
        return keyed_saving.load(path, self._spec)

    def _replace(self, keys: Keys, values: Array, states: list[Array]) -> None:
        """Overwrites rows and updater state; keys that are not among these read as their initial rows."""
        present, rows = (np.concatenate(part) for part in zip(*self._all(), strict=True))
        others = ~np.isin(present, keys)
        initial = self._read_rows(present[others], np.full(np.count_nonzero(others), -1))
        with self._lock:
            self._memory.write(rows[others], initial, self._memory.initial_states(initial.shape))
            self._memory.write(self._admit(keys, None), values, states)

    # -- looking at it ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns what the table holds and what all workers have done with it.

        Returns:
            ``keys``, ``bytes`` (memory in use), ``segments``, and over all workers: ``adds`` and ``gets`` (calls),
            ``rows_added``, ``rows_read``, ``splits``, ``waits``, ``taken_over`` (words of dead workers) and
            ``put_back`` (rows that one of them had half written).
        """
        self._session.check()
        return self._memory.statistics()

    def check(self) -> dict[str, int]:
        """Looks at every entry, as fsck does, while nobody adds.

        Returns:
            ``keys``, ``twins`` (keys entered twice), ``misplaced`` (entries that a search would not find), ``shared``
            (rows of two keys), ``lost`` (rows of no key) and ``held`` (words that somebody holds). All but ``keys``
            are 0 in a sound table; a worker that was killed may cost one lost row until its number has a new life.
        """
        keys, rows = (np.concatenate(part) for part in zip(*self._all(), strict=True))
        with self._lock:
            found = self._find(keys, None)
        return {
            "keys": keys.size,
            "twins": int(keys.size - np.unique(keys).size),
            "misplaced": int((found != rows).sum()),
            "shared": int(rows.size - np.unique(rows).size),
            "lost": int(self._memory.rows_handed_out() - np.unique(rows).size),
            "held": self._memory.held(),
        }

    # -- inside ----------------------------------------------------------------------------------------------

    def _all(self) -> list[tuple[Keys, Keys]]:
        none = np.empty(0, np.int64)
        return [(none, none), *self._entries(_MOST_AT_ONCE)]

    def _call(
        self, kernel: Any, arguments: tuple[Any, ...], timeout_seconds: float | None, *updater: int
    ) -> None:
        """Runs a kernel to its end; under the lock."""
        compiled, session = kernel.compiled(), self._session
        deadline = session.deadline(timeout_seconds)
        control, base, me = session.control.address, self._memory.address, session.worker_id
        code = [compiled(control, base, *updater, me, *arguments, 0)]
        if code[0] & 0xFFFF == FULL:
            raise self._full()
        if code[0]:

            def again() -> int:
                code[0] = compiled(control, base, *updater, me, *arguments, code[0] >> 16)
                if code[0] & 0xFFFF == FULL:
                    raise self._full()
                return int(code[0])

            session.resume(code[0], again, deadline, f"a row of {self!r}")

    def _find(self, keys: Keys, timeout_seconds: float | None) -> Keys:
        rows = np.empty(keys.size, np.int64)
        self._call(kernels.find, (keys, rows), timeout_seconds)
        return rows

    def _admit(self, keys: Keys, timeout_seconds: float | None) -> Keys:
        rows = np.empty(keys.size, np.int64)
        for start in range(0, keys.size, _MOST_AT_ONCE):
            part = slice(start, start + _MOST_AT_ONCE)
            self._make_room(keys[part].size)
            self._call(kernels.admit, (keys[part], rows[part]), timeout_seconds)
        return rows

    def _make_room(self, keys: int) -> None:
        """Looks, now and then, whether the machine has memory for as many more rows as this worker may make."""
        self._budget -= keys * self._memory.bytes_a_key
        if self._budget >= 0:
            return
        free = free_memory()
        needed = keys * self._memory.bytes_a_key
        if free < needed + _SPARE_BYTES:
            raise OutOfMemoryError(
                f"{self!r} has {len(self):,} keys, and only {free / 1e6:,.0f} MB of memory are available: no rows can "
                "be added to new keys"
            )
        self._budget = (free - _SPARE_BYTES) // 16 - needed

    def _full(self) -> OutOfMemoryError:
        return OutOfMemoryError(f"{self!r} is full: it has {len(self):,} keys")

    def _entries(self, batch: int) -> Iterator[tuple[Keys, Keys]]:
        def rest(segment: int) -> None:
            arguments = (
                self._session.control.address,
                self._memory.address,
                self._session.worker_id,
                segment,
            )
            compiled: Callable[..., int] = kernels.rest.compiled()
            with self._lock:
                code = compiled(*arguments)
                if code:
                    self._session.resume(code, lambda: compiled(*arguments), None, f"a segment of {self!r}")

        waiting: list[tuple[Keys, Keys]] = []
        number = 0
        for keys, rows in self._memory.segments(rest):
            self._session.check()
            waiting.append((keys, rows))
            number += keys.size
            if number >= batch:
                all_keys, all_rows = (np.concatenate(part) for part in zip(*waiting, strict=True))
                whole = number - number % batch
                for start in range(0, whole, batch):
                    yield all_keys[start : start + batch], all_rows[start : start + batch]
                waiting, number = [(all_keys[whole:], all_rows[whole:])], number - whole
        if number:
            all_keys, all_rows = (np.concatenate(part) for part in zip(*waiting, strict=True))
            yield all_keys, all_rows

    def _read_rows(self, keys: Keys, rows: Keys) -> Array:
        values = np.empty((keys.size, self.dim), self._dtype)
        with self._lock:
            self._session.check()
            address = values.ctypes.data
            self._call(kernels.read, (keys, rows, address), None)
        return values


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
        raise RowIdError(
            f"keys must be integers of at most 64 bits; got {array.dtype} of shape {array.shape}"
        )
    if array.dtype == np.uint64 and array.max() >= 2**63:
        raise RowIdError(f"keys must fit in 64 bits with a sign; got {array.max()}: take view('int64')")
    return readable(np.ascontiguousarray(array, dtype=np.int64)).reshape(array.shape)


def _summed(keys: Keys, delta: Array, dim: int) -> tuple[Keys, Array]:
    """Returns each different key once, with the sum of its deltas."""
    different, place = np.unique(keys, return_inverse=True)
    if different.size == keys.size:
        return keys, delta
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(different.size))
    total = np.add.reduceat(delta.reshape(-1, dim)[order], starts, axis=0)
    return different, np.ascontiguousarray(total, delta.dtype).reshape(-1)
