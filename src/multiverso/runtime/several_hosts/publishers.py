"""What is published and followed on this host, for those who look at the job from another one."""

from __future__ import annotations

import contextlib
import threading

import msgspec

from multiverso.errors import MultiversoError
from multiverso.hosts.control.messages import Publication
from multiverso.runtime.session.observing import publications_of

_LOOK_SECONDS = 0.5


class Publishers:
    """Asks the publishers now and then, in a thread that begins with the first of them. Owner: `OtherHosts`.

    Args:
        job: the node's address.
        closing: set once everything ends.

    Attributes:
        seen: what they have said last.
    """

    def __init__(self, job: str, closing: threading.Event) -> None:
        self.seen: list[Publication] = []
        self._job, self._closing = job, closing
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Begins to ask. Called by the node's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="multiverso-hosts-publications", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Waits for the thread's end, once ``closing`` is set."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError, MultiversoError):  # no descriptor is free: the next look may find one
                self.seen = msgspec.convert(publications_of(self._job), list[Publication])
