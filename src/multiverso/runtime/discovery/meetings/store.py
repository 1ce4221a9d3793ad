"""The hosts of a torchrun job meet at the store that torchrun's agents keep for their workers.

The first worker of the first host makes the credentials and opens the coordinator's port; every host's first worker
says what its host is called and how many workers it has. A process that can read the store can join the job, as it can
join the job's process groups.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from typing import Any

from multiverso.errors import StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.runtime.discovery.environment import JobInfo
from multiverso.runtime.discovery.meetings.meeting import (
    INSECURE_VARIABLE,
    Met,
    complete,
    distinct,
    key_of,
    open_port,
    own_address,
)


def meet_over_store(job: JobInfo, number: int, timeout_seconds: float) -> Met:
    """See ``joining._meet``."""
    key = key_of(job, job.host, number)
    if job.local_id != 0:
        return Met(key)
    store = _store_of(job, number, timeout_seconds)
    master = (job.store or ("", 0))[0]
    with contextlib.ExitStack() as undo:
        listening: socket.socket | None = None
        if job.host == 0:
            listening = undo.enter_context(open_port(job.ports[0] if job.ports else 0, number))
            credentials = new_credentials(not os.environ.get(INSECURE_VARIABLE))
            store.set("coordinator", f"{listening.getsockname()[1]} {credentials.to_text()}")
        store.set(f"name/{job.host}", socket.gethostname())
        store.set(f"workers/{job.host}", str(job.local_num))
        port, text = _get(store, "coordinator").split(" ", 1)
        names = distinct([_get(store, f"name/{host}") for host in range(job.hosts)])
        workers = tuple(int(_get(store, f"workers/{host}")) for host in range(job.hosts))
        mine = own_address(job.host == 0, master)
        roster = complete(Roster(job.host, names, workers, (master, int(port))), (master, int(port)), text, mine)
        if roster.local[job.local_id] != job.worker_id or roster.workers_num != job.workers_num:
            raise StartupError(
                f"torchrun says that worker {job.worker_id} is number {job.local_id} on host {job.host}, whose "
                f"workers are {list(roster.local)} of {roster.workers_num}: this cannot be"
            )
        undo.pop_all()
        return Met(key, roster, listening)
    raise AssertionError


def _store_of(job: JobInfo, number: int, timeout_seconds: float) -> Any:
    """Returns one job's part of the store of its agents."""
    address, port = job.store or ("", 0)
    try:
        from torch.distributed import PrefixStore, TCPStore

        timeout = datetime.timedelta(seconds=timeout_seconds)
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        return PrefixStore(f"multiverso/{job.attempt}/{number}", store)
    except (ImportError, RuntimeError, ValueError) as error:
        raise StartupError(f"torchrun's store at {address}:{port} cannot be reached: {error}") from error


def _get(store: Any, key: str) -> str:
    try:
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise StartupError(
            f"not all hosts of the job came in time: {key} was waited for in torchrun's store ({error})"
        ) from error
