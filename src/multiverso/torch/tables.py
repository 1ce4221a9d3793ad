"""Tables that take and give tensors, by the names of the original Torch binding; and the way to and from a GPU."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch

from multiverso import tables
from multiverso.saying import say
from multiverso.tables.convert import as_row_ids
from multiverso.tables.typed import TableOptions

Array = np.ndarray[Any, Any]


class Staging:
    """Pinned memory that is kept from one call to the next: fresh memory costs more than both copies. Any thread.

    It grows to the largest call's size and goes with this object. Where none can be pinned, ordinary memory is taken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None

    def bring(self, read: Callable[[Array], Any], count: int, dtype: np.dtype[Any], device: torch.device) -> Any:
        """Returns a flat tensor on the device with what ``read`` writes into an array of so many numbers."""
        with self._lock:
            host = self._array(count, dtype)
            read(host)
            return torch.from_numpy(host).to(device)

    def send(self, tensor: Any, dtype: np.dtype[Any], write: Callable[[Array], Any]) -> None:
        """Gives ``write`` a flat array with a tensor's numbers; it must not keep it."""
        with self._lock:
            host = self._array(tensor.numel(), dtype)
            torch.from_numpy(host).copy_(tensor.detach().reshape(-1))
            write(host)

    def _array(self, count: int, dtype: np.dtype[Any]) -> Array:
        nbytes = count * dtype.itemsize
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = None  # two would not fit where one does
            self._memory = _pinned(nbytes)
        array: Array = self._memory[:nbytes].numpy().view(dtype)
        return array


