"""Checks the arguments of `init` about the exchange between hosts, and refuses what it cannot do."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import DtypeMismatchError, NotInThisJobError, StartupError
from multiverso.hosts.codecs import Wire

NAMES = ("sum", "mean", "local_sgd", "diloco")


@dataclass(frozen=True)
class Every:
    """How often a pass over a table begins, beside the budget.

    Attributes:
        seconds: at least so long after the last one began.
        changes: after so many adds and exchanges of this host's workers; 0: as soon as anything has changed anywhere.
    """

    seconds: float = 0.0
    changes: int = 0


@dataclass(frozen=True)
class RuleBetween:
    """A rule between hosts.

    Attributes:
        name: one of NAMES.
        lr: the outer learning rate.
        momentum: of the outer Nesterov.
    """

    name: str = "sum"
    lr: float = 1.0
    momentum: float = 0.0

    @classmethod
    def of(cls, text: str, dtype: npt.DTypeLike) -> RuleBetween:
        """Returns the rule that a user's text means: a name, or ``"diloco:LR,MOMENTUM"`` (by default 0.7 and 0.9).

        Raises:
            StartupError: there is no such rule.
            DtypeMismatchError: a table of whole numbers can only be summed.
        """
        name, colon, numbers = text.partition(":")
        lr, momentum = (0.7, 0.9) if name == "diloco" else (1.0, 0.0)
        try:
            if colon:
                lr, momentum = map(float, numbers.split(","))
        except ValueError:
            lr = -1.0
        if name not in NAMES or (colon and name != "diloco") or not (lr > 0 and 0 <= momentum < 1):
            raise StartupError(
                f"a rule between hosts is one of {', '.join(NAMES)}, or diloco:LR,MOMENTUM; got {text!r}"
            )
        if name != "sum" and np.dtype(dtype).kind != "f":
            raise DtypeMismatchError(f"the rule {name} needs a table of floats; {np.dtype(dtype)} can only be summed")
        return cls(name, lr, momentum)


VARIABLES = {"wire": "MULTIVERSO_WIRE", "every": "MULTIVERSO_EVERY", "between": "MULTIVERSO_BETWEEN"}
"""Where a launcher leaves defaults for `init`."""

_LONGEST_TEXT = 100
_COUNT = re.compile("[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class ExchangeOptions:
    """How the copies of all tables of a job are kept near each other.

    Attributes:
        wire: the format of differences, see ``hosts/codecs.py``.
        every: how often a pass begins.
        between: the rule between hosts, see ``hosts/options.py``.
    """

    wire: str = "native"
    every: Every = Every()
    between: str = "sum"

    @classmethod
    def of(cls, wire: Any = None, every: Any = None, between: Any = None) -> ExchangeOptions:
        """Returns what ``init(wire=, every=, between=)`` mean together; None leaves each as it is by default.

        Raises:
            StartupError: one of them means nothing.
        """
        wire, between = cls.wire if wire is None else wire, cls.between if between is None else between
        for what, text in (("wire", wire), ("between", between)):
            if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
                raise StartupError(f"{what} is a short text; got {text!r}")
        Wire.of(wire, "float32")
        if between != cls.between:
            RuleBetween.of(between, "float32")
        return cls(wire, _every(every), between)

    def of_table(self, wire: str, every: str) -> ExchangeOptions:
        """Returns how a table travels: its own way where its words are not empty, otherwise the job's."""
        return ExchangeOptions.of(wire or self.wire, every or self.every, self.between)

    def rule_of(self, dtype: Any) -> str:
        """Returns the rule for a table: whole numbers are summed, whatever the rule for floats."""
        return self.between if dtype.kind == "f" else "sum"

    def as_message(self) -> dict[str, Any]:
        """Returns it as JSON can carry it."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any] | None) -> ExchangeOptions:
        """The inverse of `as_message`; None is the default.

        Raises:
            StartupError: it is not one that `as_message` makes.
        """
        if message is None:
            return cls()
        every = message.get("every")
        if not isinstance(every, dict) or {type(value) for value in every.values()} - {int, float}:
            raise StartupError(f"malformed exchange options: {str(message)[:_LONGEST_TEXT]}")
        changes = every.get("changes")
        asked = f"{changes} adds" if changes else every.get("seconds")
        return cls.of(message.get("wire"), asked, message.get("between"))

    def __str__(self) -> str:
        every = f"'{self.every.changes} adds'" if self.every.changes else f"{self.every.seconds:g}"
        return f"wire={self.wire!r}, every={every}, between={self.between!r}"


def in_environment(wire: Any = None, every: Any = None, between: Any = None) -> dict[str, str]:
    """Returns the variables that leave to a worker's `init` what its launcher was asked for.

    Raises:
        StartupError: one of them means nothing.
    """
    ExchangeOptions.of(wire, every, between)
    asked = {"wire": wire, "every": every, "between": between}
    return {VARIABLES[name]: str(value) for name, value in asked.items() if value is not None}


def table_words(wire: Any, every: Any) -> dict[str, str]:
    """Returns what ``ArrayTableHandler(wire=, every=)`` mean as a table's spec has it: the job's way where None.

    Raises:
        StartupError: one of them means nothing.
    """
    ExchangeOptions.of(wire, every)
    return {"wire": wire or "", "every": "" if every is None else str(every)}


def _every(value: Any) -> Every:
    if value is None or isinstance(value, Every):
        return value or Every()
    if isinstance(value, str):
        count, _, unit = value.strip().partition(" ")
        if unit in ("add", "adds") and _COUNT.fullmatch(count):
            return Every(changes=int(count))
    seconds = math.nan
    if not isinstance(value, bool) and isinstance(value, (str, numbers.Real)):
        with contextlib.suppress(ValueError, OverflowError):
            seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise StartupError(
            f"every is a number of seconds, 0 or more, or a text such as '100 adds'; got {str(value)[:_LONGEST_TEXT]!r}"
        )
    return Every(seconds=seconds)


def refuse_across_hosts(hosts: tuple[str, ...], what: str, instead: str) -> None:
    """Before something that works among the workers of one host only.

    Args:
        hosts: the job's, ``Session.hosts``.
        what: what it is.
        instead: what to do, as half a sentence.

    Raises:
        NotInThisJobError: the job is on several hosts. Nothing was changed.
    """
    if hosts:
        raise NotInThisJobError(
            f"{what} works on one host only yet, and this job is on {len(hosts)} ({', '.join(hosts)}): {instead}"
        )


def refuse_under_rule(hosts: tuple[str, ...], exchange: ExchangeOptions, what: str, dtype: np.dtype[Any]) -> None:
    """Before something that replaces values, of which a rule between hosts would make a part of the change.

    Args:
        hosts: the job's, ``Session.hosts``.
        exchange: how its tables travel, ``Session.exchange``.
        what: what it is.
        dtype: the table's.

    Raises:
        NotInThisJobError: the job is on several hosts, with such a rule. Nothing was changed.
    """
    if hosts and exchange.rule_of(dtype) != "sum":
        raise NotInThisJobError(
            f"{what} cannot replace values that hosts share by between={exchange.between!r}: give them as "
            "init_value=, or use between='sum'"
        )
