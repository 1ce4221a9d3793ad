"""A package's names that are imported when they are first used (PEP 562).

The names stand in the package's ``__all__`` and, for type checkers, under ``if TYPE_CHECKING``; what is made here
stands under ``if not TYPE_CHECKING``, or it would take any name for one of the package's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], *, parts: Sequence[str] = (), first: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        modules: the names that a module has for the package, separated by spaces, by the module.
        parts: the package's own modules that are got in the same way, by their last names.
        first: modules that are imported before any other, whatever is asked for: where two threads import parts of a
            package (NumPy is one, too) in different orders, Python shows one of them a module that is not whole.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in places and name not in parts:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        for module in first:
            importlib.import_module(module)
        if name in parts:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        module = sys.modules[package]
        return sorted({*(name for name in vars(module) if name.startswith("__")), *module.__all__})

    return get, names
