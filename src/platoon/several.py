"""What `platoon-launcher` starts: a controller here, or one on each of several hosts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.addresses import ANY
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.launch import WorkerCommand, visible_gpus
from multiverso.launch.place import FROM_INPUT
from multiverso.launch.ssh import MOST_HOSTS, addresses_of, checked_names, checked_ssh, over_ssh
from platoon import configparser
from platoon.devices import check_devices, device_environment, find_devices
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


@dataclass(frozen=True)
class Plan:
    """Which controllers there will be.

    Attributes:
        devices: those of each host.
        roster: the hosts; nothing where there is this one alone.
        ssh: what reaches a host; nothing where all are this machine.
        listening: the port that the others come to, in a rehearsal.
    """

    devices: list[list[str]]
    roster: Roster | None = None
    ssh: list[str] | None = None
    listening: socket.socket | None = None

    @classmethod
    def alone(cls, devices: Sequence[str] | None) -> Plan:
        """Returns the plan for this host.

        Raises:
            PlatoonError: there is no such device here, or none at all.
        """
        return cls([_checked_here(find_devices(list(devices or ())))])

    @classmethod
    def of(cls, hosts: Sequence[str], devices: Sequence[str] | None, *, ssh: str, port: int, encrypted: bool) -> Plan:
        """Returns the plan for hosts by name, or for a number of them on this machine.

        Raises:
            PlatoonError: a host has no devices.
            StartupError: a host is given twice, or there is no ssh.
        """
        if len(hosts) == 1 and hosts[0].isdecimal():
            if not 2 <= int(hosts[0]) <= MOST_HOSTS:
                raise PlatoonError(f"-H {hosts[0]}: a rehearsal has 2 to {MOST_HOSTS} hosts")
            names = tuple(f"host-{host}" for host in range(int(hosts[0])))
            each = [_checked_here(_devices_of(name, devices)) for name in names]
            listening = socket.create_server(("127.0.0.1", 0))
            credentials = new_credentials(encrypted=False).to_text()  # nothing leaves this machine
            first = listening.getsockname()[:2]
            roster = Roster(0, names, tuple(map(len, each)), first, credentials, rehearsal=True)
            return cls(each, roster, listening=listening)
        names, command = checked_names("-H", hosts), checked_ssh(ssh)
        addresses = addresses_of(names, command)
        each = [_devices_of(name, devices) for name in names]
        credentials = new_credentials(encrypted).to_text()
        first = (addresses[0], port)
        roster = Roster(0, names, tuple(map(len, each)), first, credentials, bind=ANY, addresses=addresses)
        return cls(each, roster, command)

    @property
    def workers_num(self) -> int:
        """How many workers there will be, on all hosts."""
        return sum(map(len, self.devices))

    def __str__(self) -> str:
        return " ".join(self.devices[0]) if self.roster is None else ", ".join(self.roster.names)

    def controllers(self, start: Start, logs: Path, variables: Mapping[str, str], status: int) -> list[Program]:
        """Returns the hosts' controllers, to be started.

        Args:
            start: how.
            logs: where their own output goes.
            variables: what their environment has besides.
            status: an open file for the reports of those on this machine.
        """
        return [self._controller(host, start, logs, variables, status) for host in range(len(self.devices))]

    def _controller(self, host: int, start: Start, logs: Path, variables: Mapping[str, str], status: int) -> Program:
        devices, name = self.devices[host], "controller"
        environment = dict(variables)
        if self.roster is not None:
            name = f"controller_{self.roster.names[host]}"
            environment[ROSTER_VARIABLE] = self.roster.on(host).as_text()
        if self.roster is not None and self.ssh is not None:
            there = [f"{ROSTER_VARIABLE}={FROM_INPUT}", f"PLATOON_LAUNCHED={start.launched(devices)}"]
            there += [f"{each}={os.environ[each]}" for each in _PASSED_ON if each in os.environ]
            python = [sys.executable, "-u", *start.arguments(devices)]
            over = over_ssh(self.ssh, self.roster.names[host], python, there, self.roster.grace)
            out, err = logs / f"{name}.out", logs / f"{name}.err"
            command = WorkerCommand(over, {**os.environ, **environment}, files=(out, err))
            return Program(self.roster.names[host], command, out, err)
        environment |= {"PLATOON_STATUS_FD": str(status), "PLATOON_LAUNCHED": start.launched(devices)}
        if self.roster is None and set(devices) != {"cpu"}:
            environment["PLATOON_GPUS"] = ",".join(visible_gpus(os.environ))
        descriptors = [status]
        if host == 0 and self.listening is not None:
            environment[LISTENER_VARIABLE] = str(self.listening.fileno())
            descriptors.append(self.listening.fileno())
        return program(name, start.arguments(devices), "cpu", logs, environment, descriptors=tuple(descriptors))

    def close(self) -> None:
        """Closes the port."""
        if self.listening is not None:
            self.listening.close()


def _checked_here(devices: list[str]) -> list[str]:
    """Returns devices of this machine: an error now, and not when some workers run already."""
    for device in set(devices):
        device_environment(device, os.environ)
    return devices


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
