"""A model's values on their way into the shared arrays and out of them again, for models that are not views.

Of 16-bit values only what changed since they were given out is taken: the shared ones are finer, and a rounding error
is nothing that this worker has learned. Every step can be called again after an exception anywhere in it.

`Model` is what else a binding and its user keep beside the shared arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.checkpoints import Parts
from multiverso.errors import DtypeMismatchError, ShapeMismatchError, SnapshotError

Array = NDArray[Any]


def shared_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which arrays of ``dtype`` are shared: float32, or float64 for float64.

    Sums stay in float32 for 16-bit floats, where small changes would vanish.

    Raises:
        DtypeMismatchError: not a real floating dtype; integers and booleans are counters and masks, which
            neither a sum nor an average keeps meaningful, so they stay with their worker.
    """
    if dtype == np.float64:
        return np.dtype(np.float64)
    if dtype == np.float32 or dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    raise DtypeMismatchError(
        f"a parameter of dtype {dtype} cannot be shared: expected float16, bfloat16, float32 or float64; "
        "keep integer and boolean arrays out of the shared ones"
    )


class Values:
    """The values of a model beside the arrays that are shared.

    Args:
        views: the shared arrays, of this worker, in `shared_dtype`.
        dtypes: the model's own, one for each view.

    Attributes:
        placing: what is on its way: for each view what it is to be and, of 16 bits, what was handed in, in float32.
    """

    def __init__(self, views: list[Array], dtypes: list[np.dtype[Any]]) -> None:
        self._views = views
        self._dtypes = dtypes
        self._given: dict[int, Array] = {}  # 16-bit values as they were given out, in float32
        self.placing: dict[int, tuple[Array, Array | None]] = {}

    def give(self) -> list[Array]:
        """Returns fresh copies of all views, in the dtypes of the model."""
        out = [view.astype(dtype) for view, dtype in zip(self._views, self._dtypes, strict=True)]
        self._given = {i: a.astype(np.float32) for i, a in enumerate(out) if a.dtype.itemsize == 2}
        return out

    def take(self, values: Sequence[Any]) -> None:
        """Takes a model's values into the views.

        Raises:
            ShapeMismatchError: other shapes, or another number of arrays; nothing has been taken.
        """
        new: dict[int, tuple[Array, Array | None]] = {}
        for index, narrow in self.take_wide(values).items():
            value = narrow.astype(np.float32)
            new[index] = self._views[index] + (value - self._given[index]), value
        self.placing = new
        self.place()

    def take_wide(self, values: Sequence[Any]) -> dict[int, Array]:
        """Takes those into the views that are as fine as they are; returns the others, which have 16 bits."""
        new = [np.asarray(value) for value in values]
        self._check_shapes(new)
        for index, (view, value) in enumerate(zip(self._views, new, strict=True)):
            if index not in self._given:
                np.copyto(view, value, casting="same_kind")
        return {index: new[index] for index in self._given}

    def changed_since(self, values: Sequence[Any], taken: Sequence[Any]) -> dict[int, Array]:
        """Returns what a model has changed since its values were ``taken``, where it has."""
        new = [np.asarray(value) for value in values]
        self._check_shapes(new)
        pairs = enumerate(zip(new, map(np.asarray, taken), strict=True))
        return {index: one - other for index, (one, other) in pairs if one.tobytes() != other.tobytes()}

    def plus(self, changes: dict[int, Array]) -> dict[int, tuple[Array, Array | None]]:
        """Returns what is to be placed so that changes are added to what is in the views."""
        return {index: (self._views[index] + change, None) for index, change in changes.items()}

    def place(self) -> None:
        """Writes what has been worked out into the views, or what is left of it: as often as it is called."""
        for index, (view, given) in self.placing.items():
            np.copyto(self._views[index], view)
            if given is not None:
                self._given[index] = given
        self.placing = {}

    def _check_shapes(self, values: list[Array]) -> None:
        shapes, expected = [value.shape for value in values], [view.shape for view in self._views]
        if shapes != expected:
            raise ShapeMismatchError(
                f"the model's arrays have the shapes {shapes} now; they had {expected} when they were shared"
            )


Files = Callable[[Path], None]


@dataclass(frozen=True)
class Model:
    """A binding's functions to read and write the rest of the model; each may be left out.

    Attributes:
        values: returns the model's values, as for ``SharedParams.sync``; left out where it trains on the shared
            arrays themselves.
        read: returns what else this worker's model consists of, its own and what is common to all.
        check: raises SnapshotError where that, as it was saved, does not fit; changes nothing.
        write: gives the model its values and the rest back; the rest is another worker's where it says ``newcomer``.
    """

    values: Callable[[], Sequence[Any]] | None = None
    read: Callable[[], Parts] = lambda: Parts(None)
    check: Callable[[Parts], None] = lambda _: None
    write: Callable[[list[Array], Parts], None] = lambda *_: None


def check_alike(saved: Array, here: Array) -> None:
    """Raises SnapshotError unless saved values have the shape and dtype of those of this model."""
    if saved.shape != here.shape or saved.dtype != here.dtype:
        raise SnapshotError(
            f"{saved.dtype} of shape {saved.shape} was saved where this model has {here.dtype} of shape {here.shape}: "
            "make it as it was made before the save. Nothing was changed"
        )


def check_unshared(saved: Sequence[Array], now: Sequence[Any]) -> None:
    """Raises SnapshotError unless what stays with each worker has the shapes and dtypes that it was saved with."""
    before, kinds = ([(tuple(value.shape), str(value.dtype)) for value in values] for values in (saved, now))
    if before != kinds:
        raise SnapshotError(
            f"the model was saved with {before} beside its shared parameters, and has {kinds}; nothing was changed"
        )


def placed(values: list[Array], narrow: Mapping[int, Array]) -> list[Array]:
    """Returns the values of a model; those of 16 bits as they were, and not rounded from what is shared."""
    return [np.asarray(narrow[i]) if i in narrow else value for i, value in enumerate(values)]
