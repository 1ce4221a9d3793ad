"""What `platoon-launcher` starts: a controller here, or one on each of several hosts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multiverso.errors import StartupError
from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.addresses import ANY
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.launch import WorkerCommand
from multiverso.launch.place import FROM_INPUT
from multiverso.launch.ssh import MOST_HOSTS, addresses_of, checked_names, checked_ssh, over_ssh
from platoon import configparser
from platoon.devices import check_devices, device_environment
from platoon.processes import Program, program
from platoon.util import PlatoonError

DEFAULT_HOSTS_PORT = 29600
_PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "MULTIVERSO_TIMEOUT_SECONDS", "MULTIVERSO_CACHE_DIR", "THEANO_FLAGS")


@dataclass(frozen=True)
class Start:
    """How a controller is started.

    Attributes:
        experiment: NAME of NAME_worker.py, and of NAME_controller.py if there is one.
        logs: where its workers' output goes.
        worker_args: what to append to their command line.
        controller_args: what to append to its own.
        multi: whether it is one of several.
    """

    experiment: str
    logs: str
    worker_args: str
    controller_args: str
    multi: bool = False

    def arguments(self, devices: Sequence[str]) -> list[str]:
        """Returns those of ``python``."""
        own = Path(f"{self.experiment}_controller.py")
        script = [str(own)] if own.is_file() else ["-m", "platoon.channel.controller"]
        how = "--multi" if self.multi else "--single"
        arguments = [*script, self.experiment, self.logs, how, "-D", *devices, *shlex.split(self.controller_args)]
        return [*arguments, f"--worker-args={self.worker_args}"] if self.worker_args else arguments

    def launched(self, devices: Sequence[str]) -> str:
        """Returns the same for a controller that does not read its command line."""
        launched = {
            "experiment_name": self.experiment,
            "log_directory": self.logs,
            "worker_args": self.worker_args,
            "devices": list(devices),
        }
        return json.dumps({**launched, "multi": True} if self.multi else launched)


@dataclass
class Plan:
    """The hosts of a job and how they are reached. Used in a ``with``: it holds the port that the others come to.

    Attributes:
        roster: the hosts.
        devices: those of each.
        ssh: what reaches a host; nothing for a rehearsal on this machine.
    """

    roster: Roster
    devices: list[list[str]]
    ssh: list[str] | None
    _listening: socket.socket | None = field(default=None, repr=False)

    @classmethod
    def of(cls, hosts: Sequence[str], devices: Sequence[str] | None, *, ssh: str, port: int, encrypted: bool) -> Plan:
        """Returns the plan for hosts by name, or for a number of them on this machine.

        Raises:
            PlatoonError: a host is given twice, has no devices, or there is no ssh.
        """
        rehearsal = len(hosts) == 1 and hosts[0].isdecimal()
        if rehearsal and not 2 <= int(hosts[0]) <= MOST_HOSTS:
            raise PlatoonError(f"-H {hosts[0]}: a rehearsal has 2 to {MOST_HOSTS} hosts")
        if rehearsal:
            names = tuple(f"host-{host}" for host in range(int(hosts[0])))
        else:
            names, command, addresses = _reached(hosts, ssh)
        each = [_devices_of(name, devices) for name in names]
        workers = tuple(map(len, each))
        if rehearsal:
            for device in {device for own in each for device in own}:
                device_environment(device, os.environ)  # an error now, and not when some workers run already
            listening = socket.create_server(("127.0.0.1", 0))
            credentials = new_credentials(encrypted=False).to_text()  # nothing leaves this machine
            first = listening.getsockname()[:2]
            return cls(Roster(0, names, workers, first, credentials, rehearsal=True), each, None, listening)
        credentials = new_credentials(encrypted).to_text()
        first = (addresses[0], port)
        roster = Roster(0, names, workers, first, credentials, bind=ANY, addresses=addresses)
        return cls(roster, each, command)

    def controllers(self, start: Start, logs: Path, variables: Mapping[str, str], status: int) -> list[Program]:
        """Returns the hosts' controllers, to be started.

        Args:
            start: how.
            logs: where their own output goes.
            variables: what their environment has besides.
            status: an open file for the reports of those on this machine.
        """
        made = []
        for host, devices in enumerate(self.devices):
            name = self.roster.names[host]
            roster = {**variables, ROSTER_VARIABLE: self.roster.on(host).as_text()}
            if self.ssh is None:
                descriptors: tuple[int, ...] = (status,)
                environment = {**roster, "PLATOON_STATUS_FD": str(status), "PLATOON_LAUNCHED": start.launched(devices)}
                if host == 0 and self._listening is not None:
                    environment[LISTENER_VARIABLE] = str(self._listening.fileno())
                    descriptors += (self._listening.fileno(),)
                arguments = start.arguments(devices)
                made.append(program(f"controller_{name}", arguments, "cpu", logs, environment, descriptors=descriptors))
                continue
            there = [f"{ROSTER_VARIABLE}={FROM_INPUT}", f"PLATOON_LAUNCHED={start.launched(devices)}"]
            there += [f"{each}={os.environ[each]}" for each in _PASSED_ON if each in os.environ]
            python = [sys.executable, "-u", *start.arguments(devices)]
            out, err = logs / f"controller_{name}.out", logs / f"controller_{name}.err"
            command = WorkerCommand(
                over_ssh(self.ssh, name, python, there, self.roster.grace), {**os.environ, **roster}, files=(out, err)
            )
            made.append(Program(name, command, out, err))
        return made

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        if self._listening is not None:
            self._listening.close()


def _reached(hosts: Sequence[str], ssh: str) -> tuple[tuple[str, ...], list[str], tuple[str, ...]]:
    """Returns the hosts' names, what reaches one, and where they reach each other."""
    try:
        names, command = checked_names("-H", hosts), checked_ssh(ssh)
        return names, command, addresses_of(names, command)
    except StartupError as error:
        raise PlatoonError(str(error)) from error


def _devices_of(host: str, given: Sequence[str] | None) -> list[str]:
    """Returns the devices of a host: those given for all, or the configured ones."""
    if given:
        return check_devices(list(given))
    try:
        return check_devices(configparser.fetch_devices_for_host(host.rpartition("@")[2]))
    except KeyError:
        raise PlatoonError(
            f"no devices for {host}: name those of every host with -D, or its own in a configuration file's [devices]"
        ) from None