def _pinned(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        say(f"no {nbytes:,} bytes could be pinned for the way to the GPU, so it is slower: {error}")
        return torch.empty(nbytes, dtype=torch.uint8)


_TABLE_DTYPES = {torch.float64: "float64", torch.int32: "int32", torch.int64: "int64"}
_STAGED = {**_TABLE_DTYPES, torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "float32"}


class _TensorHandler:
    """The common part of both kinds: dtype and device of the tensors that are given out."""

    def __init__(self, init_value: Any, dtype: Any, device: Any) -> None:
        given = init_value if isinstance(init_value, torch.Tensor) else None
        # integers make a float table, which takes gradients, as in the original; dtype= makes another one
        floating = given is not None and (given.is_floating_point() or given.is_complex())
        self._dtype = dtype or (given.dtype if given is not None and floating else torch.float32)
        self._device = torch.device(device or (given.device if given is not None else "cpu"))
        self._staging = Staging()
        if self._dtype.is_complex:
            raise TypeError(f"a table holds real numbers; got {self._dtype}")

    @property
    def _table_dtype(self) -> str:
        return _TABLE_DTYPES.get(self._dtype, "float32")

    def _got(self, get: Callable[..., Any], shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        """Returns what a table's ``get`` gives, as a tensor on this handler's device."""
        if self._device.type != "cuda":
            return torch.from_numpy(get()).to(self._device, self._dtype)
        read = self._staging.bring(get, math.prod(shape), dtype, self._device)
        return read.to(self._dtype).reshape(shape)

    def _give(self, add: Callable[[Any], Any], data: Any, shape: tuple[int, ...], dtype: Any) -> None:
        """Gives a tensor to a table's ``add``, through memory that is kept where it comes from a GPU and fits."""
        is_ours = isinstance(data, torch.Tensor) and data.is_cuda and _STAGED.get(data.dtype) == dtype.name
        if is_ours and data.numel() == math.prod(shape):
            self._staging.send(data, dtype, add)
        else:
            add(data)


class ArrayTableHandler(_TensorHandler):
    """An array of ``size`` numbers that all workers share, as one-dimensional tensors.

    Args:
        size: how many numbers.
        init_value: a tensor, a sequence, or one number for all. As in the original Torch binding, the master's
            counts.
        dtype: of the tensors that `get` returns; the initial value's where that is floating, else float32.
        device: of the tensors that `get` returns; the initial value's, else the CPU.
        options: ``initial=``, ``name=``, ``updater=``, ``session=``: see `multiverso.ArrayTableHandler`.

    Attributes:
        table: the `multiverso` table underneath, with everything else that it can do.

    16-bit tensors go into a float32 table; float64, int32 and int64 ones into a table of their dtype.

    Examples:
        >>> import multiverso.torch as mvt, torch
        >>> session = mvt.init()
        >>> table = mvt.ArrayTableHandler(3, torch.tensor([1.0, 2.0, 3.0]))
        >>> table.add(torch.ones(3))
        >>> table.get()
        tensor([2., 3., 4.])
        >>> mvt.shutdown()
    """

    def __init__(
        self,
        size: int,
        init_value: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(init_value, dtype, device)
        self.table = tables.ArrayTableHandler(size, init_value, dtype=self._table_dtype, **options)

    def get(self, sync: bool = True) -> torch.Tensor:
        """Returns the values: a new tensor of shape (size,), of this handler's dtype and device."""
        return self._got(partial(self.table.get, sync=sync), self.table.shape, self.table.dtype)

    def add(self, data: Any, sync: bool = False) -> None:
        """Adds to the whole array.

        Args:
            data: ``size`` numbers, in any shape, on any device. Not modified.
            sync: True returns when the add is applied; as applying at once is fastest, it always is.

        Raises:
            ShapeMismatchError, DtypeMismatchError: they do not fit; nothing was changed.
        """
        self._give(partial(self.table.add, sync=sync), data, self.table.shape, self.table.dtype)


class MatrixTableHandler(_TensorHandler):
    """A matrix of ``num_row`` x ``num_col`` numbers that all workers share, as two-dimensional tensors.

    Args:
        num_row: rows.
        num_col: columns.
        init_value: as of `ArrayTableHandler`.
        dtype, device, options: see `ArrayTableHandler`.

    Attributes:
        table: the `multiverso` table underneath.
    """

    def __init__(
        self,
        num_row: int,
        num_col: int,
        init_value: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__(init_value, dtype, device)
        self.table = tables.MatrixTableHandler(num_row, num_col, init_value, dtype=self._table_dtype, **options)

    def get(self, row_ids: Any = None, sync: bool = True) -> torch.Tensor:
        """Returns the matrix, or some of its rows: a new tensor on this handler's device.

        Args:
            row_ids: integers in 0 .. num_row - 1, a tensor or a sequence; None for all rows.
            sync: accepted for older programs; a read always comes after this worker's own adds.

        Returns:
            A tensor of shape (num_row, num_col), or (number of ids, num_col).

        Raises:
            RowIdError: an id is not a row.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait failed.
        """
        ids, shape = self._rows(row_ids)
        return self._got(partial(self.table.get, ids, sync=sync), shape, self.table.dtype)

    def add(self, data: Any = None, row_ids: Any = None, sync: bool = False) -> None:
        """Adds to the matrix, or to some of its rows.

        Args:
            data: (num_row, num_col) numbers, or (number of ids, num_col); any device. Not modified.
            row_ids: as for `get`; a row that is named twice gets both.
            sync: True returns when the add is applied; as applying at once is fastest, it always is.

        Raises:
            RowIdError, ShapeMismatchError, DtypeMismatchError: they do not fit; nothing was changed.
        """
        ids, shape = self._rows(row_ids)
        self._give(partial(self.table.add, row_ids=ids, sync=sync), data, shape, self.table.dtype)

    def _rows(self, row_ids: Any) -> tuple[Any, tuple[int, ...]]:
        """Returns row ids as the table takes them, and the shape of their rows."""
        if row_ids is None:
            return None, self.table.shape
        ids = as_row_ids(row_ids, self.table.shape[0])
        return ids, (ids.size, self.table.shape[1])
