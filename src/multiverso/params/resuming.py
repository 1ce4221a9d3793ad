"""What a binding and its user keep beside a model's shared arrays, when it is saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.checkpoints import Parts
from multiverso.errors import SnapshotError

Array = NDArray[Any]
Files = Callable[[Path], None]


@dataclass(frozen=True)
class Model:
    """What a binding knows about the model whose arrays are shared; all of it may be left out.

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


def check_own(own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a user hands over to be saved.

    Raises:
        TypeError: no dictionary.
    """
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise TypeError(
            f"own is a dictionary of state, such as {{'optimizer': optimizer.state_dict()}}; got {type(own).__name__}"
        )
    return own


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
