"""What a node gives to processes that only look at a table: where it lies, and memory that they cannot write to."""

from __future__ import annotations

import os

from multiverso.errors import StartupError
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.spec.table import TableSpec
from multiverso.wire.messages import Message

KINDS = ("name", "memory")


def look(connection: Connection, request: Message, catalogue: Catalogue, descriptor: int) -> None:
    """Answers a ``look``.

    Args:
        connection: of whoever asks: a process of this user (that knows the job's secret, where that is asked for).
        request: names a table (``"name"``) or plain memory (``"memory"``).
        catalogue: what the job has.
        descriptor: of the job's memory.

    Raises:
        StartupError: this system gives no descriptor that is only for reading.
    """
    kind, name = request["kind"], request["name"]
    if kind not in KINDS:
        raise StartupError(f"what is looked at is of the kind 'name' or 'memory'; got {kind!r}")
    piece = catalogue.find((kind, name))
    if piece is None:
        connection.reply(request, {"offset": None})
        return
    body: Message = {"offset": piece.offset, "size": piece.size}
    if isinstance(piece.spec, TableSpec) and piece.shard is not None:
        body |= {"spec": piece.spec.as_message(), "mode": piece.shard.mode, "workers": piece.shard.workers}
    try:
        # another open file of the same memory: what it cannot do, no copy of it can
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"this system gives no memory that can only be read ({error})") from error
    try:
        catalogue.lend(piece, connection)
        connection.reply(request, body, (reading,))
    finally:
        os.close(reading)
