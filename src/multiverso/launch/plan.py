"""The hosts of a job on several, for the launcher that starts it: who they are, and how a command runs on each."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.addresses import ANY
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.launch.place import FROM_INPUT
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.ssh import addresses_of, checked_ssh, over_ssh


@dataclass(frozen=True)
class HostPlan:
    """The hosts of a job.

    Attributes:
        roster: who they are, and how many workers each has.
        ssh: what reaches a host; None in a rehearsal, whose hosts are all this machine.
        listening: in a rehearsal, the port that the other hosts come to.
    """

    roster: Roster
    ssh: Sequence[str] | None = None
    listening: socket.socket | None = None

    @classmethod
    def rehearsal(cls, workers: Sequence[int], grace: float = 30.0) -> HostPlan:
        """Hosts that are all this machine; `close` the plan once they have begun.

        Args:
            workers: how many each has.
            grace: see `Roster`.
        """
        listening = socket.create_server(("127.0.0.1", 0))
        # not encrypted: nothing leaves this machine
        return cls(rehearsal_roster(workers, listening, encrypted=False, grace=grace), listening=listening)

    @classmethod
    def by_ssh(
        cls, names: Sequence[str], workers: Sequence[int], ssh: str, *, port: int, encrypted: bool, grace: float = 30.0
    ) -> HostPlan:
        """Hosts by name, reached by ssh: the same folder and the same interpreter there as here.

        Args:
            names: what they are called, as `checked_names` returns it.
            workers: how many each has.
            ssh: the command that reaches one.
            port: where the first host listens for the others.
            encrypted: whether hosts encrypt what they send each other.
            grace: see `Roster`.

        Raises:
            StartupError: there is no such command, or a name is none for the other hosts.
        """
        command = checked_ssh(ssh)
        addresses = addresses_of(names, command)
        first, credentials = (addresses[0], port), new_credentials(encrypted).to_text()
        roster = Roster(0, tuple(names), tuple(workers), first, credentials, bind=ANY, addresses=addresses, grace=grace)
        return cls(roster, command)

    def on(self, host: int, command: WorkerCommand, passed_on: Sequence[str]) -> WorkerCommand:
        """Returns what to start here, so that a command runs on a host and finds its roster there (see `place`).

        Args:
            host: its number.
            command: what is to run there.
            passed_on: the variables that its environment has on another machine, too, where they are set.
        """
        environ = {**command.environ, ROSTER_VARIABLE: self.roster.on(host).as_text()}
        arguments, descriptors = command.arguments, command.descriptors
        if self.ssh is not None:
            variables = [f"{ROSTER_VARIABLE}={FROM_INPUT}"]
            variables += [f"{name}={environ[name]}" for name in passed_on if name in environ]
            arguments = over_ssh(self.ssh, self.roster.names[host], arguments, variables, self.roster.grace)
        if self.listening is not None and host == 0:
            environ[LISTENER_VARIABLE] = str(self.listening.fileno())
            descriptors = (*descriptors, self.listening.fileno())
        return replace(command, arguments=arguments, environ=environ, descriptors=descriptors)

    def close(self) -> None:
        """Closes the port."""
        if self.listening is not None:
            self.listening.close()


def rehearsal_roster(workers: Sequence[int], listening: socket.socket, *, encrypted: bool, grace: float) -> Roster:
    """Returns who is on which of the hosts ``host-0``, ``host-1`` and so on, which are all this machine.

    Args:
        workers: how many workers each has.
        listening: the coordinator's port.
        encrypted: whether their messages are.
        grace: seconds without a word of a host until it counts as lost.
    """
    names = tuple(f"host-{host}" for host in range(len(workers)))
    credentials = new_credentials(encrypted).to_text()
    address = listening.getsockname()[:2]
    return Roster(0, names, tuple(workers), address, credentials, rehearsal=True, grace=grace)
