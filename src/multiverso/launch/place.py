"""Which part of a job this launcher runs: all of it, or one host's workers of a job on several."""

import os
import socket
from dataclasses import dataclass

from multiverso.hosts.control import credentials_of
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.roster import ROSTER_VARIABLE, Roster
from multiverso.hosts.transport import Listener
from multiverso.runtime.abroad import Carrier

LISTENER_VARIABLE = "MULTIVERSO_ROSTER_LISTENER"


class Inherited(Listener):
    """A listening socket that the launcher has opened, so that its port was known before this process began."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)


@dataclass(frozen=True)
class Place:
    """One launcher's part of a job.

    Attributes:
        workers: The numbers of the workers that it starts.
        workers_num: How many the job has.
        on_machine: How many of them share this machine's cores and devices.
        first_on_machine: Which of those its own first one is.
        name: The host's name, in a job on several.
        abroad: What its node needs in a job on several hosts.
    """

    workers: range
    workers_num: int
    on_machine: int
    first_on_machine: int = 0
    name: str = ""
    abroad: tuple[Roster, Carrier, Listener | None] | None = None

    @classmethod
    def alone(cls, workers_num: int) -> "Place":
        """A job on one host."""
        return cls(range(workers_num), workers_num, workers_num)


def here(workers_num: int) -> Place:
    """Return this launcher's part of a job.

    Where the launcher of a job on several hosts has started this one, it is a host's: what the environment says of it
    is taken out, as it is meant for nobody below.
    """
    text = os.environ.pop(ROSTER_VARIABLE, None)
    descriptor = os.environ.pop(LISTENER_VARIABLE, None)
    if text is None:
        return Place.alone(workers_num)
    roster = Roster.from_text(text)
    listener: Listener | None = None
    if descriptor is not None:
        listener = Inherited(int(descriptor))
    elif roster.leads:
        listener = Listener(roster.coordinator)
    on_machine = roster.workers_num if roster.rehearsal else len(roster.local)
    first = roster.local.start if roster.rehearsal else 0
    carrier = Fabric(roster.host, roster.hosts, credentials_of(roster), bind=(roster.bind, 0))
    return Place(
        roster.local,
        roster.workers_num,
        on_machine,
        first,
        roster.names[roster.host],
        (roster, carrier, listener),
    )
