"""Reports the publications of this host to those who look at the job from another one."""

from __future__ import annotations

import contextlib

import msgspec

from multiverso.hosts.control.messages import Publication
from multiverso.runtime.session.observing import publications_of
from multiverso.runtime.several_hosts.this_host import ThisHost

_LOOK_SECONDS = 0.5


class Publishers:
    """Asks the publishers now and then, in a thread that begins with the first of them. Owner: `OtherHosts`.

    Args:
        job: the node's address.
        here: this host.

    Attributes:
        seen: what they have said last.
    """

    def __init__(self, job: str, here: ThisHost) -> None:
        self.seen: list[Publication] = []
        self._job, self._here = job, here
        self._watched = False

    def watch(self) -> None:
        """Begins to ask. Called by the node's thread."""
        if not self._watched:
            self._watched = True
            self._here.thread("hosts-publications", self._run)

    def _run(self) -> None:
        while not self._here.closing.wait(_LOOK_SECONDS):
            # no descriptor is free, or one has said nonsense: that ends no job, and the next look may find another
            with contextlib.suppress(Exception):
                self.seen = msgspec.convert(publications_of(self._job), list[Publication])
