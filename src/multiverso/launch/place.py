"""Which part of a job this launcher runs: all of it, or one host's workers of a job on several."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING

from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE, Roster
from multiverso.launch._ssh import SIGNALS

if TYPE_CHECKING:
    from multiverso.runtime.several_hosts.other_hosts import OtherHosts

FROM_INPUT = "-"  # what the variable of the roster says where that comes by standard input, see `_ssh`
JOB_VARIABLE = "MULTIVERSO_JOB"  # its value is one job's: how all of its processes are found
# what a host's launcher ends with where it cannot do its part: no code of sysexits.h, nor of a shell, a signal or ssh,
# as it ends with its workers' otherwise
REFUSED = 239
_LONGEST_ROSTER = 1 << 20


def _read_line() -> str:
    """Reads one line of standard input, and not a byte more."""
    return FileIO(0, closefd=False).readline(_LONGEST_ROSTER).decode("utf-8", "replace")


def _obey_input() -> None:
    """Passes on the signals that the job's launcher sends as lines; its end is a request to end, too."""
    while line := _read_line().strip():
        if line.isdecimal() and int(line) in SIGNALS:
            os.kill(os.getpid(), int(line))
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Place:
    """One launcher's part of a job.

    Attributes:
        workers: the numbers of the workers that it starts.
        workers_num: how many the job has.
        on_machine: how many of them share this machine's cores and devices.
        first_on_machine: which of those its own first one is.
        name: the host's name, in a job on several.
        other_hosts: what its node needs in a job on several hosts.
    """

    workers: range
    workers_num: int
    on_machine: int
    first_on_machine: int = 0
    name: str = ""
    other_hosts: OtherHosts | None = None

    @property
    def keeps_stdin(self) -> bool:
        """Whether standard input is the first worker's, and not the way from the job's launcher."""
        return self.other_hosts is None or self.other_hosts.roster.rehearsal

    @property
    def leads(self) -> bool:
        """Whether this is the job's only host, or its first one."""
        return self.other_hosts is None or self.other_hosts.roster.leads

    @property
    def goes_on(self) -> bool:
        """Whether this host was lost, and continues in a job that has begun."""
        return self.other_hosts is not None and self.other_hosts.roster.times_replaced > 0

    @classmethod
    def alone(cls, workers_num: int) -> Place:
        """A job on one host."""
        return cls(range(workers_num), workers_num, workers_num)


def here(workers_num: int) -> Place:
    """Returns this launcher's part of a job.

    Where the launcher of a job on several hosts has started this one, it is a host's: what the environment says of it
    is taken out, as it is not meant for processes below.
    """
    text = os.environ.pop(ROSTER_VARIABLE, None)
    if text == FROM_INPUT:
        text = _read_line()
        threading.Thread(target=_obey_input, name="multiverso-launcher", daemon=True).start()
    descriptor = os.environ.pop(LISTENER_VARIABLE, None)
    if text is None:
        return Place.alone(workers_num)
    roster = Roster.from_text(text)
    # not above: it takes long to import, and a job on one host has no use for it
    from multiverso.runtime.several_hosts.other_hosts import other_hosts_of

    return place_in(roster, other_hosts_of(roster, None if descriptor is None else int(descriptor)))


def place_in(roster: Roster, other_hosts: OtherHosts | None = None) -> Place:
    """Returns the part of a job that a roster gives its host, whose node needs what ``other_hosts`` is."""
    workers = roster.local
    assert isinstance(workers, range)  # a launcher of ours has numbered them
    on_machine = roster.workers_num if roster.rehearsal else len(workers)
    first = workers.start if roster.rehearsal else 0
    name = roster.names[roster.host]
    return Place(workers, roster.workers_num, on_machine, first, name, other_hosts)
