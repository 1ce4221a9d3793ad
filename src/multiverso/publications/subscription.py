"""The reader's side: whichever process publishes under a name, now and after it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from multiverso.checks import whole
from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, MultiversoError, SnapshotError, StartupError, WaitTimeoutError
from multiverso.in_process import InProcess
from multiverso.layout import publications as at
from multiverso.memory.words import load32, wait_for_change
from multiverso.publications.attachment import Attachment
from multiverso.publications.following import Follower, Source
from multiverso.publications.snapshot import Snapshot
from multiverso.wire import publications as names

_ANSWER_SECONDS = 10.0  # within which a publisher has to answer
_LOOK_SECONDS = 0.05  # between two looks for a publisher
_FIND_SECONDS = 0.5  # between two questions where it is on another host
_SLICE_SECONDS = 0.2  # after which a waiting reader looks whether there is another publisher
_open: weakref.WeakSet[Subscription] = weakref.WeakSet()


class Subscription(InProcess):
    """A process's connection to a publication; from `subscribe`. May be used by several threads.

    Attributes:
        name: of the publication.
    """

    def __init__(
        self,
        name: str,
        job: str | None,
        timeout_seconds: float,
        seen: int = 0,
        find: Callable[[], Source | None] | None = None,
        where: str = "",
    ) -> None:
        self.name, self._job, self._where = names.checked(name), job, where or (f"in the job {job!r}" if job else "")
        self._timeout_seconds = Deadline.after(timeout_seconds).seconds
        self._pid, self._seen = os.getpid(), seen
        self._attachment: Attachment | None = None  # of the publisher whose versions are read
        # whose life locks the thread holds: that one, and those of which snapshots are left
        self._kept: list[Attachment] = []
        self._changed = threading.Condition()
        self._refusal: MultiversoError | None = None
        self._closing = threading.Event()
        self._ends = socket.socketpair()
        self._find, self._asked = find, -math.inf  # where other hosts' are, and when that was asked last
        self._follower: Follower | None = None  # once it is needed (the thread)
        self._thread = threading.Thread(target=self._follow, name="multiverso-reader", daemon=True)
        _open.add(self)
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest version there is; 0 before the first."""
        attachment = self._attachment
        return attachment.version if attachment is not None else 0

    @property
    def follows(self) -> bool:
        """Whether this process receives it from another host now, for all readers on this one."""
        return self._follower is not None and self._follower.publishes

    def latest(self, timeout_seconds: float | None = None) -> Snapshot:
        """Returns the newest version, whole; before there is one it waits.

        When the publisher has ended, this is its last version, until another one publishes.

        Args:
            timeout_seconds: for the first version; by default the subscription's.

        Raises:
            WaitTimeoutError: nothing was published in time.
            ClosedError: the subscription is closed, or this is a forked child.
        """
        attachment = self._attachment
        if attachment is None or self._pid != os.getpid():
            return self.wait(0, timeout_seconds)
        snapshot = self._take(attachment)
        return self.wait(0, timeout_seconds) if snapshot is None else snapshot

    def wait(self, newer_than: int, timeout_seconds: float | None = None) -> Snapshot:
        """Waits for a version that is newer than one, and returns the newest.

        Args:
            newer_than: the version of the snapshot before.
            timeout_seconds: by default the subscription's.

        Raises:
            WaitTimeoutError: none came in time; says whether somebody publishes.
            ClosedError: the subscription is closed, or this is a forked child.
            ValueError: ``newer_than`` is no version.
        """
        newer_than = whole(newer_than, "newer_than", 0)
        deadline = Deadline.after(self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            self._check()
            attachment = self._attachment
            if attachment is None:
                with self._changed:
                    if self._refusal is not None:
                        raise self._refusal
                    if self._attachment is None:
                        self._changed.wait(deadline.left(_SLICE_SECONDS))
            else:
                event = load32(attachment.event)
                if attachment.version > newer_than:
                    snapshot = self._take(attachment)
                    if snapshot is not None:
                        return snapshot
                wait_for_change(attachment.event, event, deadline.left(_SLICE_SECONDS))
            if deadline.passed and (self._attachment is None or self._attachment.version <= newer_than):
                raise WaitTimeoutError(self._what_is_missing(newer_than, deadline))

    def redeem(self, ticket: str, timeout_seconds: float | None = None) -> Snapshot:
        """Returns the version of another process's snapshot, which that process keeps until this one is released.

        Args:
            ticket: the other's `Snapshot.ticket`.
            timeout_seconds: for its publisher to be found from here; by default the subscription's.

        Raises:
            SnapshotError: nobody keeps that version any more, or the ticket is invalid.
            WaitTimeoutError: this subscription follows another publisher.
            ClosedError: as `latest`.
        """
        try:
            memory_id, pinned = (int(part, 16) for part in ticket.split("-"))
        except ValueError:
            raise SnapshotError(
                f"{ticket!r:.80} is no ticket: give what another process's snapshot.ticket is"
            ) from None
        deadline = Deadline.after(self._timeout_seconds if timeout_seconds is None else timeout_seconds)
        while True:
            self._check()
            attachment = self._attachment
            if attachment is not None and attachment.memory_id == memory_id:
                snapshot = self._take(attachment, pinned)
                if snapshot is not None:
                    return snapshot
                raise SnapshotError(
                    f"nobody keeps version {pinned >> at.SLOT_BITS} of {self.name!r} any more; in memory: "
                    f"{', '.join(map(str, attachment.versions)) or 'none'}"
                )
            if deadline.passed:
                raise WaitTimeoutError(
                    f"waited {deadline} for the publisher of version {pinned >> at.SLOT_BITS} of {self.name!r}: "
                    + ("there is none" if attachment is None else "another one is followed here")
                )
            with self._changed:
                self._changed.wait(deadline.left(_LOOK_SECONDS))

    def load_into(self, model: Any) -> int:
        """Copies the newest version's tensors into a model's own, in place, and returns the version.

        Raises:
            as `latest` and `Snapshot.load_into`.
        """
        with self.latest() as snapshot:
            snapshot.load_into(model)
            return snapshot.version

    def close(self) -> None:
        """Ends it. Snapshots and arrays that are still referred to stay valid. May be called again."""
        self._closing.set()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):
                self._ends[0].shutdown(socket.SHUT_RDWR)
            if not any(attachment.pinned for attachment in self._kept):
                self._thread.join()
            if self._follower is not None:
                self._follower.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription to {self.name!r}, version {self.version}>"

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the subscription to {self.name!r} belongs to process {self._pid}, and this is a child "
                "of it: subscribe here"
            )
        if self._closing.is_set():
            raise ClosedError(f"the subscription to {self.name!r} is closed")

    def _take(self, attachment: Attachment, shared: int | None = None) -> Snapshot | None:
        try:
            pin = attachment.take() if shared is None else attachment.share(shared)
        except IndexError:
            raise ClosedError(
                f"this process keeps {at.MOST_PINS} snapshots of {self.name!r}, as many as it may: let some go, and "
                "arrays that were taken from them"
            ) from None
        # looked at after the pin is there: the thread that ends all looks for pins after this is set
        if self._closing.is_set():
            self._check()
        return None if pin is None or attachment is not self._attachment else Snapshot(attachment, pin)

    def _what_is_missing(self, newer_than: int, deadline: Deadline) -> str:
        wanted = f"a version of {self.name!r} newer than {newer_than}" if newer_than else f"a version of {self.name!r}"
        if self._attachment is None:
            there = f"nobody of this user publishes it {self._where or 'on this host'}"
        else:
            version = self._attachment.version
            there = f"the newest is {version}" if version else "its publisher has published nothing yet"
            there += "" if self._attachment.connected else ", and its publisher is gone"
        if self._follower is not None and self._follower.trouble:
            there = self._follower.trouble if self._attachment is None else f"{there} ({self._follower.trouble})"
        return f"waited {deadline} for {wanted}: {there}"

    # -- the thread --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Attaches to one publisher after another, and keeps the life lock of each as long as pins there may matter."""
        try:
            while (attachment := self._next_publisher()) is not None:
                self._kept.append(attachment)
                attachment.live()
                while attachment.version == 0 and self._attachment is not None:  # what is there is better than nothing
                    if self._ended(attachment, _LOOK_SECONDS):
                        break
                else:
                    with self._changed:
                        self._attachment = attachment
                        self._changed.notify_all()
                    while not self._ended(attachment, None if self._let_go() else _LOOK_SECONDS):
                        pass
                attachment.connected = False
                attachment.link.close()
                self._let_go()
                if self._closing.is_set():
                    break
        except BaseException as error:
            with self._changed:
                self._refusal = StartupError(f"the subscription to {self.name!r} has failed: {error!r}")
                self._changed.notify_all()
        while kept := [one for one in self._kept if not one.die()]:
            self._kept = kept
            time.sleep(_LOOK_SECONDS)
        if self._follower is not None:
            self._follower.close()
        for end in self._ends:
            end.close()

    def _let_go(self) -> bool:
        """Lets go of publishers before the current one that no snapshot is left of; whether that is all of them."""
        self._kept = [one for one in self._kept if one is self._attachment or not one.die()]
        return self._kept == [self._attachment]

    def _next_publisher(self) -> Attachment | None:
        """Looks until there is one; None when the subscription is closed."""
        while not self._closing.is_set():
            found: list[Attachment] = []
            try:
                for address in names.addresses(self.name, self._job):
                    with contextlib.suppress(MultiversoError):
                        seen = max(self._seen, self.version)
                        found.append(Attachment(address, seen, time.monotonic() + _ANSWER_SECONDS))
                refusal = self._ambiguous(len(found))
                if not found:
                    self._look_elsewhere()
            except MultiversoError as error:
                refusal = error
            if len(found) == 1:
                return found[0]
            for attachment in found:
                attachment.link.close()
            with self._changed:
                self._refusal = refusal
                self._changed.notify_all()
            self._closing.wait(_LOOK_SECONDS)
        return None

    def _look_elsewhere(self) -> None:
        """Follows what is published on another host, if that is known."""
        now = time.monotonic()
        if self._find is None or self._follower is not None or now < self._asked + _FIND_SECONDS:
            return
        self._asked = now
        if (source := self._find()) is not None:
            self._follower = Follower(self.name, self._find, source.job)

    def _ambiguous(self, number: int) -> MultiversoError | None:
        if number < 2:
            return None
        return StartupError(
            f"{number} jobs of this user publish {self.name!r} on this host, or receive it from another one: say "
            "which, by job=, the address that `multiverso top --json` shows, or by address="
        )

    def _ended(self, attachment: Attachment, seconds: float | None) -> bool:
        """Waits so long for the end of a publisher, or of this subscription."""
        poll = select.poll()
        poll.register(self._ends[1].fileno(), select.POLLRDHUP)
        poll.register(attachment.link.connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(None if seconds is None else seconds * 1000))


