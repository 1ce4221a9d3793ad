"""A publication of another host on this one: one copy in its memory, for all readers here."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError
from multiverso.hosts.transport.channel import Channel
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import HANDSHAKE_SECONDS, PUBLICATIONS, Hello, connect
from multiverso.kernels import publications as kernels
from multiverso.publications.differences import CHUNK_BYTES, apply
from multiverso.publications.slots import Slots
from multiverso.publications.tensors import Layout, check_layout
from multiverso.publications.traffic import (
    Alive,
    Begin,
    Follow,
    Part,
    Version,
    Whole,
    credentials_of,
    receive,
    receive_bytes,
    receive_into,
    send,
)
from multiverso.runtime.session.node_link import NodeLink
from multiverso.saying import Progress
from multiverso.wire import publications as names
from multiverso.wire.messages import node_addresses
from multiverso.wire.requests import Find
from multiverso.wire.trust import SECRET_VARIABLE

_AGAIN_SECONDS = 0.2
_ANSWER_SECONDS = 0.5  # within which a job's node has to answer
_SLOTS = 4
_FOREVER = Deadline(math.inf, math.inf)


@dataclass(frozen=True)
class Source:
    """Where a publication comes from.

    Attributes:
        address: host name or address, and port.
        credentials: of the token.
        job: on whose host this is, or what stands for it (`names.forwarded`).
    """

    address: tuple[str, int]
    credentials: Credentials = field(repr=False)
    job: str

    @classmethod
    def of(cls, name: str, address: str, token: str, encrypted: bool) -> Source:
        """Returns the source that a user names: ``host:port``.

        Raises:
            ValueError: it is no address, or the token is too short.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"address is host:port of a publication that is forwarded; got {address!r}")
        job = names.forwarded(address, token)
        return cls((host.strip("[]"), int(port)), credentials_of(name, token, encrypted), job)

    @classmethod
    def in_job(cls, name: str, job: str | None) -> Source | None:
        """Returns where a worker on another host of a job publishes; by default of any job that is here."""
        job = job or os.environ.get("MULTIVERSO_NODE")
        for node in [job] if job else node_addresses():
            deadline = time.monotonic() + _ANSWER_SECONDS
            with contextlib.ExitStack() as undo:
                undo.enter_context(contextlib.suppress(MultiversoError))  # the node ends, or this is none
                link = NodeLink.to(node, deadline, os.environ.get(SECRET_VARIABLE))
                undo.callback(link.close)
                found, _ = link.ask(Find(name=name), deadline, "where it is published")
                if found["address"] is not None:
                    host, port = found["address"]
                    return cls((host, port), credentials_of(name, found["token"], found["encrypted"]), node)
        return None


