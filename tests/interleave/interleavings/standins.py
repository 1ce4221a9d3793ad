"""Modules of which everything that nobody runs is a thing that takes anything."""

from __future__ import annotations

import types
from typing import Any


class Anything:
    """Stands for what only the compiler needs: it can be called, indexed and asked for any attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType) else self

    def __mul__(self, other: Any) -> Any:
        return self

    __rmul__ = __or__ = __ror__ = __mul__


class Standin(types.ModuleType):
    """A module of which everything that it does not have is Anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()
