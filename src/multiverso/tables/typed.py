"""Types for checkers of user code: a table's dtype and a result as parameters, and the options that all tables take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np

from multiverso.runtime.session.session import Session
from multiverso.spec.table import Initial
from multiverso.updaters import Updater, UpdaterName

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default; every checker brings its own

    Scalar = TypeVar("Scalar", bound=np.generic, default=Any)
    Result = TypeVar("Result", default=Any)
else:
    from typing import TypeVar

    Scalar = TypeVar("Scalar", bound=np.generic)
    Result = TypeVar("Result")

Float16 = Literal["float16"] | type[np.float16]
Float32 = Literal["float32"] | type[np.float32]
Float64 = Literal["float64"] | type[np.float64] | type[float]
Int32 = Literal["int32"] | type[np.int32]
Int64 = Literal["int64"] | type[np.int64] | type[int]


class TableOptions(TypedDict, total=False):
    """What `ArrayTableHandler` and `MatrixTableHandler` take beside their size, initial value and dtype."""

    name: str | None
    updater: UpdaterName | Updater
    initial: Initial
    session: Session | None
    master: bool
    wire: str | None
    every: float | str | None
