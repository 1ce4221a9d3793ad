"""The running jobs of this user, asked of their nodes."""

from __future__ import annotations

from typing import Any

from multiverso.errors import MultiversoError
from multiverso.runtime import observe, publications_of
from multiverso.wire.messages import node_addresses

Status = dict[str, Any]
ANSWER_SECONDS = 2.0


def look_at(address: str) -> Status:
    """Returns a job's status, asked of its node on this host, with all ``publications``.

    Raises:
        MultiversoError: the node did not answer.
    """
    return with_publications(observe(address, ANSWER_SECONDS))


def with_publications(status: Status) -> Status:
    """Returns a node's status, with the publications of its host before those of others."""
    here = [one | {"host": status["host"]} for one in publications_of(status["address"])]
    return status | {"publications": here + status.get("publications", [])}


def find_jobs() -> list[Status]:
    """Asks every node of this user for its status; those that do not answer are left out.

    Of a job on several hosts that all are this one (a rehearsal) the first host's is returned.
    """
    jobs: list[Status] = []
    for address in node_addresses():
        try:
            jobs.append(look_at(address))
        except MultiversoError:  # another user's, or just over
            continue
    led = {job["job"]: job for job in jobs if job.get("leads") and job["job"]}
    return [job for job in jobs if led.get(job.get("job"), job) is job]


def chosen(jobs: list[Status], wish: str | None) -> list[Status]:
    """Returns the jobs that are meant: by a part of the address, a worker's pid, or its script."""
    if wish is None:
        return jobs
    return [
        job
        for job in jobs
        if wish in job["address"] or any(wish in (str(worker["pid"]), worker["program"]) for worker in job["workers"])
    ]
