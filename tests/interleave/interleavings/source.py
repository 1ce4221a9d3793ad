"""The kernels' source, run as Python in modules of its own: what is imported elsewhere in the process stays as it is.

The modules below are executed anew with stand-ins for Numba, for the atomics and for the words and mutexes that the
node uses; whatever else they import is the real thing. The loops over data are replaced by NumPy, with a step between
reading and writing, so that what is not protected shows.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import importlib
import types
from pathlib import Path
from typing import Any

import numpy as np

import multiverso
import multiverso.runtime.job.control  # its dataclass looks for its module among those that are imported
from interleavings.memory import Memory, atomics, mutexes, words
from interleavings.standins import Standin

PACKAGE = Path(multiverso.__file__).parent
# executed anew; a name that ends with a dot stands for everything below it
PRIVATE = (
    "multiverso.kernels.",
    "multiverso.compiling.declaring",
    "multiverso.layout.words",
    "multiverso.layout.publications",
    "multiverso.spec.table",
    "multiverso.shards.shard",
    "multiverso.runtime.job.control",
    "multiverso.runtime.several_hosts.mirror",
)
# small, so that a schedule is short: what a loop over all possible workers costs, and how often one yields
CONSTANTS = {"MAX_WORKERS": 8, "_YIELDS": 1, "YIELDS": 1, "_PAUSES": 1, "_TRIES": 2, "MOST_PINS": 2}


class Source:
    """The modules of one variant of the source: ``source["rounds.calls"].commit``.

    Args:
        memory: what its atomics work on.
        changed: other code for some modules, by name (mutants).
    """

    def __init__(self, memory: Memory, changed: dict[str, types.CodeType] | None = None) -> None:
        self.memory = memory
        self._changed = changed or {}
        kernel_atomics = atomics(memory)
        numpy = Standin("numpy")
        vars(numpy).update(vars(np), int64=int)
        self._modules: dict[str, types.ModuleType] = {
            "numpy": numpy,
            "multiverso.compiling.atomics": kernel_atomics,
            "multiverso.memory.words": words(memory, kernel_atomics),
            "multiverso.memory.mutex": mutexes(memory),
        }
        self._builtins = {**vars(builtins), "__import__": self._import}

    def __getitem__(self, name: str) -> Any:
        places = (f"multiverso.kernels.{name}", f"multiverso.compiling.{name}", f"multiverso.{name}")
        return self.module(next(place for place in places if path_of(place).exists()))

    def module(self, name: str) -> types.ModuleType:
        """Returns a private module by its full name."""
        if name not in self._modules:
            importlib.import_module(name)  # where dataclasses look for what a class's types mean
            module = types.ModuleType(name)
            vars(module).update(__file__=str(path_of(name)), __builtins__=self._builtins)
            vars(module)["__package__"] = name.rpartition(".")[0]
            self._modules[name] = module
            importlib.import_module(name)  # the real one: a dataclass looks its module up by this name
            exec(self._changed.get(name) or compiled(name), vars(module))
            for constant, value in CONSTANTS.items():
                if constant in vars(module):
                    vars(module)[constant] = value
            for loop, stand_in in data_loops(self.memory).items():
                if loop in vars(module) and vars(module)[loop].__module__ == name:
                    vars(module)[loop] = stand_in
        return self._modules[name]

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if name in self._modules or self._is_private(name):
            return self.module(name)
        if (PACKAGE.parent / name.replace(".", "/")).is_dir() and fromlist:
            found = types.ModuleType(name)
            for wanted in fromlist:
                full = f"{name}.{wanted}"
                if full in self._modules or self._is_private(full):
                    setattr(found, wanted, self.module(full))
                else:
                    whole = builtins.__import__(name, fromlist=(wanted,))  # a module of it is imported, too
                    setattr(found, wanted, getattr(whole, wanted))
            return found
        return builtins.__import__(name, globals, locals, fromlist, level)

    @staticmethod
    def _is_private(name: str) -> bool:
        below = any(name.startswith(p) if p.endswith(".") else name == p for p in PRIVATE)
        return below and path_of(name).exists()


def path_of(module: str) -> Path:
    """Returns where a module's source is."""
    return PACKAGE.parent / (module.replace(".", "/") + ".py")


@functools.cache
def text_of(module: str) -> str:
    """Returns a module's source as it was when it was first asked for."""
    return path_of(module).read_text()


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Returns the syntax tree of a module, which nobody changes."""
    return ast.parse(text_of(module), str(path_of(module)))


@functools.cache
def compiled(module: str) -> types.CodeType:
    """Returns a module's code."""
    return compile(tree_of(module), str(path_of(module)), "exec")


def with_function(module: str, function: ast.FunctionDef) -> types.CodeType:
    """Returns a module's code with another function in the place of the one of its name, and nothing else compiled."""
    whole = compiled(module)
    tree = ast.fix_missing_locations(ast.Module([function], []))
    future = whole.co_flags & __future__.annotations.compiler_flag
    part = compile(tree, str(path_of(module)), "exec", flags=future, dont_inherit=True)
    (other,) = [const for const in part.co_consts if _is_code_of(function.name, const)]
    assert sum(_is_code_of(function.name, const) for const in whole.co_consts) == 1
    return whole.replace(
        co_consts=tuple(other if _is_code_of(function.name, const) else const for const in whole.co_consts)
    )


def _is_code_of(function: str, const: object) -> bool:
    return isinstance(const, types.CodeType) and const.co_name == function


def data_loops(memory: Memory) -> dict[str, Any]:
    """Returns the loops over data: they read, take a step, and write; copies take one before they read, too."""

    put = memory.write

    def copy_into(out: Any, table: Any) -> None:
        memory.scheduler.step("data", 0)
        put(out, table if memory.torn else table.copy())

    def push_pull(table: Any, local: Any, last: Any) -> None:
        value = table + (local - last)
        put(table, value)
        local[:] = last[:] = value

    def push_pull_to(out: Any, table: Any, local: Any, last: Any) -> None:
        put(out, table + (local - last))
        local[:] = last[:] = out

    def store_both(values: Any, local: Any, last: Any) -> None:
        local[:] = values
        last[:] = values

    return {
        "add_into": lambda table, delta: put(table, table + delta),
        "copy_into": copy_into,
        "subtract_into": lambda out, a, b: put(out, a - b),
        "push_pull": push_pull,
        "push_pull_to": push_pull_to,
        "store_both": store_both,
        "add_one": lambda out, table, a: put(out, table + a),
        "add_two": lambda out, table, a, b: put(out, (table + a) + b),
        "add_four": lambda out, table, a, b, c, d: put(out, (((table + a) + b) + c) + d),
        "_add_both": lambda out, a, b: put(out, a + b),
        "_multiply_into": lambda a, b: put(a, a * b),
        "_maximum_into": lambda a, b: put(a, np.maximum(a, b)),
        "_minimum_into": lambda a, b: put(a, np.minimum(a, b)),
    }
