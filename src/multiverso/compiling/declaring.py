"""How a kernel is declared: a typed function, of which one version is compiled for each dtype when it is needed.

The annotations are the signature: there is no other. A module of kernels imports no Numba, so it is cheap to import,
its functions can be called as they are (uncompiled, with the stand-ins of ``atomics``), and a reader's search, an
editor and mypy see the function itself::

    @kernel
    def add(base: Address, update: Address, me: Int, delta: Data, progress: Int) -> Int: ...

    add.compiled("float32")  # Callable[[int, int, int, Array, int], int]

What kernels call among themselves is an ``@inner`` function: compiled with the kernel, for whatever types it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt

from multiverso.compiling.declared import INNER, Declared, P, R

F = TypeVar("F", bound=Callable[..., Any])

# What a kernel's parameter may be: how it is passed is the second argument.
Address = Annotated[int, "address"]
Int = Annotated[int, "int64"]
Int32 = Annotated[int, "int32"]
Words = Annotated[npt.NDArray[np.int64], "words"]  # flat int64, writable
# of the dtype that the kernel is compiled for, contiguous, writable; the kernel sees it flat
Data = Annotated[npt.NDArray[Any], "data"]
Thing = Annotated[Any, "object"]  # anything: the kernel gets its address, and keeps the GIL


def inner(function: F) -> F:
    """Marks a function that kernels call; it is compiled into them."""
    setattr(function, INNER, True)
    return function


class Kernel(Declared[P, R]):
    """A function that is called from Python in compiled form. Made by `kernel`."""

    def __init__(self, function: Callable[P, R]) -> None:
        super().__init__(function)
        self._compiled: dict[str | None, Callable[P, R]] = {}

    def compiled(self, dtype: str | None = None) -> Callable[P, R]:
        """Returns it compiled, from this machine's cache where it can be, together with the rest of its module.

        Args:
            dtype: of its ``Data``; None for a kernel without any.
        """
        found = self._compiled.get(dtype)
        if found is None:
            # not above: no kernel is compiled again because the way in which it is looked for has changed
            from multiverso.compiling.on_demand import load_module

            found = self._compiled[dtype] = load_module(self.__module__, dtype)[self.__name__]
        return found


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Declares a kernel."""
    return Kernel(function)
