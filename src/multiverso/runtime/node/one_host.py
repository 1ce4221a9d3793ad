"""The interface of a node to its job's hosts, implemented for one; for several see `several_hosts.other_hosts`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from multiverso.errors import StartupError
from multiverso.hosts.control.messages import Note
from multiverso.runtime.job.control import Control
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.creation import Creations
from multiverso.wire.messages import Message
from multiverso.wire.requests import Attach, Request


class Hosts:
    """The hosts of a job: this one. Owner: the node; the methods are for its thread, but `meet`, `stay` and `close`.

    Attributes:
        several: whether there are others.
        leads: whether this is the first one, which says what concerns all.
        job: what the hosts call their job; empty where there is one host.
        is_entering: whether this host takes a lost one's place, and has not got what there is yet.
        times_replaced: how often this host was lost after it had begun.
        places: the host of each worker, and this one's name; nothing where there is one.
        replaces: whether, where the others continue, a new process may take the place of a worker that died; said by
            the node.
        ended: workers of this host that will not return, in any run; said by `Membership`.
    """

    several = False
    leads = True
    job = ""
    is_entering = False
    times_replaced = 0
    places: tuple[tuple[str, ...], str] = (), ""
    replaces = False

    def __init__(self) -> None:
        self.ended: set[int] = set()

    def meet(self, post: Callable[[Any], None], address: str) -> None:
        """Says how to reach the node, before `begin`.

        Args:
            post: hands an order (see `obey`), or something to call, to the node's thread; from any thread.
            address: the node's, for processes of this host.
        """

    def close(self) -> None:
        """Ends that. The other hosts take it for a loss unless the job is over."""

    def begin(self, control: Control, catalogue: Catalogue, fixed: bool) -> Creations:
        """The memory of a run is there: begins to talk with the other hosts; returns what makes tables in it.

        Args:
            control: the control segment.
            catalogue: the tables.
            fixed: whether the number of workers is fixed.

        Raises:
            StartupError: another host cannot be reached.
        """
        return Creations(catalogue, control, fixed)

    def answer(self, connection: Connection, request: Request) -> None:
        """Answers what only workers of a job on several hosts ask.

        Raises:
            StartupError: this one is on one host.
        """
        raise StartupError(f"only workers of a job on several hosts ask for {type(request).__name__!r}")

    def find(self, publication: str) -> Message:
        """Returns where a worker of another host publishes under a name, as `wire.requests.Find` has it."""
        return {"address": None}

    def stay(self, closing: threading.Event, stopped: Callable[[], bool] | None) -> bool:
        """Waits until no other host needs this one's copies; see `Node.stay`."""
        return True

    # -- what happens on this host ---------------------------------------------------------------------------

    def options_of(self, request: Attach) -> Message:
        """Returns the options for several hosts with which a worker has called ``init``.

        Raises:
            StartupError: they do not go with its others.
        """
        return {}

    def agree_on(self, options: Message) -> bool:
        """This host's first worker has come; returns whether its options are known to be everybody's."""
        return True

    def look(self) -> None:
        """A worker of this host has come, left or died."""

    def forget(self, connection: Connection) -> None:
        """A process no longer waits for an answer."""

    # -- what happens on others ------------------------------------------------------------------------------

    def obey(self, order: Any, members: Any, end: Callable[[], None]) -> None:
        """Does what the coordinator says.

        Args:
            order: of ``hosts/control/messages.py``; `Alone` says that this host cannot continue.
            members: who is in the job, see `Membership`.
            end: ends the node.
        """

    def notes(self) -> dict[int, Note]:
        """Returns what other hosts know of their workers, by the workers' numbers."""
        return {}

    def remote_publications(self) -> list[dict[str, Any]]:
        """Returns what is published and followed on other hosts, with the name of each's ``host``."""
        return []

    def links(self) -> list[dict[str, Any]]:
        """Returns what went to and came from each other host beside the coordinator's orders, for `multiverso top`."""
        return []