def subscribe(
    name: str,
    job: str | None = None,
    *,
    address: str | None = None,
    token: str = "",
    encrypted: bool = True,
    timeout_seconds: float = 120.0,
) -> Subscription:
    """Returns a subscription to a publication of this user on this host; see `multiverso.Publication`.

    The publisher may be a worker on another host of a job that has workers on this one: one process of this host
    receives, and all readers here share its copy.

    It returns at once; the first read waits for a publisher and its first version. When the publisher ends or dies, its
    last version stays, and the subscription follows the next publisher of the name, whose versions are higher.

    Args:
        name: of the publication.
        job: the address of the publishing job, from ``multiverso top --json`` or MULTIVERSO_NODE. By default the only
            one here that publishes this name.
        address: ``host:port`` of a publication on another host, from ``Publication.forward``. One process of this host
            receives it, and all that subscribe here with this address and token read its copy; when that process ends,
            another one takes over.
        token: the token of ``Publication.forward``.
        encrypted: False if ``Publication.forward`` was called so.
        timeout_seconds: deadline of each wait for a version.

    Raises:
        ValueError: an invalid name, address or token; or both ``job`` and ``address``.
        StartupError: pyOpenSSL, which encrypts connections between hosts, is not installed.

    Examples:
        >>> import numpy as np
        >>> import multiverso as mv
        >>> weights = {"w": np.arange(6, dtype="float32").reshape(2, 3)}
        >>> with mv.Publication("weights-of-docs", like=weights) as publication:
        ...     publication.publish(weights, step=7)
        ...     with mv.subscribe("weights-of-docs") as subscription, subscription.latest() as snapshot:
        ...         print(snapshot.version, snapshot.step, snapshot["w"].sum())
        1
        1 7 15.0
    """
    if address is not None:
        if job is not None:
            raise ValueError(f"a publication is of a job or at an address: got both, job={job!r} and {address=}")
        source = Source.of(names.checked(name), address, token, encrypted)
        return Subscription(name, source.job, timeout_seconds, find=lambda: source, where=f"at {address}")
    return Subscription(name, job, timeout_seconds, find=lambda: Source.in_job(name, job))


def _after_fork_in_child() -> None:
    """A forked child that kept the connection would make its parent look alive to the publisher."""
    for subscription in list(_open):
        for end in subscription._ends:
            end.close()
        attachment = subscription._attachment
        if attachment is not None:
            attachment.link.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
