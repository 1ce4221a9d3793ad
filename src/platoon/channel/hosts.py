"""Several controllers, one on each host, combine arrays over MPI. Each is an MPI process, workers are not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from multiverso.runtime import MAX_WORKERS, Session
from platoon.channel.wire import Array, dtype_named
from platoon.util import PlatoonError, op_to_mpi

_WAIT_SECONDS = 1800.0
_LOOK_MS = 1
_MOST_BYTES = 1 << 40


@dataclass
class _Pending:
    """A combination that is under way, and who is to be told of its end."""

    request: Any
    address: list[bytes]
    until: float
    array: Array


class Hosts:
    """This controller's place among the controllers. Used by the thread that made it alone.

    Args:
        local_size: how many workers this host has.

    Raises:
        PlatoonError: there is no MPI.
    """

    def __init__(self, local_size: int) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise PlatoonError(
                "several controllers need MPI: pip install mpi4py mpich, and start them with that mpiexec",
                error,
            ) from error
        self._mpi = MPI
        self._session: Session | None = None
        self._comm = MPI.COMM_WORLD
        sizes = self._comm.allgather(local_size)
        if 0 in sizes:
            raise PlatoonError(f"every controller needs devices; they have {sizes}")
        self.size = len(sizes)
        self.global_size = sum(sizes)
        self.ranks_before = sum(sizes[: self._comm.rank])
        self._pending: list[_Pending] = []

    @property
    def wait_ms(self) -> int | None:
        """How long the controller may sleep at most: MPI has nothing that it could be woken by."""
        return _LOOK_MS if self._pending else None

    def begin(self, node: str, info: dict[str, Any], address: list[bytes]) -> None:
        """Begins to combine this host's array with those of the other hosts, in place.

        Args:
            node: the node that has this host's memory, which the controller enters as if it were a worker.
            info: the array's name, size and dtype, and the operation.
            address: who is to be told of the end.

        Raises:
            PlatoonError: these cannot be combined.
        """
        dtype = dtype_named(info["dtype"])
        if dtype.kind not in "iuf" or info["bytes"] % dtype.itemsize:
            raise PlatoonError(f"{info['bytes']} bytes of {dtype} cannot be combined")
        try:
            operation = op_to_mpi(info["op"])
        except ValueError as error:
            raise PlatoonError("arrays cannot be combined", error) from error
        if not 0 < info["bytes"] <= info["capacity"] <= _MOST_BYTES:
            raise PlatoonError(f"{info['bytes']} of {info['capacity']} bytes cannot be combined")
        if self._session is None:
            self._session = Session(node, worker_id=MAX_WORKERS - 1)
        memory = self._session.shared_memory(info["name"], info["capacity"])
        array = memory.array[: info["bytes"]].view(dtype)
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, array, operation)
        self._pending.append(_Pending(request, address, time.monotonic() + _WAIT_SECONDS, array))

    def finished(self) -> list[tuple[list[bytes], None]]:
        """Returns who is to be told that their combination is done.

        Raises:
            PlatoonError: another host did not come within half an hour.
        """
        done = [pending for pending in self._pending if pending.request.Test()]
        self._pending = [pending for pending in self._pending if pending not in done]
        if any(time.monotonic() > pending.until for pending in self._pending):
            raise PlatoonError(f"another host did not come to all_reduce within {_WAIT_SECONDS:g} s")
        return [(pending.address, None) for pending in done]

    def close(self, failed: bool) -> None:
        """Ends MPI for this controller and, if it failed, for all: the others would wait for it for ever."""
        if self._session is not None:
            self._session.shutdown()
        if failed:
            self._comm.Abort(1)
