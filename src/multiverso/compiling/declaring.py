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

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# What a kernel's parameter may be: how it is passed is the second argument.
Address = Annotated[int, "address"]
Int = Annotated[int, "int64"]
Int32 = Annotated[int, "int32"]
Words = Annotated[npt.NDArray[np.int64], "words"]  # flat int64, writable
# of the dtype that the kernel is compiled for, contiguous, writable; the kernel sees it flat
Data = Annotated[npt.NDArray[Any], "data"]
Thing = Annotated[Any, "object"]  # anything: the kernel gets its address, and keeps the GIL

_INNER = "__multiverso_inner__"
ATOMICS = "multiverso.compiling.atomics"
LOOPS = {6: "pppnpn", 7: "pppnppn"}
"""What a loop of an updater or a rule takes, by its number of arguments: pointers to numbers (p) and numbers (n)."""


def inner(function: F) -> F:
    """Marks a function that kernels call; it is compiled into them."""
    setattr(function, _INNER, True)
    return function


class Kernel(Generic[P, R]):
    """A function that is called from Python in compiled form. Made by `kernel`. Called itself, it runs uncompiled."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._compiled: dict[str | None, Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: D102
        return self.function(*args, **kwargs)

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

    def parameters(self) -> list[tuple[str, str]]:
        """Returns (name, kind) of each parameter; the kinds are those of the annotations above."""
        hints = get_type_hints(self.function, include_extras=True)
        return [(name, get_args(hints[name])[1]) for name in inspect.signature(self.function).parameters]

    @property
    def answers(self) -> bool:
        """Whether it returns a number, or nothing."""
        return get_type_hints(self.function)["return"] is not type(None)

    @property
    def of_a_dtype(self) -> bool:
        """Whether it takes a table's numbers, and so is compiled for each dtype by itself."""
        return any(kind == "data" for _, kind in self.parameters())

    def __repr__(self) -> str:
        return f"<kernel {self.__module__}.{self.__name__}>"


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Declares a kernel."""
    return Kernel(function)


def is_loop(value: object, module: str) -> bool:
    """Returns whether something in one of our modules is a loop of an updater or a rule."""
    if not isinstance(value, FunctionType) or value.__module__ != module:
        return False
    code = value.__code__
    return code.co_argcount in LOOPS and code.co_varnames[code.co_argcount - 1] == "count"


def declared_in(module: ModuleType, dtype: str | None) -> dict[str, Any]:
    """Returns what a module declares: its kernels for tables of a dtype, or (None) for none; or else its loops."""
    ours = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    if kernels := {name: value for name, value in ours.items() if isinstance(value, Kernel)}:
        return {name: each for name, each in kernels.items() if each.of_a_dtype == (dtype is not None)}
    return {name: value for name, value in ours.items() if is_loop(value, module.__name__)}


def rebound(
    module: str,
    replace: Callable[[Any], Any],
    names: dict[str, dict[str, Any]] | None = None,
    replaced: dict[int, Any] | None = None,
) -> dict[str, Any]:
    """Returns a module's names as its functions see them when they, and all that they call, are replaced.

    The modules themselves are left as they are. It is how kernels are compiled, and how tests run them step by step.

    Args:
        module: name of a module of kernels, which is imported already.
        replace: gets each inner function and each kernel's function as a copy that sees the replaced names, and
            every other value of a module of ours as it is; returns what is to stand there.
        names, replaced: what earlier calls have replaced, to be used again: modules call the same functions.
    """
    names = {} if names is None else names
    replaced = {} if replaced is None else replaced

    def names_of(module: str) -> dict[str, Any]:
        if module not in names:
            names[module] = dict(vars(sys.modules[module]))
            for name, value in list(names[module].items()):
                names[module][name] = new(value)
        return names[module]

    def new(value: Any) -> Any:
        function = value.function if isinstance(value, Kernel) else value
        if not (isinstance(function, FunctionType) and (value is not function or hasattr(function, _INNER))):
            return replace(value) if getattr(value, "__module__", "") == ATOMICS else value
        if id(function) not in replaced:
            # first an empty place, since modules import each other's functions
            home = names.get(function.__module__) or names_of(function.__module__)
            if id(function) not in replaced:
                copy = FunctionType(
                    function.__code__, home, function.__name__, function.__defaults__, function.__closure__
                )
                copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
                replaced[id(function)] = replace(copy)
        return replaced[id(function)]

    return names_of(module)
