"""``multiverso warmup``: compiles what jobs would compile when they first need it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from multiverso import rules, updaters
from multiverso.compiling import on_demand, prebuilt
from multiverso.compiling.declared import declared_in
from multiverso.compiling.object_cache import cache_directory
from multiverso.spec.table import DTYPES

_BETWEEN_HOSTS = tuple(f"between_hosts.{name}" for name in ("agreeing", "node", "quorum", "rounds"))
OF_A_DTYPE = ("dense", "rows", "rounds.calls", "quorum", "keyed.rounds", "rules", "reduce", *_BETWEEN_HOSTS)
OF_A_FLOAT = ("row_cache",)
OF_NONE = (
    *("locking", "plain_arrays", "rows", "waits", "dense", "rounds.calls", "quorum", *_BETWEEN_HOSTS),
    *("keyed.calls", "keyed.removal", "keyed.passes", "keyed.rounds", "read_only", "row_cache"),
    "publications",
)
_RULES_DTYPES = ("float32", "float64")


def everything(dtypes: Sequence[str] = DTYPES) -> list[on_demand.Group]:
    """Returns what there is to compile for tables of some dtypes, as ``on_demand.ensure_all`` takes it."""
    prefix = "multiverso.kernels."
    wanted: list[on_demand.Group] = [(prefix + name, None) for name in OF_NONE]
    for dtype in dtypes:
        wanted += [(prefix + name, dtype) for name in OF_A_DTYPE]
        wanted += [(name, dtype) for name in _with_loops(updaters)]
        if dtype in _RULES_DTYPES:
            wanted += [(prefix + name, dtype) for name in OF_A_FLOAT]
            wanted += [(name, dtype) for name in _with_loops(rules)]
    return wanted


def _with_loops(package: object) -> list[str]:
    """Returns the modules of a package that hold loops of updaters or rules."""
    name, path = package.__name__, package.__path__  # type: ignore[attr-defined]
    modules = [importlib.import_module(f"{name}.{found.name}") for found in pkgutil.iter_modules(path)]
    return [m.__name__ for m in modules if declared_in(m, None)]


def report(dtypes: Sequence[str]) -> str:
    """Compiles everything for tables of some dtypes that is not there yet; returns what is there now, in a sentence."""
    groups = everything(dtypes)
    if prebuilt.level() is None and cache_directory() is None:
        return "no folder for compiled kernels can be used, so there is nothing to keep; nothing was compiled"
    on_demand.ensure_all(groups)
    known = prebuilt.level()
    place = f"came with multiverso ({known})" if known else f"are in {cache_directory()}"
    return f"all kernels for tables of {', '.join(dtypes)} {place}"
