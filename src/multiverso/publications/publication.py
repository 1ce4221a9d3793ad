"""The publisher's side: versions of a model in a few slots of shared memory.

A model's tensors are copied into a slot on several processors, with their checksums.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from multiverso.checks import whole
from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, StartupError, WaitTimeoutError
from multiverso.in_process import InProcess
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.publications.slots import Note, Slots
from multiverso.publications.tensors import Leaf, Tensor, arranged, layout_of, leaves_of
from multiverso.runtime.session import current
from multiverso.wire import publications as names
from multiverso.wire.requests import Find, Publish

if TYPE_CHECKING:
    from multiverso.publications.forwarding import Forwarder
    from multiverso.runtime.session.session import Session

_CHUNK_WORDS = 1 << 20  # 8 MiB: what one thread copies at a time
_WORTH_THREADS = 32 << 20  # bytes
_MOST_THREADS = 4
_LOOK_SECONDS = 0.005


class Copier:
    """Owner: a publication, one call at a time. Its threads live from the first large model to `close`."""

    def __init__(self) -> None:
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool: ThreadPoolExecutor | None = None
        self._under_way = False

    def copy(self, base: int, pairs: Sequence[tuple[Tensor, Leaf]]) -> list[int]:
        """Copies tensors into the slot at an address, and returns their checksums, as int64."""
        if self._under_way:
            self.close()  # a call was interrupted: nothing of it goes on
        sums = iter(self._copy(base, [(tensor, leaf.address) for tensor, leaf in pairs if leaf.bring is None]))
        # one after another: of those that do not lie here as in a slot, one at a time has a copy in this memory
        return [next(sums) if leaf.bring is None else self._copy_of(base, tensor, leaf.bring) for tensor, leaf in pairs]

    def _copy_of(self, base: int, tensor: Tensor, bring: Callable[[], npt.NDArray[np.uint8]]) -> int:
        memory = bring()
        return self._copy(base, [(tensor, memory.ctypes.data)])[0]

    def _copy(self, base: int, pairs: Sequence[tuple[Tensor, int]]) -> list[int]:
        if self._threads == 1 or sum(tensor.nbytes for tensor, _ in pairs) < _WORTH_THREADS:
            return [_wrapped(_copy_part(base, tensor, address, 0, tensor.words)) for tensor, address in pairs]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "multiverso-publish")

        def part(which: tuple[int, int]) -> int:
            tensor, address = pairs[which[0]]
            return _copy_part(base, tensor, address, which[1], min(_CHUNK_WORDS, tensor.words - which[1]))

        parts = [
            (number, first)
            for number, (tensor, _) in enumerate(pairs)
            for first in range(0, tensor.words, _CHUNK_WORDS)
        ]
        totals = [0] * len(pairs)
        self._under_way = True
        for (number, _), total in zip(parts, self._pool.map(part, parts), strict=True):
            totals[number] += total
        self._under_way = False
        return [_wrapped(total) for total in totals]

    def close(self) -> None:
        """Ends the threads, after the parts that they copy."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._under_way = None, False


