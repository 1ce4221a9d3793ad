"""Updaters, by kind. A new one stands beside its like, and its name in ``_MAKERS``.

An updater with a required argument, as `delayed_nesterov` with the number of workers, has no name: it is given as a
value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from multiverso.spec.states import State
from multiverso.updaters.adam import adam
from multiverso.updaters.adaptive import adagrad, ftrl, rmsprop, rowwise_adagrad
from multiverso.updaters.additions import add, mean, sgd
from multiverso.updaters.momentum import delayed_nesterov, momentum, nesterov
from multiverso.updaters.transformations import adamw, chain, clip, cosine, inverse_square_root, schedule, weight_decay
from multiverso.updaters.updater import Updater

UpdaterName = Literal[
    "adagrad", "adam", "adamw", "add", "ftrl", "mean", "momentum", "nesterov", "rmsprop", "rowwise_adagrad", "sgd"
]  # fmt: skip
_MAKERS = (adagrad, adam, adamw, add, ftrl, mean, momentum, nesterov, rmsprop, rowwise_adagrad, sgd)
BY_NAME: dict[str, Callable[[], Updater]] = {make.__name__: make for make in _MAKERS}
_OTHER_LOOPS = {"adam": (adam(count_per="table").apply,)}


def resolve(updater: str | Updater) -> Updater:
    """Returns the updater that a table's ``updater=`` argument names, or is.

    Raises:
        ValueError: no updater has this name; or it is the name of one of these, and what is applied is another's.
    """
    if isinstance(updater, Updater):
        ours = BY_NAME.get(updater.name)
        # other workers, saved tables and the quick way of plain addition go by the name
        loops = (ours().apply, *_OTHER_LOOPS.get(updater.name, ())) if ours is not None else ()
        if ours is not None and (updater.apply not in loops or updater.mean != ours().mean):
            raise ValueError(
                f"the name {updater.name!r} is that of multiverso.updaters.{updater.name}, and this updater applies "
                f"another loop ({updater.apply.__module__}.{updater.apply.__qualname__}), or the "
                "mean where that applies the sum, or the sum: give it a name of its own"
            )
        return updater
    if isinstance(updater, str) and updater.partition("_")[0] == "dcasgd":
        raise ValueError(
            f"{updater!r} is a rule, not an updater: it corrects a gradient by how far the values have moved since "
            "this worker read them, which an updater does not know. A whole model: "
            f"ParamManager(..., rule=multiverso.rules.{updater}(rate)). Rows by number or by key: read them again "
            "before the push, as in 'Delay compensation by row and by key' of docs/how-to/rules.md"
        )
    if not isinstance(updater, str) or updater not in BY_NAME:
        raise ValueError(f"no updater is called {_words(updater)}; there are {', '.join(sorted(BY_NAME))}")
    return BY_NAME[updater]()


def loop_of(name: str, counts: bool) -> Callable[..., None] | None:
    """Returns the loop of an updater as a node finds it: by name, and whether it counts steps. None: it has no name."""
    if counts and name in _OTHER_LOOPS:
        return _OTHER_LOOPS[name][0]
    return BY_NAME[name]().apply if name in BY_NAME else None


def _words(given: Any) -> str:
    """Returns what was given instead of an updater, and what is wrong with it where that is known."""
    module = getattr(given, "__module__", "")
    if module.startswith(__name__) and callable(given):
        return f"{given.__name__}, the function itself (call it)"
    if module.startswith("multiverso.rules"):
        return f"{getattr(given, 'name', given)!r}, a rule (which rule= of a manager takes)"
    return f"{given!r} (it has no default: multiverso.updaters.{given}(...))" if given in __all__ else repr(given)


__all__ = [
    "BY_NAME",
    "State",
    "Updater",
    "UpdaterName",
    "adagrad",
    "adam",
    "adamw",
    "add",
    "chain",
    "clip",
    "cosine",
    "delayed_nesterov",
    "ftrl",
    "inverse_square_root",
    "mean",
    "momentum",
    "nesterov",
    "resolve",
    "rmsprop",
    "rowwise_adagrad",
    "schedule",
    "sgd",
    "weight_decay",
]
