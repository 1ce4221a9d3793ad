"""Matrices, whole or by rows."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import numpy.typing as npt

from multiverso.consistency.port import RowIds, bad_row
from multiverso.errors import ShapeMismatchError
from multiverso.runtime.current import current
from multiverso.runtime.session import Session
from multiverso.spec import Initial, TableSpec, checked_count, checked_dtype
from multiverso.tables.convert import Array, Out, as_data, as_numpy, as_row_ids, check_size, writable
from multiverso.tables.handler import TableHandler
from multiverso.tables.pending import Pending
from multiverso.updaters import Updater, resolve


class MatrixTableHandler(TableHandler):
    """A matrix of ``num_row`` x ``num_col`` numbers that all workers of the job share.

    Created as :class:`ArrayTableHandler` is. A row that is read is never torn.

    Args:
        num_row: rows, 1 or more.
        num_col: columns, 1 or more.
        init_value: (num_row, num_col) numbers, or flat, or one number for all; zeros by default.
        dtype, name, updater, initial, session, master: see :class:`ArrayTableHandler`.

    Example:
        >>> import multiverso as mv
        >>> mv.init()
        >>> table = mv.MatrixTableHandler(4, 2)
        >>> table.add([[1, 1], [2, 2], [3, 3]], row_ids=[0, 3, 3])
        >>> table.get(row_ids=[3, 0])
        array([[5., 5.],
               [1., 1.]], dtype=float32)
        >>> mv.shutdown()
    """

    def __init__(
        self,
        num_row: int,
        num_col: int,
        init_value: Any = None,
        *,
        dtype: npt.DTypeLike = "float32",
        name: str | None = None,
        updater: str | Updater = "add",
        initial: Initial = "master",
        session: Session | None = None,
        master: bool = False,
    ) -> None:
        rule = resolve(updater)
        spec = TableSpec(
            kind="matrix",
            rows=checked_count(num_row, "num_row"),
            columns=checked_count(num_col, "num_col"),
            dtype=checked_dtype(dtype),
            updater=rule.name,
            hyper=tuple(map(float, rule.hyper)),
            states=rule.states,
            initial=initial,
            name=name,
            mean=rule.mean,
        )
        super().__init__(session or current(), spec, rule, init_value, master)

    @overload  # type: ignore[override]
    def get(
        self,
        row_ids: Any = None,
        out: None = None,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Array: ...
    @overload
    def get(
        self,
        row_ids: Any,
        out: Out,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Out: ...
    @overload
    def get(
        self,
        row_ids: Any = None,
        *,
        out: Out,
        sync: bool = True,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Out: ...
    def get(
        self,
        row_ids: Any = None,
        out: Any = None,
        sync: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Returns the whole matrix, or some of its rows.

        Args:
            row_ids: a one-dimensional sequence of integers in 0 .. num_row - 1, in any order, also repeated;
                None for all rows.
            out: written to and returned: (len(row_ids), num_col), or flat.
            sync, dtype, timeout_seconds: see :meth:`TableHandler.get`.

        Returns:
            (num_row, num_col), or (len(row_ids), num_col).

        Raises:
            RowIdError: an id is no integer, or no row.
        """
        if row_ids is None:
            return super().get(out, sync, dtype=dtype, timeout_seconds=timeout_seconds)
        deadline = self._ready(timeout_seconds)
        ids = as_row_ids(row_ids, self._spec.rows)
        shape = (ids.size, self._spec.columns)
        output = self._output(out, dtype, shape)
        return self._operations.get_rows(ids, output.flat, deadline, output.give)

    def add(self, data: Any = None, row_ids: Any = None, sync: bool = False) -> None:  # type: ignore[override]
        """Adds to the whole matrix, or to some of its rows, through the table's updater.

        Args:
            data: (num_row, num_col), or (len(row_ids), num_col); or flat. It is not modified.
            row_ids: as for :meth:`get`; a row that is named twice gets both.
            sync: see :meth:`TableHandler.add`.

        Raises:
            RowIdError: an id is no integer, or no row; nothing was changed.
        """
        if data is None:
            raise ShapeMismatchError(
                "add needs data: (num_row, num_col) numbers, or a row for each of row_ids"
            )
        if row_ids is None:
            super().add(data, sync)
            return
        self._ready(None)
        ids, delta = self._rows(data, row_ids)
        self._operations.add_rows(ids, delta)

    def exchange(
        self, local: Any, last: Any, row_ids: Any = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Pushes ``local - last`` and pulls the result into both: of the whole matrix, or of some of its rows.

        Of rows it is an ``add`` and a ``get``: other workers' adds may come between.

        Args:
            local: (num_row, num_col), or (len(row_ids), num_col), or flat; of the table's dtype, C-contiguous and
                writable; overwritten.
            last: the same; overwritten.
            row_ids: as for :meth:`get`; of a row that is named twice both differences are added.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            RowIdError: an id is no integer, or no row; nothing was changed.
        """
        if row_ids is None:
            super().exchange(local, last, timeout_seconds=timeout_seconds)
            return
        deadline = self._ready(timeout_seconds)
        ids, a, b = self._pair_of_rows(local, last, row_ids)
        self._operations.exchange_rows(ids, a, b, deadline)

    @overload
    def snapshot(self, out: None = None, row_ids: Any = None) -> Array: ...
    @overload
    def snapshot(self, out: Out, row_ids: Any = None) -> Out: ...
    def snapshot(self, out: Any = None, row_ids: Any = None) -> Any:
        """Returns a copy of the whole matrix or of some rows, outside the rounds and clocks.

        See :meth:`TableHandler.snapshot`.

        Args:
            out: as for :meth:`get`.
            row_ids: as for :meth:`get`.

        Raises:
            RowIdError: an id is no integer, or no row.
        """
        if row_ids is None:
            return super().snapshot(out)
        self._ready(None)
        ids = as_row_ids(row_ids, self._spec.rows)
        output = self._output(out, None, (ids.size, self._spec.columns))
        self._operations.settle(None)
        self._how.get_rows_again(ids, output.flat)
        return output.give()

    def add_async(self, data: Any, row_ids: Any = None) -> Pending:
        """Like :meth:`add`, in the background; see :meth:`TableHandler.add_async`."""
        if row_ids is None:
            return super().add_async(data)
        self._session.check()
        ids, delta = (np.array(part) for part in self._rows(data, row_ids))
        self._refuse_bad(ids)
        return self._later(
            lambda: self._operations.add_rows(ids, delta),
            "an add of rows",
            lambda: (ids.tobytes(), delta.tobytes()),
        )

    def get_async(self, row_ids: Any = None, out: Any = None) -> Pending:  # type: ignore[override]
        """Like :meth:`get`, in the background; ``wait()`` returns the values."""
        if row_ids is None:
            return super().get_async(out)
        self._session.check()
        ids = np.array(as_row_ids(row_ids, self._spec.rows))
        self._refuse_bad(ids)
        output = self._output(out, None, (ids.size, self._spec.columns))

        def get() -> Any:
            return self._operations.get_rows(ids, output.flat, None, output.give)

        return self._later(get, "a get of rows", lambda: (ids.tobytes(), id(out)))

    def exchange_async(self, local: Any, last: Any, row_ids: Any = None) -> Pending:
        """Like :meth:`exchange`, in the background. Leave both arrays alone until ``wait()`` returns."""
        if row_ids is None:
            return super().exchange_async(local, last)
        self._session.check()
        ids, a, b = self._pair_of_rows(local, last, row_ids)
        ids = np.array(ids)
        self._refuse_bad(ids)
        return self._later(
            lambda: self._operations.exchange_rows(ids, a, b, None),
            "an exchange of rows",
            lambda: (ids.tobytes(), a.ctypes.data, b.ctypes.data),
        )

    def _refuse_bad(self, ids: RowIds) -> None:
        """Before an operation goes into the queue, where nobody may wait for it."""
        outside = (ids < 0) | (ids >= self._spec.rows)
        if outside.any():
            raise bad_row(ids, int(np.argmax(outside)), self._spec)

    def _pair_of_rows(self, local: Any, last: Any, row_ids: Any) -> tuple[RowIds, Array, Array]:
        ids = as_row_ids(row_ids, self._spec.rows)
        size = ids.size * self._spec.columns
        a = writable(local, size, self._dtype, "local")
        b = writable(last, size, self._dtype, "last")
        if np.may_share_memory(a, b):
            raise ShapeMismatchError(
                "local and last share memory; they must be two arrays (last = local.copy())"
            )
        return ids, a, b

    def _rows(self, data: Any, row_ids: Any) -> tuple[RowIds, Array]:
        ids = as_row_ids(row_ids, self._spec.rows)
        array = as_numpy(data, "data")
        check_size(array, (ids.size, self._spec.columns), self._spec, "data")
        return ids, as_data(array, self._dtype, "data")
