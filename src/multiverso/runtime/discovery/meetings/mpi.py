"""The hosts of an mpirun job meet over MPI itself, by mpi4py: two collective calls at `init`, and no other.

Where the program has not begun MPI, it is begun here and ended at once: nothing of it is left that a killed worker
could leave behind, or that an early end could wait in. MPI begins once only in a process, so a program that uses it
itself imports ``mpi4py.MPI`` before `init`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multiverso.errors import StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.addresses import ADDRESS_VARIABLE, own_addresses, reachable
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

_LONGEST = 16_384
_LOOK_SECONDS = 0.001
_LIBRARIES = {"openmpi": ("Open MPI",), "mpich": ("MPICH", "Intel", "MVAPICH")}
_given_up: list[Any] = []  # what MPI may still write to


def meet_over_mpi(job: JobInfo, number: int, timeout_seconds: float) -> Met:
    """See ``joining._meet``."""
    until = time.monotonic() + timeout_seconds
    with _world(job) as world, contextlib.ExitStack() as undo:
        cards = [json.loads(text) for text in _gathered(world, json.dumps(_card(job)), until)]
        roster = _roster_of(cards, job)
        lead = roster.workers_of(0)[0]
        listening: socket.socket | None = None
        word = ""
        if job.worker_id == lead:
            listening = undo.enter_context(open_port(job.ports[0] if job.ports else 0, number))
            credentials = new_credentials(not os.environ.get(INSECURE_VARIABLE))
            places = [cards[roster.workers_of(host)[0]]["addresses"] for host in range(roster.hosts)]
            address = os.environ.get(ADDRESS_VARIABLE) or reachable(places[0], places[1:])
            address = address or socket.gethostname()
            word = f"{address} {listening.getsockname()[1]} {credentials.to_text()}"
        address, port, text = _gathered(world, word, until)[lead].split(" ", 2)
        key, full = key_of(job, roster.host, number), None
        if job.local_id == 0:
            full = complete(roster, (address, int(port)), text, own_address(roster.leads, address))
        undo.pop_all()
        return Met(key, full, listening)
    raise AssertionError


def _card(job: JobInfo) -> dict[str, Any]:
    """Returns this worker's place, and its host's name and addresses, for the others."""
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    # a host is what a daemon of the launcher starts workers on: two of them may share a machine
    host = hashlib.sha256(f"{job.key}\0{name}\0{boot}".encode()).hexdigest()[:16]
    return {"host": host, "local": job.local_id, "name": name[:255], "addresses": own_addresses()[:16]}


def _roster_of(cards: list[dict[str, Any]], job: JobInfo) -> Roster:
    """Hosts in the order of their first workers' numbers, and on each its workers as the launcher counts them there."""
    hosts: dict[str, list[int]] = {}
    for worker_id, card in enumerate(cards):
        hosts.setdefault(card["host"], []).append(worker_id)
    for workers in hosts.values():
        workers.sort(key=lambda worker_id: int(cards[worker_id]["local"]))
        if [cards[worker_id]["local"] for worker_id in workers] != list(range(len(workers))):
            raise StartupError(
                f"{job.started_by} says that workers {sorted(workers)} are on one host, as numbers "
                f"{[cards[worker_id]['local'] for worker_id in workers]} there: this cannot be"
            )
    return Roster(
        list(hosts).index(cards[job.worker_id]["host"]),
        distinct([cards[workers[0]]["name"] for workers in hosts.values()]),
        tuple(map(len, hosts.values())),
        ("", 0),
        order=tuple(worker_id for workers in hosts.values() for worker_id in workers),
    )


@contextlib.contextmanager
def _world(job: JobInfo) -> Iterator[Any]:
    """All workers of the job, and MPI begun and ended if the program has not begun it."""
    mpi = _library(job)
    if mpi.Is_finalized():
        raise StartupError(
            "MPI has ended in this process, and cannot begin again: for several jobs one after another, import "
            "mpi4py.MPI before the first `init`"
        )
    ours = not mpi.Is_initialized()
    if ours:
        mpi.Init_thread()
    try:
        world = mpi.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (job.worker_id, job.workers_num):
            raise StartupError(
                f"{job.started_by} says that this is worker {job.worker_id} of {job.workers_num}, and mpi4py that it "
                f"is {world.Get_rank()} of {world.Get_size()}: it is built for another MPI than the one that has "
                "started the job"
            )
        yield world
    except BaseException:
        ours = False  # the others wait for a word of this one that will not come
        raise
    finally:
        if ours:
            mpi.Finalize()


def _library(job: JobInfo) -> Any:
    """mpi4py, of the MPI that has started the job: another one would end the process when it begins."""
    what = f"{job.started_by} has started {job.workers_num} workers on several hosts, which find each other by mpi4py"
    begun = "mpi4py.MPI" in sys.modules
    try:
        import mpi4py
    except ImportError as error:
        raise StartupError(
            f'{what}, which is not installed here: pip install "multiverso[mpi,hosts]" on every host, or start the job '
            "with `multiverso run --hosts`, torchrun or srun"
        ) from error
    before, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartupError(f"{what}, which cannot be loaded: {error}") from error
    finally:
        mpi4py.rc.initialize = before
    version = MPI.Get_library_version()
    if not begun and not any(name in version for name in _LIBRARIES[job.started_by]):
        raise StartupError(
            f"{what}, but that is built for {version.split(',')[0].splitlines()[0]!r}: use the mpirun that belongs to "
            "it, or set MPI4PY_LIBMPI to the library of this one"
        )
    return MPI


def _gathered(world: Any, text: str, until: float) -> list[str]:
    """Returns what all workers say, in their order."""
    mine = text.encode().ljust(_LONGEST)
    if len(mine) > _LONGEST:
        raise StartupError(f"what this host says of itself is too long: {text}")
    everyones = bytearray(_LONGEST * world.Get_size())
    _await(world.Iallgather(mine, everyones), (mine, everyones), until)
    return [everyones[begin : begin + _LONGEST].decode().rstrip() for begin in range(0, len(everyones), _LONGEST)]


def _await(request: Any, buffers: Any, until: float) -> None:
    while not request.Test():
        if time.monotonic() >= until:
            _given_up.append((request, buffers))
            raise StartupError("not all workers of the job have called `init` in time: MPI waits for them")
        time.sleep(_LOOK_SECONDS)
