"""One-dimensional tables."""

from __future__ import annotations

from typing import Any, Unpack, overload

import numpy as np
import numpy.typing as npt

from multiverso.hosts.options import table_words
from multiverso.runtime.session.current import current
from multiverso.runtime.session.session import Session
from multiverso.spec.table import Initial, checked_count, checked_dtype
from multiverso.tables.handler import TableHandler
from multiverso.tables.table import spec_with
from multiverso.tables.typed import Float32, Float64, Int32, Int64, Scalar, TableOptions
from multiverso.updaters import Updater, UpdaterName, resolve


class ArrayTableHandler(TableHandler[Scalar]):
    """An array of ``size`` numbers that all workers of the job share.

    Creating one without a name is collective: it returns when every live worker has created an equal one, and
    the initial value is visible then. With a ``name``, in an asynchronous job, the first worker creates the table
    and others attach to it whenever they come.

    Args:
        size: how many numbers, 1 or more.
        init_value: ``size`` numbers in any shape, or one number for all; zeros by default.
        dtype: of the table: float32 (default), float64, int32 or int64, whatever the initial value's.
        name: create the table by this name, or attach to it; where reads wait for others, all workers create it
            together.
        updater: how adds reach the values: a name (``"add"``, ``"sgd"``) or an ``Updater``.
        initial: whose ``init_value`` counts: ``"master"`` (the lowest of the workers that create it: worker 0's, unless
            that has left), ``"mean"`` or ``"sum"`` of all.
        session: the session it belongs to; the current one by default.
        master: this worker's initial value counts instead of the lowest worker's (one worker may say so).
        wire, every: of this table, instead of ``init``'s: how differences travel between hosts, and how often (a bare
            number is seconds). They have no effect on one host, and in synchronous jobs.
        holds: a description of its contents, equal in all workers.

    Raises:
        NotInitializedError: there is no session; call ``init`` first.
        ShapeMismatchError: ``size`` is not an integer of at least 1, or ``init_value`` does not have as many numbers.
        DtypeMismatchError: a dtype that tables do not have, or initial values that do not fit it.
        ValueError: an unknown updater's name, or an invalid ``name`` or ``initial``.
        StartupError: an unknown ``wire``, or an invalid ``every``.
        TableMismatchError: other workers asked for another table.
        OutOfMemoryError: there is not enough memory.
        WaitTimeoutError: not all workers have made it in time (``init(start_timeout_seconds=)``).
        WorkerLostError, NodeLostError, DeadlockError: the wait for the others failed.

    Examples:
        >>> import multiverso as mv
        >>> session = mv.init()
        >>> table = mv.ArrayTableHandler(3, init_value=[1, 2, 3])
        >>> table.add([1, 1, 1])
        >>> table.get()
        array([2., 3., 4.], dtype=float32)
        >>> mv.shutdown()
    """

    # fmt: off
    @overload
    def __init__(
        self: ArrayTableHandler[np.float32], size: int, init_value: Any = None, *,
        dtype: Float32 = ..., **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayTableHandler[np.float64], size: int, init_value: Any = None, *,
        dtype: Float64, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayTableHandler[np.int32], size: int, init_value: Any = None, *,
        dtype: Int32, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: ArrayTableHandler[np.int64], size: int, init_value: Any = None, *,
        dtype: Int64, **options: Unpack[TableOptions],
    ) -> None: ...
    @overload
    def __init__(
        self, size: int, init_value: Any = None, *, dtype: npt.DTypeLike, **options: Unpack[TableOptions]
    ) -> None: ...
    # fmt: on
    def __init__(
        self,
        size: int,
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
        holds: str = "",
    ) -> None:
        rule = resolve(updater)
        spec = spec_with(
            rule,
            kind="array",
            rows=1,
            columns=checked_count(size, "size"),
            dtype=checked_dtype(dtype),
            initial=initial,
            name=name,
            holds=holds,
            **table_words(wire, every),
        )
        super().__init__(session or current(), spec, rule, init_value, master)
