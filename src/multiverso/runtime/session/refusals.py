"""What some jobs cannot do, refused before anything changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from multiverso.errors import NotInThisJobError
from multiverso.hosts.values.options import ExchangeOptions


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
