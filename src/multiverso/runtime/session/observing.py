"""Asks the nodes and publishers of this host for their status."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from multiverso.errors import MultiversoError
from multiverso.runtime.session.node_link import NodeLink
from multiverso.wire.publications import of_job
from multiverso.wire.requests import Status

_PUBLISHERS_SECONDS = 0.2  # of each: the next look finds one that was busy


def observe(address: str, timeout_seconds: float = 5.0) -> dict[str, Any]:
    """Returns the status of a running job, asked of its node.

    Raises:
        StartupError: there is no node.
        WaitTimeoutError, NodeLostError: the node did not answer.
    """
    deadline = time.monotonic() + timeout_seconds
    with contextlib.closing(NodeLink.to(address, deadline)) as link:
        answer, _ = link.ask(Status(), deadline, "the node's status")
    status: dict[str, Any] = answer["status"]
    return status


def publications_of(address: str) -> list[dict[str, Any]]:
    """Asks the publishers of a node's job on this host; those that do not answer are left out."""
    found = []
    for place in of_job(address):
        with contextlib.suppress(MultiversoError):
            found.append(observe(place, _PUBLISHERS_SECONDS))
    return sorted(found, key=lambda status: str(status["name"]))
