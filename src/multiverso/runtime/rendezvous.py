"""How the hosts of a torchrun job find each other: over the store that torchrun's agents keep for their workers.

The first worker of the first host makes the credentials and opens the coordinator's port; every host's first worker
says where its host is reached and what it is called. Whoever can read the store can join the job, as it can join
the job's process groups.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from typing import Any

from multiverso.errors import StartupError
from multiverso.hosts.credentials import new_credentials
from multiverso.hosts.roster import Roster
from multiverso.runtime.discovery import JobInfo

INSECURE_VARIABLE = "MULTIVERSO_INSECURE_FABRIC"
_ANY = "0.0.0.0"


@dataclass(frozen=True)
class Found:
    """What a host's node begins with.

    Attributes:
        roster: the job's hosts.
        listening: the coordinator's port, on the first host.
    """

    roster: Roster
    listening: socket.socket | None


class Meeting:
    """One job's keys in the store of its agents. Owner: this worker's `init`.

    Args:
        job: what the environment says.
        number: of this `init` in this process, as each makes a job of its own.
        timeout_seconds: how long to wait for what another host has to say.

    Raises:
        StartupError: the store cannot be reached.
    """

    def __init__(self, job: JobInfo, number: int, timeout_seconds: float) -> None:
        self._job = job
        self._prefix = f"multiverso/{job.attempt}/{number}"
        address, port = job.store or ("", 0)
        try:
            from torch.distributed import TCPStore

            timeout = datetime.timedelta(seconds=timeout_seconds)
            self._store: Any = TCPStore(address, port, is_master=False, timeout=timeout)
        except (ImportError, RuntimeError, ValueError) as error:
            raise StartupError(f"torchrun's store at {address}:{port} cannot be reached: {error}") from error

    def found(self) -> Found:
        """For a host's first worker: tells where this host is, and returns what all have told."""
        job = self._job
        listening, text = None, ""
        if job.host == 0:
            listening = socket.create_server((_ANY, 0))
            credentials = new_credentials(not os.environ.get(INSECURE_VARIABLE))
            text = f"{listening.getsockname()[1]} {credentials.to_text()}"
            self._set("coordinator", text)
        try:
            self._set(f"name/{job.host}", socket.gethostname())
            self._set(f"workers/{job.host}", str(job.local_num))
            port, credentials_text = self._get("coordinator").split(" ", 1)
            names = [self._get(f"name/{host}") for host in range(job.hosts)]
            workers = tuple(int(self._get(f"workers/{host}")) for host in range(job.hosts))
            if len(set(names)) < len(names):
                names = [f"{name}-{host}" for host, name in enumerate(names)]
            address, store_port = job.store or ("", 0)
            mine = address if job.host == 0 else _address_towards(address, store_port)
            addresses = tuple(mine if host == job.host else "" for host in range(job.hosts))
            first = (address, int(port))
            roster = Roster(
                job.host, tuple(names), workers, first, credentials_text, bind=_ANY, addresses=addresses
            )
            if roster.local.start + job.local_id != job.worker_id or roster.workers_num != job.workers_num:
                raise StartupError(
                    f"torchrun says that worker {job.worker_id} is number {job.local_id} on host {job.host}, whose "
                    f"workers are {list(roster.local)} of {roster.workers_num}: this cannot be"
                )
        except BaseException:
            if listening is not None:
                listening.close()
            raise
        return Found(roster, listening)

    def say_started(self) -> None:
        """For a host's first worker: its node is there."""
        self._set(f"started/{self._job.host}", "1")

    def wait_started(self) -> None:
        """For the others."""
        self._get(f"started/{self._job.host}")

    def _set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _get(self, key: str) -> str:
        try:
            return str(self._store.get(f"{self._prefix}/{key}").decode())
        except RuntimeError as error:
            raise StartupError(
                f"not all hosts of the job came in time: {key} was waited for in torchrun's store ({error})"
            ) from error


def _address_towards(address: str, port: int) -> str:
    """Returns this host's address on the way to another one."""
    with socket.create_connection((address, port), 10) as connection:
        return str(connection.getsockname()[0])
