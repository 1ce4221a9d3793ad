"""What a worker's table says of itself, of whatever kind it is."""

from __future__ import annotations

from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from multiverso.in_process import InProcess


class _Named(Protocol):
    """What every kind of table's spec has."""

    @property
    def name(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...


Spec = TypeVar("Spec", bound=_Named)


class Described(InProcess, Generic[Spec]):
    """A table by its spec, and as a ``with`` block.

    Args:
        spec: everything that the workers have agreed on.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._dtype = np.dtype(spec.dtype)

    @property
    def spec(self) -> Spec:
        """Everything that the workers have agreed on."""
        return self._spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the shared memory."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """Its name, or None for one that was created by order."""
        return self._spec.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec}>"

    def close(self) -> None:
        """Ends this worker's part in the table."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
