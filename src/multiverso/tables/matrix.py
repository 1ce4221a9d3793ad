"""Matrices, whole or by rows."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from multiverso.consistency.protocol import Call, RowIds, Versions, refuse_bad_rows
from multiverso.deadline import Deadline
from multiverso.errors import ShapeMismatchError
from multiverso.hosts.options import table_words
from multiverso.kernels.plain_arrays import are_plain_rows
from multiverso.runtime.session.current import current
from multiverso.runtime.session.session import Session
from multiverso.spec.table import Initial, Partition, checked_count, checked_dtype
from multiverso.tables.convert import INT64, Array, Out, as_row_ids, as_shaped, refuse_overlap, writable
from multiverso.tables.handler import TableHandler
from multiverso.tables.operations import ADD_ROWS, EXCHANGE_ROWS, GET_CHANGED, GET_ROWS
from multiverso.tables.output import Output
from multiverso.tables.pending import Pending
from multiverso.tables.table import spec_with
from multiverso.tables.typed import Float16, Float32, Float64, Int32, Int64, Scalar, TableOptions
from multiverso.updaters import Updater, UpdaterName, resolve


class MatrixTableHandler(TableHandler[Scalar]):
    """A matrix of ``num_row`` x ``num_col`` numbers that all workers of the job share.

    Created as `ArrayTableHandler` is. A row that is read is never torn.

    Args:
        num_row: rows, 1 or more.
        num_col: columns, 1 or more.
        init_value: (num_row, num_col) numbers, or flat, or one number for all; zeros by default.
        dtype, name, updater, initial, session, master, wire, every: see `ArrayTableHandler`.

    Examples:
        >>> import multiverso as mv
        >>> session = mv.init()
        >>> table = mv.MatrixTableHandler(4, 2)
        >>> table.add([[1, 1], [2, 2], [3, 3]], row_ids=[0, 3, 3])
        >>> table.get(row_ids=[3, 0])
        array([[5., 5.],
               [1., 1.]], dtype=float32)
        >>> mv.shutdown()
    """

    # fmt: off
    @overload
    def __init__(
        self: MatrixTableHandler[np.float32], num_row: int, num_col: int, init_value: Any = None, *,
        dtype: Float32 = ..., **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: MatrixTableHandler[np.float64], num_row: int, num_col: int, init_value: Any = None, *,
        dtype: Float64, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: MatrixTableHandler[np.int32], num_row: int, num_col: int, init_value: Any = None, *,
        dtype: Int32, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: MatrixTableHandler[np.int64], num_row: int, num_col: int, init_value: Any = None, *,
        dtype: Int64, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self, num_row: int, num_col: int, init_value: Any = None, *,
        dtype: npt.DTypeLike, **options: Unpack[TableOptions],
    ) -> None: ...
    # fmt: on
    def __init__(
        self,
        num_row: int,
        num_col: int,
        init_value: Any = None,
        *,
        dtype: npt.DTypeLike = "float32",
        name: str | None = None,
        updater: UpdaterName | Updater = "add",
        initial: Initial = "master",
        session: Session | None = None,
        master: bool = False,
        wire: str | None = None,
        every: float | str | None = None,
    ) -> None:
        rule = resolve(updater)
        spec = spec_with(
            rule,
            kind="matrix",
            rows=checked_count(num_row, "num_row"),
            columns=checked_count(num_col, "num_col"),
            dtype=checked_dtype(dtype),
            initial=initial,
            name=name,
            **table_words(wire, every),
        )
        super().__init__(session or current(), spec, rule, init_value, master)
        self._partition = Partition.of(spec)
        self._seen: Versions | None = None  # of each stripe what `get` has last returned of it, if that was asked for
        # (row_ids, rows): whether a kernel can take both as they are
        self._are_plain = partial(are_plain_rows.compiled(), id(ndarray), id(self._dtype), id(INT64), spec.columns)

    @overload  # type: ignore[override]
    def get(
        self,
        row_ids: Any = None,
        out: None = None,
        sync: bool = True,
        *,
        dtype: None = None,
        timeout_seconds: float | None = None,
    ) -> npt.NDArray[Scalar]: ...
    @overload
    def get(
        self,
        row_ids: Any = None,
        out: None = None,
        sync: bool = True,
        *,
        dtype: Float16,
        timeout_seconds: float | None = None,
    ) -> npt.NDArray[np.float16]: ...
    @overload
    def get(
        self,
        row_ids: Any = None,
        out: None = None,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike,
        timeout_seconds: float | None = None,
    ) -> Array: ...
    @overload
    def get(self, row_ids: Any, out: Out, sync: bool = True, *, timeout_seconds: float | None = None) -> Out: ...
    @overload
    def get(self, row_ids: Any = None, *, out: Out, sync: bool = True, timeout_seconds: float | None = None) -> Out: ...
    @overload
    def get(
        self, *, changed: Literal[True], timeout_seconds: float | None = None
    ) -> tuple[RowIds, npt.NDArray[Scalar]]: ...
    def get(
        self,
        row_ids: Any = None,
        out: Any = None,
        sync: bool = True,
        *,
        changed: bool = False,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Returns the whole matrix, some of its rows, or those that have changed.

        A row that is read is never torn; several rows are not of one moment.

        Args:
            row_ids: a one-dimensional sequence of integers in 0 .. num_row - 1, in any order, also repeated;
                None for all rows.
            out: written to and returned: (len(row_ids), num_col), or flat.
            changed: return ``(row_ids, values)``: the rows that any worker, this one included, has changed since the
                last such call of this handler, and the other rows of their stripes (up to 8 KiB); the first time all
                rows. In synchronous mode, where it ends a round, all rows each time. Writes to ``memory()`` do not
                count. Not with ``row_ids``, ``out`` or ``dtype``.
            sync, dtype, timeout_seconds: see `TableHandler.get`.

        Returns:
            (num_row, num_col), or (len(row_ids), num_col); with ``changed`` the ids, int64 and ascending, and
            (len(ids), num_col).

        Raises:
            RowIdError: an id is not an integer, or no row.
            ValueError: ``changed`` beside another choice of rows or place.
        """
        if changed:
            if row_ids is not None or out is not None or dtype is not None:
                raise ValueError(
                    "get(changed=True) chooses the rows by itself, and gives new arrays: it takes no "
                    "row_ids, out or dtype"
                )
            return self._get_changed(timeout_seconds)
        if row_ids is None:
            return super().get(out, sync, dtype=dtype, timeout_seconds=timeout_seconds)
        deadline = self._ready(timeout_seconds)
        if self._are_plain(row_ids, out):
            operations = self._operations
            operations.run(GET_ROWS, operations.how.get_rows, (row_ids, out), deadline)
            return out
        ids = as_row_ids(row_ids, self._spec.rows)
        return self._get_rows(ids, self._output(out, dtype, (ids.size, self._spec.columns)), deadline)

    def _get_rows(self, ids: RowIds, output: Output, deadline: Deadline | None) -> Any:
        operations = self._operations
        return operations.run(GET_ROWS, operations.how.get_rows, (ids, output.flat), deadline, output.give)

    def _get_changed(self, timeout_seconds: float | None) -> tuple[RowIds, Array]:
        by_stripe = self._how.by_stripe
        if by_stripe is None:
            values: Array = super().get(timeout_seconds=timeout_seconds)
            return np.arange(self._spec.rows), values
        deadline = self._ready(timeout_seconds)
        parts = self._partition
        found: list[Array] = []
        if self._seen is None:
            self._seen = np.full(parts.stripe_count, -1, np.int64)  # none has a version below 0
        seen = self._seen

        def read(call: Call, deadline: Deadline | None) -> None:
            changed = np.empty_like(seen)  # looked for only here: what a call that raised has left is done before
            stripes = changed[: by_stripe.changed_stripes(seen, changed, deadline)]
            rows = ((stripes[:, None] << parts.shift) + np.arange(1 << parts.shift)).reshape(-1)
            row_ids, versions = rows[rows < self._spec.rows], np.empty_like(stripes)
            flat = np.empty(row_ids.size * self._spec.columns, self._dtype)
            by_stripe.get_stripes(stripes, versions, flat, Call(), deadline)
            found[:] = stripes, versions, row_ids, flat

        self._operations.run(GET_CHANGED, read, (), deadline)
        stripes, versions, row_ids, flat = found
        result = row_ids, flat.reshape(-1, self._spec.columns)
        seen[stripes] = versions  # last: if an exception comes before it, the next call returns them again
        return result

    def add(  # type: ignore[override]
        self, data: Any = None, row_ids: Any = None, sync: bool = False, *, weight: int | None = None
    ) -> None:
        """Adds to the whole matrix, or to some of its rows, through the table's updater.

        Args:
            data: (num_row, num_col), or (len(row_ids), num_col); or flat, or one number for all. It is not modified.
            row_ids: as for `get`; a row that is named twice gets both.
            sync, weight: see `TableHandler.add`.

        Raises:
            RowIdError: an id is not an integer, or no row; nothing was changed.
        """
        if data is None:
            raise ShapeMismatchError("add needs data: (num_row, num_col) numbers, or a row for each of row_ids")
        if row_ids is None:
            super().add(data, sync, weight=weight)
            return
        self._ready(None)
        if self._are_plain(row_ids, data):
            ids, delta = row_ids, data
        else:
            ids, delta = self._rows(data, row_ids)
        if self._transforms:
            delta = self._transformed(delta, ids.size)
        operations = self._operations
        if weight is None:
            operations.run(ADD_ROWS, operations.how.add_rows, (ids, delta))
        else:
            self._weighted(ADD_ROWS, weight, (ids, delta))[1]()

    def exchange(self, local: Any, last: Any, row_ids: Any = None, *, timeout_seconds: float | None = None) -> None:
        """Pushes ``local - last`` and pulls the result into both: of the whole matrix, or of some of its rows.

        Of rows too it is one step for each row; in synchronous mode an ``add`` and a ``get``.

        Args:
            local: (num_row, num_col), or (len(row_ids), num_col), or flat; of the table's dtype, C-contiguous and
                writable; overwritten.
            last: the same; overwritten.
            row_ids: as for `get`; of a row that is named twice both differences are added, and both get the sum.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            RowIdError: an id is not an integer, or no row; nothing was changed.
        """
        if row_ids is None:
            super().exchange(local, last, timeout_seconds=timeout_seconds)
            return
        deadline = self._ready(timeout_seconds)
        ids, a, b = self._pair_of_rows(local, last, row_ids)
        if self._schedule is not None:
            self._follow_schedule()
        self._operations.exchange_rows(ids, a, b, deadline)

    @overload
    def snapshot(self, out: None = None, row_ids: Any = None) -> npt.NDArray[Scalar]: ...
    @overload
    def snapshot(self, out: Out, row_ids: Any = None) -> Out: ...
    def snapshot(self, out: Any = None, row_ids: Any = None) -> Any:
        """Returns a copy of the whole matrix or of some rows, outside the rounds and clocks.

        See `TableHandler.snapshot`.

        Args:
            out: as for `get`.
            row_ids: as for `get`.

        Raises:
            RowIdError: an id is not an integer, or no row.
        """
        if row_ids is None:
            return super().snapshot(out)
        self._ready(None)
        ids = as_row_ids(row_ids, self._spec.rows)
        output = self._output(out, None, (ids.size, self._spec.columns))
        self._operations.settle(None)
        self._how.get_rows_again(ids, output.flat)
        return output.give()

    def add_async(self, data: Any, row_ids: Any = None, *, weight: int | None = None) -> Pending[None]:
        """Like `add`, in the background; see `TableHandler.add_async`."""
        if row_ids is None:
            return super().add_async(data, weight=weight)
        self._session.check()
        ids, delta = self._rows(data, row_ids)
        ids, delta = np.array(ids), np.array(self._transformed(delta, ids.size))
        refuse_bad_rows(ids, self._spec)  # now: perhaps no caller waits for what goes into the queue
        return self._add_later(ADD_ROWS, weight, (ids, delta))

    @overload  # type: ignore[override]
    def get_async(self, row_ids: Any = None, out: None = None) -> Pending[npt.NDArray[Scalar]]: ...
    @overload
    def get_async(self, row_ids: Any = None, *, out: Out) -> Pending[Out]: ...
    @overload
    def get_async(self, row_ids: Any, out: Out) -> Pending[Out]: ...
    def get_async(self, row_ids: Any = None, out: Any = None) -> Pending[Any]:
        """Like `get`, in the background; ``wait()`` returns the values."""
        if row_ids is None:
            return super().get_async(out)
        self._session.check()
        ids = np.array(as_row_ids(row_ids, self._spec.rows))
        refuse_bad_rows(ids, self._spec)
        output = self._output(out, None, (ids.size, self._spec.columns))
        return self._later(GET_ROWS, (ids.tobytes(), id(out)), lambda: self._get_rows(ids, output, None))

    def exchange_async(self, local: Any, last: Any, row_ids: Any = None) -> Pending[None]:
        """Like `exchange`, in the background. Leave both arrays alone until ``wait()`` returns."""
        if row_ids is None:
            return super().exchange_async(local, last)
        self._session.check()
        ids, a, b = self._pair_of_rows(local, last, row_ids)
        ids = np.array(ids)
        refuse_bad_rows(ids, self._spec)
        self._follow_schedule()
        operations = self._operations
        return self._later(EXCHANGE_ROWS, (ids, a, b), lambda: operations.exchange_rows(ids, a, b, None))

    def _pair_of_rows(self, local: Any, last: Any, row_ids: Any) -> tuple[RowIds, Array, Array]:
        if self._clip is not None:
            self._refuse_clipped()
        ids = as_row_ids(row_ids, self._spec.rows)
        size = ids.size * self._spec.columns
        a = writable(local, size, self._dtype, "local")
        b = writable(last, size, self._dtype, "last")
        return ids, *refuse_overlap(a, b)

    def _rows(self, data: Any, row_ids: Any) -> tuple[RowIds, Array]:
        ids = as_row_ids(row_ids, self._spec.rows)
        shape = ids.size, self._spec.columns
        return ids, as_shaped(data, shape, self._dtype, "data", self._spec.kind)
