"""The hosts of an srun step need no word from each other: Slurm's variables say where all are.

The job's secret and certificate are made on each host from what only this user knows (a file in a home directory that
the hosts share, or a variable), and from the step's number.
"""

from __future__ import annotations

import hashlib
import os

from multiverso.errors import StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import derived_credentials
from multiverso.runtime.discovery.environment import JobInfo
from multiverso.runtime.discovery.meetings.meeting import (
    INSECURE_VARIABLE,
    Met,
    complete,
    key_of,
    open_port,
    own_address,
)
from multiverso.wire.trust import SECRET_VARIABLE

_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that systems give out by themselves


def meet_in_slurm(job: JobInfo, roster: Roster, number: int, secret: str) -> Met:
    """See ``joining._meet``."""
    if not secret:
        raise StartupError(
            "this user has no home directory here, so the hosts of the job have no secret in common: set "
            f"{SECRET_VARIABLE} to the same random text in all workers (srun passes it on)"
        )
    key = key_of(job, roster.host, number)
    if job.local_id != 0:
        return Met(key)
    name = f"{job.attempt}|{number}"
    credentials = derived_credentials(secret, name, not os.environ.get(INSECURE_VARIABLE))
    port = job.ports[number % len(job.ports)] if job.ports else _port_of(name)
    first = roster.names[0]
    mine = own_address(roster.leads, first)
    listening = open_port(port, number) if roster.leads else None
    return Met(key, complete(roster, (first, port), credentials.to_text(), mine), listening)


def _port_of(name: str) -> int:
    return _FIRST_PORT + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _PORTS