class Follower:
    """Publishes here what another host publishes, as long as no other process of this host does.

    A connection that ends is made again; then the newest version comes whole.

    Args:
        name: of the publication.
        find: says where it comes from now; None: not known.
        job: whose worker publishes it, or what stands for it.

    Attributes:
        trouble: why there is nothing new, in words; empty where all is well.

    Owner: its subscription. Its thread does everything until `close`.
    """

    def __init__(self, name: str, find: Callable[[], Source | None], job: str) -> None:
        self._name, self._find, self._job = name, find, job
        self._closing = threading.Event()
        self._channel: Channel | None = None
        self._slots: Slots | None = None
        self._generation = 0
        self._publisher = 0  # the incarnation of the one that is followed, or was
        self._seen = 0  # of the versions of those before
        self.trouble = ""
        self._incarnation = int.from_bytes(os.urandom(8))
        self._thread = threading.Thread(target=self._run, name="multiverso-follow", daemon=True)
        self._thread.start()

    @property
    def publishes(self) -> bool:
        """Whether readers here read what this has received."""
        return self._slots is not None

    def close(self) -> None:
        """Ends it. May be called again."""
        self._closing.set()
        channel = self._channel
        if channel is not None:
            channel.shutdown()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                source = None
                try:
                    if self._is_needed and (source := self._find()) is not None:
                        self._follow(source)
                    self.trouble = ""
                except (OSError, ValueError, MultiversoError) as error:
                    self.trouble = (
                        f"{source.address[0]}:{source.address[1]}: {error}" if source is not None else str(error)
                    )
                self._closing.wait(_AGAIN_SECONDS)
        finally:
            if self._slots is not None:
                self._slots.close()

    @property
    def _is_needed(self) -> bool:
        """Whether no other process of this host publishes it, or follows."""
        if self._slots is None:
            return not any(names.is_taken(self._name, place) for place in {self._job, names.followed(self._job)})
        if names.is_taken(self._name, self._job):
            self._slots.close()
            self._slots = None
        return self._slots is not None

    def _follow(self, source: Source) -> None:
        self._generation += 1
        me = Hello(1, 2, self._incarnation, self._generation, PUBLICATIONS)
        deadline = Deadline.after(HANDSHAKE_SECONDS)
        channel, publisher = connect(source.address, source.credentials, me, deadline)
        self._channel = channel
        try:
            if self._closing.is_set():
                return
            if self._slots is not None and publisher.incarnation != self._publisher:
                self._seen = max(self._seen, self._slots.version)
            self._publisher = publisher.incarnation
            send(channel, Follow(self._seen))
            base = 0
            while True:
                message, body = receive(channel)
                match message:
                    case Alive() if self._slots is None or self._is_needed:
                        pass
                    case Alive():
                        return
                    case Begin():
                        self._begin(message.layout)
                    case Version() if self._slots is not None and message.base == base:
                        if not self._take(channel, self._slots, message):
                            return
                        base = message.version
                    case _:
                        raise ValueError(f"{type(message).__name__} was not expected, with {body} bytes")
                self.trouble = ""
        finally:
            self._channel = None
            channel.close()

    def _begin(self, layout: Layout) -> None:
        check_layout(layout)
        if self._slots is not None and self._slots.layout != layout:
            self._slots.close()
            self._slots = None
        if self._slots is None:
            self._slots = Slots(self._name, names.followed(self._job), layout, _SLOTS, self._rise_above)

    def _rise_above(self, seen: int) -> None:
        """A reader here has had a newer version of another publisher: the first host is told (the lender)."""
        slots = self._slots  # None: a reader comes while they are being made
        if seen > self._seen and (slots is None or seen > slots.version):
            self._seen = seen
            channel = self._channel
            if channel is not None:
                channel.shutdown()

    def _take(self, channel: Channel, slots: Slots, version: Version) -> bool:
        """Receives a version into a slot, and makes it current; False where this ends before there is a slot."""
        slot = slots.take(_FOREVER, self._closing.is_set)
        if slot is None:
            return False
        memory = slots.bytes_of(slot)
        if version.base:
            memory[:] = slots.bytes_of(slots.slot)
        progress = Progress(
            f"receiving version {version.version} of {self._name!r}", 0 if version.base else slots.layout.nbytes
        )
        while True:
            message, size = receive(channel)
            if isinstance(message, Whole):
                break
            if not isinstance(message, Part):
                raise ValueError(f"{type(message).__name__} was not expected in the middle of a version")
            self._take_part(channel, memory, slots.layout, message, size)
            progress.add(message.nbytes)
        base, add_up = memory.__array_interface__["data"][0], kernels.summed.compiled()
        found = [add_up(base + tensor.offset, tensor.words, 0) for tensor in slots.layout.tensors]
        if found != version.checksums:
            raise ValueError(f"version {version.version} has come damaged")
        slots.sums_of(slot)[:] = version.checksums
        slots.describe(slot, version.note)
        if version.version > slots.version:
            slots.make_current(version.version, slot)
        return True

    @staticmethod
    def _take_part(channel: Channel, memory: np.ndarray, layout: Layout, part: Part, size: int) -> None:
        if not 0 <= part.tensor < len(layout.tensors) or not 0 < part.nbytes <= CHUNK_BYTES:
            raise ValueError(f"there is no such part: {part}")
        tensor = layout.tensors[part.tensor]
        if not 0 <= part.first <= tensor.nbytes - part.nbytes or size > part.nbytes:
            raise ValueError(f"there is no such part of {tensor}: {part}, with {size} bytes")
        to = memory[tensor.offset + part.first :][: part.nbytes]
        if part.differs:
            apply(to, bytes(receive_bytes(channel, size)), tensor.itemsize)
        elif size == part.nbytes:
            receive_into(channel, to.data)
        else:
            raise ValueError(f"{size} bytes instead of {part.nbytes}")
