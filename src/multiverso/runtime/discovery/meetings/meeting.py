"""The result of a meeting of a job's hosts, and the common part of the three ways to meet."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, replace

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.addresses import ADDRESS_VARIABLE, ANY, address_towards, listen_at
from multiverso.runtime.discovery.environment import PORT_VARIABLE, JobInfo

INSECURE_VARIABLE = "MULTIVERSO_INSECURE_FABRIC"
_BEFORE_SECONDS, _LOOK_SECONDS = 15.0, 0.05


@dataclass(frozen=True)
class Met:
    """A worker's knowledge of its job after a meeting.

    Attributes:
        key: equal in all workers of this host, and different on other hosts.
        roster: the job's hosts, for the first worker of a host, which starts its node; None for the others.
        listening: the coordinator's port, for the first one of all.
    """

    key: str
    roster: Roster | None = None
    listening: socket.socket | None = None


def key_of(job: JobInfo, host: int, number: int) -> str:
    """Returns the key of a host's part of a job. Two hosts may be one machine."""
    return f"{job.key}|{job.attempt}|host {host}|{number}"


def open_port(port: int, number: int = 0) -> socket.socket:
    """Opens the coordinator's port.

    Args:
        port: which; 0 for any.
        number: of this `init` in this process. The job before may not have ended yet, and that is waited for.

    Raises:
        StartupError: it is taken.
    """
    deadline = Deadline.after(_BEFORE_SECONDS if number else 0.0)
    while True:
        try:
            return listen_at(ANY, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not deadline.passed:
                time.sleep(_LOOK_SECONDS)
                continue
            raise StartupError(
                f"the first host cannot listen for the others at port {port} ({error.strerror}): set {PORT_VARIABLE} "
                "to a free one, the same in all workers"
            ) from error


def own_address(leads: bool, first: str) -> str:
    """Returns where the others reach this host: what its environment says, or where the way to the first one begins.

    Raises:
        StartupError: the first host cannot be found from here.
    """
    try:
        return os.environ.get(ADDRESS_VARIABLE) or (first if leads else address_towards(first))
    except OSError as error:
        raise StartupError(f"the job's first host is {first}, which cannot be found from here: {error}") from error


def complete(roster: Roster, first: tuple[str, int], credentials: str, mine: str) -> Roster:
    """Returns a roster with what its host's node needs to begin.

    Args:
        roster: who is where.
        first: where the coordinator listens.
        credentials: the job's, as text.
        mine: where the others reach this host.
    """
    addresses = tuple(mine if host == roster.host else "" for host in range(roster.hosts))
    return replace(roster, coordinator=first, credentials=credentials, bind=ANY, addresses=addresses)


def distinct(names: list[str]) -> tuple[str, ...]:
    """Returns names of hosts that can be told apart: with their numbers, where two are called the same."""
    if len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{name}-{host}" for host, name in enumerate(names))
