"""What the compiler knows of a module of kernels: its typed functions, its loops, and what they call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")

INNER = "__multiverso_inner__"
ATOMICS = "multiverso.compiling.atomics"
LOOPS = {6: "pppnpn", 7: "pppnppn"}
"""What a loop of an updater or a rule takes, by its number of arguments: pointers to numbers (p) and numbers (n)."""


class Declared(Generic[P, R]):
    """A function with the types of a kernel; see ``declaring.py``. Called itself, it runs uncompiled."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: D102
        return self.function(*args, **kwargs)

    def parameters(self) -> list[tuple[str, str]]:
        """Returns (name, kind) of each parameter; the kinds are those of the annotations of ``declaring.py``."""
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


def group_of(name: str, dtype: str | None) -> str:
    """Returns what the kernels or loops are called together that a module has for a dtype, or (None) for none."""
    short = name.removeprefix("multiverso.").removeprefix("kernels.")
    return f"{short}-{dtype}" if dtype else short


def is_loop(value: object, module: str) -> bool:
    """Returns whether something in one of our modules is a loop of an updater or a rule."""
    if not isinstance(value, FunctionType) or value.__module__ != module:
        return False
    code = value.__code__
    return code.co_argcount in LOOPS and code.co_varnames[code.co_argcount - 1] == "count"


def declared_in(module: ModuleType, dtype: str | None) -> dict[str, Any]:
    """Returns what a module declares: its kernels for tables of a dtype, or (None) for none; or else its loops."""
    ours = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    if kernels := {name: value for name, value in ours.items() if isinstance(value, Declared)}:
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
        function = value.function if isinstance(value, Declared) else value
        if not (isinstance(function, FunctionType) and (value is not function or hasattr(function, INNER))):
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
