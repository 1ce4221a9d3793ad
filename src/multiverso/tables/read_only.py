"""A job's keyed tables as another process of the same user reads them: to serve a model while it is being trained."""

from __future__ import annotations

import os
import socket
import time
from io import FileIO
from typing import Any

import numpy as np

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, NodeLostError, NoSuchTableError, WaitTimeoutError
from multiverso.in_process import Closing, InProcess
from multiverso.kernels import read_only as kernels
from multiverso.layout.keyed import LINES, at
from multiverso.memory.segment import Segment
from multiverso.memory.words import load64
from multiverso.runtime.session.node_link import NodeLink
from multiverso.spec.table import DTYPES
from multiverso.tables.keyed.keys import as_keys
from multiverso.tables.keyed.memory import memory_name
from multiverso.tables.output import fresh, into
from multiverso.wire.messages import Message, node_addresses
from multiverso.wire.requests import Look
from multiverso.wire.trust import SECRET_VARIABLE

_SLICE_NANOSECONDS = 100_000_000


class ReadOnlyKeyedTable(Closing, InProcess):
    """A `KeyedTable` of a running job, for reading; from `attach_read_only`.

    Args:
        link: to the job's node, which has lent the memory, and ends the connection before it gives it to another table.
        job: its address.
        answer: where the memory lies.
        descriptors: of the memory; taken over.
        name: the table's.
        timeout_seconds: deadline of a read.

    Attributes:
        name: its name.
        dim: numbers in a row.
        dtype: of the values.
    """

    def __init__(
        self, link: NodeLink, job: str, answer: Message, descriptors: list[int], name: str, timeout_seconds: float
    ) -> None:
        (memory,) = map(FileIO, map(list.pop, [descriptors]))
        with memory:
            self._segment = Segment(
                memory.fileno(), int(answer["offset"]), int(answer["size"]), sparse=True, writable=False
            )
        self.name = name
        self._link, self._timeout_seconds = link, timeout_seconds
        self._what = f"table {name!r} of the job at {job}"
        if not load64(self._segment.address + at.IDENTITY):  # the last word that is written
            self._check()
            raise NoSuchTableError(f"the keyed table {name!r} is just being made: attach again in a moment")
        # once: when the table is closed, something else may take the place of it
        self._header = self._segment.array(0, LINES, np.uint8).copy()
        self._check()
        columns, dtype = (load64(self._header.ctypes.data + word) for word in (at.COLUMNS, at.DTYPE))
        self.dim, self.dtype = columns, np.dtype(DTYPES[dtype])

    def get(self, keys: Any, out: Any = None) -> Any:
        """Returns the rows of keys; of a key that has none, its initial row.

        A row is never torn, and belongs to the key; several rows are not of one moment. The job's workers never wait
        for a read.

        Args:
            keys: as for ``KeyedTable.get``.
            out: as for ``KeyedTable.get``.

        Raises:
            NodeLostError: the job has ended, or has closed the table; what is in ``out`` then means nothing.
            WaitTimeoutError: a worker was stopped while it held a row, for too long.
        """
        array = as_keys(keys)
        shape = (*array.shape, self.dim)
        output = fresh(shape, self.dtype, None) if out is None else into(out, shape, self.dtype, False)
        flat, size, to = array.reshape(-1), self.dim * self.dtype.itemsize, output.flat.ctypes.data
        look_up, base, header = kernels.look_up.compiled(), self._segment.address, self._header.ctypes.data
        deadline = Deadline.after(self._timeout_seconds)
        code = 0
        while True:
            code = look_up(base, header, flat, to, size, code >> 16, time.monotonic_ns() + _SLICE_NANOSECONDS)
            self._check()  # after the read: memory is given to another table only when the connection has ended
            if code == 0:
                return output.give()
            if deadline.passed:
                raise WaitTimeoutError(
                    f"a part of {self._what} was held for {deadline}: a worker was stopped or killed while it "
                    "changed it, and no other has come there since"
                )

    def _check(self) -> None:
        """Raises NodeLostError if the job or the table is over: what was read until now may be another table's."""
        try:
            connection = self._link.connection
            if connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                return
        except BlockingIOError:
            return
        except (OSError, NodeLostError):
            pass
        raise NodeLostError(
            f"{self._what} is gone: its job has ended, or has closed it, or this process has closed the table; "
            "attach again when it runs again, or load what it has saved"
        )

    def close(self) -> None:
        """Detaches from the job; every read after that raises NodeLostError."""
        self._link.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


def attach_read_only(name: str, job: str | None = None, *, timeout_seconds: float = 10.0) -> ReadOnlyKeyedTable:
    """Returns a keyed table of a running job of this user here, for reading by a process that is not a worker of it.

    The memory is mapped read-only. Reads are as quick as a worker's, see the workers' adds, and block no worker.
    Arrays and matrices are published, whole: see `multiverso.Publication`.

    Args:
        name: the table's name, as the workers have given it.
        job: the job's address, from ``multiverso top --json`` or MULTIVERSO_NODE. By default the one of the
            environment, or else the only job here that has such a table.
        timeout_seconds: deadline of this call, and of each read: for a part that a stopped worker holds.

    Raises:
        NoSuchTableError: no job has such a table, or several; or this process is another user's.
        NodeLostError, WaitTimeoutError: the job's node has not answered.
        ValueError: ``job`` or ``timeout_seconds`` is invalid.

    Examples:
        >>> with mv.attach_read_only("users") as users:  # doctest: +SKIP
        ...     vectors = users.get([17, 4])
    """
    deadline = Deadline.after(timeout_seconds).at
    if not isinstance(job, str | None):
        raise ValueError(f"a job is given by its address, a text; got {job!r}")
    job = job or os.environ.get("MULTIVERSO_NODE")
    found, refusals = [], []
    try:
        addresses = [job] if job else node_addresses()
        for number, address in enumerate(addresses):
            now = time.monotonic()
            # a node that is stopped must leave time for the others
            share = now + (deadline - now) / (len(addresses) - number)
            try:
                found.append(_attach(address, name, share, timeout_seconds))
            except MultiversoError as error:
                if job:
                    raise
                refusals.append(f"{address}: {error}")
        if len(found) == 1:
            return found.pop()
        if found:
            raise NoSuchTableError(
                f"{len(found)} jobs of this user have a table named {name!r}: say which, by job=, the address that "
                "`multiverso top --json` shows"
            )
    finally:
        for table in found:
            table.close()
    raise NoSuchTableError(
        f"no job of this user on this host has a keyed table named {name!r}: {'; '.join(refusals) or 'none is running'}"
    )


def _attach(address: str, name: str, deadline: float, timeout_seconds: float) -> ReadOnlyKeyedTable:
    link = NodeLink.to(address, deadline, os.environ.get(SECRET_VARIABLE))
    try:
        answer, descriptors = link.ask(Look(memory_name(f"name:{name}")), deadline, f"table {name!r}")
        if answer["offset"] is None:
            raise NoSuchTableError(f"it has no keyed table named {name!r} (yet); the values of others can be published")
        return ReadOnlyKeyedTable(link, address, answer, descriptors, name, timeout_seconds)
    except BaseException:
        link.close()
        raise