def _copy_part(base: int, tensor: Tensor, address: int, first: int, count: int) -> int:
    """Copies words of a tensor into a slot, and returns their part of its checksum."""
    to, source = base + tensor.offset + 8 * first, address + 8 * first
    whole = min(count, tensor.nbytes // 8 - first)
    total = kernels.copy_summed.compiled()(to, source, whole, first) if whole > 0 else 0
    if whole < count:  # the end of a tensor that is no multiple of 8 bytes; what fills it up is zero
        left = tensor.nbytes % 8
        ctypes.memmove(to + 8 * whole, source + 8 * whole, left)
        total += kernels.summed.compiled()(to + 8 * whole, 1, first + whole)
    return total


def _wrapped(total: int) -> int:
    """Returns a sum as the int64 that it is modulo 2**64."""
    return (total + 2**63) % 2**64 - 2**63


@dataclass
class _Run:
    """Versions without a gap; ``order`` says how many times something had been published with the first of them."""

    first: int
    last: int
    order: int

    def order_of(self, version: int) -> int:
        return self.order + version - self.first


class History:
    """Owner: a publication, which serialises what changes it."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._least = 1  # of the next version

    def next(self, *, same: bool = False) -> int:
        """Returns the next version; ``same``: what is published stays, and gets another number."""
        last = self._runs[-1] if self._runs else _Run(0, 0, 0)
        version = max(last.last + 1, self._least)
        if version == last.last + 1 and self._runs and not same:
            last.last = version
        else:
            self._runs.append(_Run(version, version, last.order_of(last.last) + (not same)))
        return version

    def rise_above(self, seen: int) -> bool:
        """Makes all further versions higher than one; whether the newest is not."""
        self._least = max(self._least, seen + 1)
        return bool(self._runs) and seen >= self._runs[-1].last

    def accepts(self, version: int, lag: int) -> bool:
        """Whether a version is one of these, and at most ``lag`` older than the newest."""
        run = bisect(self._runs, version, key=lambda run: run.first) - 1
        if run < 0 or version > self._runs[run].last:
            return False
        newest = self._runs[-1]
        return newest.order_of(newest.last) - self._runs[run].order_of(version) <= lag


class Publication(InProcess):
    """Publishes versions of a model to processes that are not workers, which call `multiverso.subscribe`.

    Any process may publish, in a job or alone, without ``multiverso.init()``; one process at a time under a name. The
    model is copied into a slot of shared memory that nobody reads, and becomes current in one step: a reader has all
    tensors of one version, or none. Readers are processes of the same user on this host, or on any host of the
    publisher's job. A publication lasts until `close`, or the end of its process.

    Args:
        name: by which readers find it.
        like: a model with the names, shapes and dtypes of all later versions: a PyTorch module, a Keras model, or
            arrays and tensors of any dtype in dicts and lists. Its values are not published.
        slots: how many versions can be in memory at a time, 1 to 8. Two are allocated at once, others when readers keep
            versions. 1 is for what is published once, as a file is: all further versions are left out.

    Attributes:
        name: its name.

    Raises:
        StartupError: another process publishes under this name, on this host or another one of the job; the message
            names it. Once it has ended, the same call succeeds.
        WaitTimeoutError: the job's hosts do not say in time who publishes.
        OutOfMemoryError: there is not enough memory for two slots (or one, of one). Nothing was allocated.
        ValueError, TypeError: ``like`` has no tensor, or has something else.

    Examples:
        >>> import numpy as np
        >>> import multiverso as mv
        >>> weights = {"w": np.ones((2, 3), "float32"), "b": np.zeros(3, "float32")}
        >>> with mv.Publication("policy-of-docs", like=weights) as publication:
        ...     publication.publish(weights, step=7)
        1
    """

    def __init__(self, name: str, like: Any, *, slots: int = 3) -> None:
        self.name = names.checked(name)
        slots = whole(slots, "slots", 1, at.MOST_SLOTS)
        layout = layout_of(leaves_of(like))
        self._pid = os.getpid()
        self._lock, self._naming = threading.RLock(), threading.Lock()
        self._copier, self._history = Copier(), History()
        self._closed = False
        session = current.latest()
        self._job = session.address if session is not None else os.environ.get("MULTIVERSO_NODE", "")
        self._forwarder: Forwarder | None = None  # as the user has asked for
        self._to_job: Forwarder | None = None  # for the other hosts of the job
        self._slots = Slots(name, self._job, layout, slots, self._rise_above, self._sent_bytes)
        if session is not None and session.hosts:
            try:
                self._forward_to_job(session)
            except BaseException:
                self.close()
                raise

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return self._slots.version

    @property
    def left_out(self) -> int:
        """How many versions were not published because readers kept every slot."""
        return self._slots.left_out

    @property
    def readers(self) -> int:
        """How many processes read it just now."""
        return self._slots.readers

    def publish(self, model: Any, step: int | None = None, text: str = "", *, wait_seconds: float = 0.0) -> int | None:
        """Makes a copy of a model the current version.

        By default it does not wait for readers: if they keep every slot, this version is left out and counted.

        Args:
            model: as ``like`` was.
            step: of the training, for readers.
            text: more for readers, up to 4,000 bytes.
            wait_seconds: how long to wait for a slot, if readers keep them all.

        Returns:
            The version, one higher than the last; None if it was left out. If a reader has had a higher version of an
            earlier publisher, the number is raised above that one (see `version`).

        Raises:
            ShapeMismatchError, DtypeMismatchError: other tensors than those of ``like``. Nothing was published.
            ValueError: the step is not a whole number, or the text too long. Nothing was published.
            ClosedError: it is closed, or this is a forked child.
        """
        deadline = Deadline.after(wait_seconds)
        self._check()  # in a forked child the lock may be held for ever
        slots, note = self._slots, Note.now(step, text)
        leaves = arranged(leaves_of(model), slots.layout)
        with self._lock:
            self._check()
            slot = slots.take(deadline)
            if slot is None:
                slots.left_out += 1
                return None
            base = slots.bytes_of(slot).__array_interface__["data"][0]
            slots.sums_of(slot)[:] = self._copier.copy(base, list(zip(slots.layout.tensors, leaves, strict=True)))
            slots.describe(slot, note)
            with self._naming:
                version = self._history.next()
                slots.make_current(version, slot)
                return version

    def forward(
        self, port: int = 0, *, token: str, address: str = "0.0.0.0", encrypted: bool = True
    ) -> tuple[str, int]:
        """Lets other hosts follow this publication: ``mv.subscribe(name, address="host:port", token=token)`` there.

        Each host has one copy, for all of its readers. Only the bits that have changed since the last version sent to
        it travel, at the pace of the link; `publish` does not wait for that. A version that is being sent keeps its
        slot, so give ``slots`` one more for each host whose link is slow.

        Args:
            port: where followers connect; 0 for any that is free.
            token: a secret of 16 characters or more that followers have to know.
            address: of this host, if not all of its addresses are to be used.
            encrypted: False to encrypt nothing, on a network that you trust.

        Returns:
            The address and port.

        Raises:
            StartupError: the port is taken, pyOpenSSL is not installed, or the publication is forwarded already.
            ValueError: there is no such port, or the token is too short.
        """
        port = whole(port, "port", 0, 65535)
        with self._lock:
            self._check()
            if self._forwarder is not None:
                raise StartupError(f"publication {self.name!r} is forwarded at {self._forwarder.address} already")
            self._forwarder = self._forwarder_at((address, port), token, encrypted)
            return self._forwarder.address

    def accepts(self, version: int, lag: int) -> bool:
        """Returns whether a sample that was made with a version is new enough to learn from.

        The version changes in ``publish`` only, so a repeated run accepts the same samples.

        Args:
            version: of the snapshot that the sample was made with.
            lag: by how many versions the current one may be newer; 0 or more.

        Returns:
            False also for a version of another publisher of this name.
        """
        return self._history.accepts(whole(version, "version", 0), whole(lag, "lag", 0))

    def _sent_bytes(self) -> int:
        return sum(one.sent_bytes for one in (self._forwarder, self._to_job) if one is not None)

    def close(self) -> None:
        """Ends it. Readers keep the version that they have. May be called again."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                for forwarder in (self._forwarder, self._to_job):
                    if forwarder is not None:
                        forwarder.close()
                self._copier.close()
                self._slots.close()

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publication {self.name!r}, version {self.version}, {self.readers} readers>"

    def _forward_to_job(self, session: Session) -> None:
        """Lets the other hosts of the job follow, with what its nodes know, if no worker there publishes this."""
        from multiverso.publications.forwarding import answers

        what = f"this host's node to tell the others of the publication {self.name!r}"
        how = session.node.ask(Publish(name=self.name), what)
        self._to_job = self._forwarder_at((how["bind"], 0), how["token"], how["encrypted"])
        deadline, port = Deadline.after(session.start_timeout_seconds), self._to_job.address[1]
        first = None  # of this name, for all that is known here
        while True:
            here = session.node.ask(Publish(self.name, port, first), what)["here"]
            while (found := session.node.ask(Find(self.name), what)["address"]) in (None, first):
                if deadline.passed:
                    raise WaitTimeoutError(f"waited {deadline} for {what}")
                time.sleep(_LOOK_SECONDS)
            if found == here:
                return
            first = found
            if answers((first[0], first[1]), self._to_job.credentials):
                raise StartupError(
                    f"a worker on another host of this job ({first[0]}:{first[1]}) publishes {self.name!r} already: "
                    "one process at a time; take another name, or try again when that process has ended"
                )

    def _forwarder_at(self, place: tuple[str, int], token: str, encrypted: bool) -> Forwarder:
        from multiverso.hosts.transport.listener import open_port
        from multiverso.publications.forwarding import Forwarder
        from multiverso.publications.traffic import credentials_of

        credentials = credentials_of(self.name, token, encrypted)
        return Forwarder(self.name, self._job, open_port(place), credentials)

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(f"publication {self.name!r} belongs to process {self._pid}, and this is a child of it")
        if self._closed:
            raise ClosedError(f"publication {self.name!r} is closed")

    def _rise_above(self, seen: int) -> None:
        """A reader has had a version of another publisher: what is current gets a higher number (the lender)."""
        with self._naming:
            if self._history.rise_above(seen):
                self._slots.make_current(self._history.next(same=True), self._slots.slot)
