"""Which manager shares a parameter, and whether it was ever used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from multiverso.saying import say


class Hold:
    """A manager's hold of its model's parameters, until a newer manager takes any of them.

    Each of two managers would push what the other has pulled, so that changes count several times.

    Attributes:
        lost: whether another manager has taken some.
    """

    def __init__(self) -> None:
        self.lost = False

    def take(self, things: Iterable[Any]) -> None:
        """Takes parameters (tensors, variables: what the framework keeps), also from another manager."""
        for thing in things:
            key = id(thing)
            reference, before = _holds.get(key, (None, self))
            if before is not self and reference is not None and reference() is thing:
                before.lost = True
            _holds[key] = weakref.ref(thing, partial(_forget, key)), self

    def check(self) -> None:
        """Raises RuntimeError if another manager has taken some."""
        if self.lost:
            raise RuntimeError(
                "a newer manager shares some of these parameters too, and of two managers each would push what the "
                "other has pulled, so changes would count several times: use one for all of them. SharedOptimizer has "
                "made one, its .manager; where models share a part, put them into one module"
            )


_holds: dict[int, tuple[weakref.ref[Any], Hold]] = {}


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    if key in _holds and _holds[key][0] is gone:
        del _holds[key]


@dataclass
class Use:
    """Whether anything has ever gone in or out; it outlives the manager, which may have been forgotten."""

    worker_id: int
    hold: Hold
    shared: bool = False

    def warn(self) -> None:
        """At the session's end: a loop without exchanges trains alone, and looks as if all were well."""
        if not self.shared and not self.hold.lost:
            say(
                f"worker {self.worker_id} made a parameter manager and never exchanged, so what it learned was not "
                "shared: call step() or sync_all_param() (SharedParams: step() or exchange()) in the loop"
            )
