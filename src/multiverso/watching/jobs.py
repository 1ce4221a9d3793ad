"""The running jobs of this user, asked of their nodes."""

from __future__ import annotations

from typing import Any

from multiverso.errors import MultiversoError
from multiverso.runtime import observe
from multiverso.wire.messages import node_addresses

Status = dict[str, Any]
ANSWER_SECONDS = 2.0


def find_jobs() -> list[Status]:
    """Asks every node of this user for its status; those that do not answer are left out."""
    jobs = []
    for address in node_addresses():
        try:
            jobs.append(observe(address, ANSWER_SECONDS))
        except MultiversoError:  # another user's, or just over
            continue
    return jobs


def chosen(jobs: list[Status], wish: str | None) -> list[Status]:
    """Returns the jobs that are meant: by a part of the address, a worker's pid, or its script."""
    if wish is None:
        return jobs
    return [
        job
        for job in jobs
        if wish in job["address"] or any(wish in (str(worker["pid"]), worker["program"]) for worker in job["workers"])
    ]
