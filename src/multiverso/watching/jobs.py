"""The running jobs of this user, asked of their nodes."""

from __future__ import annotations

import contextlib
from typing import Any

from multiverso.errors import MultiversoError
from multiverso.publications import names
from multiverso.runtime import observe
from multiverso.wire.messages import node_addresses

Status = dict[str, Any]
ANSWER_SECONDS = 2.0
_PUBLISHERS_SECONDS = 0.2  # of each: the next look finds one that was busy


def look_at(address: str) -> Status:
    """Returns a job's status, asked of its node on this host, with its ``publications`` here.

    Raises:
        MultiversoError: the node did not answer.
    """
    return observe(address, ANSWER_SECONDS) | {"publications": publications_of(address)}


def publications_of(address: str) -> list[Status]:
    """Asks the publishers of a job on this host; those that do not answer are left out."""
    found = []
    for place in names.of_job(address):
        with contextlib.suppress(MultiversoError):
            found.append(observe(place, _PUBLISHERS_SECONDS))
    return sorted(found, key=lambda status: str(status["name"]))


def find_jobs() -> list[Status]:
    """Asks every node of this user for its status; those that do not answer are left out.

    Of a job on several hosts that all are this one (a rehearsal) the first host's is returned, with all publications.
    """
    jobs: list[Status] = []
    for address in node_addresses():
        try:
            jobs.append(look_at(address))
        except MultiversoError:  # another user's, or just over
            continue
    led = {job["job"]: job for job in jobs if job.get("leads") and job["job"]}
    shown = []
    for job in jobs:
        first = led.get(job.get("job"), job)
        if first is job:
            shown.append(job)
        else:
            first["publications"] = first["publications"] + job["publications"]
    return shown


def chosen(jobs: list[Status], wish: str | None) -> list[Status]:
    """Returns the jobs that are meant: by a part of the address, a worker's pid, or its script."""
    if wish is None:
        return jobs
    return [
        job
        for job in jobs
        if wish in job["address"] or any(wish in (str(worker["pid"]), worker["program"]) for worker in job["workers"])
    ]
