"""What `platoon-launcher` starts: a controller here, or one on each of several hosts."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multiverso.launch import visible_gpus
from multiverso.launch.plan import HostPlan
from multiverso.launch.ssh import MOST_HOSTS, checked_names
from platoon.devices import device_environment, find_devices
from platoon.processes import Program, program
from platoon.util import PlatoonError

DEFAULT_HOSTS_PORT = 29600
_PASSED_ON = (
    "PLATOON_LAUNCHED",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "MULTIVERSO_TIMEOUT_SECONDS",
    "MULTIVERSO_CACHE_DIR",
    "THEANO_FLAGS",
)


@dataclass(frozen=True)
class Start:
    """How a controller is started.

    Attributes:
        experiment: NAME of NAME_worker.py, and of NAME_controller.py if there is one.
        logs: where its output goes, and its workers'.
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
        hosts: who they are; nothing where there is this one alone.
    """

    devices: list[list[str]]
    hosts: HostPlan | None = None

    @classmethod
    def alone(cls, devices: Sequence[str] | None) -> Plan:
        """Returns the plan for this host.

        Raises:
            PlatoonError: there is no such device here, or none at all.
        """
        return cls([_checked_here(find_devices(devices))])

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
            each = [_checked_here(find_devices(devices, f"host-{host}")) for host in range(int(hosts[0]))]
            return cls(each, HostPlan.rehearsal(list(map(len, each))))
        names = checked_names("-H", hosts)
        each = [find_devices(devices, name.rpartition("@")[2]) for name in names]
        return cls(each, HostPlan.by_ssh(names, list(map(len, each)), ssh, port=port, encrypted=encrypted))

    @property
    def workers_num(self) -> int:
        """How many workers there will be, on all hosts."""
        return sum(map(len, self.devices))

    @property
    def names(self) -> tuple[str, ...]:
        """What the hosts are called; nothing where there is this one alone."""
        return () if self.hosts is None else self.hosts.roster.names

    def __str__(self) -> str:
        return ", ".join(self.names) or " ".join(self.devices[0])

    def controller(self, host: int, start: Start, variables: Mapping[str, str], status: int) -> Program:
        """Returns a host's controller, to be started.

        Args:
            host: its number.
            start: how.
            variables: what its environment has besides.
            status: an open socket for its reports, if it is on this machine.
        """
        devices = self.devices[host]
        environment = {**variables, "PLATOON_LAUNCHED": start.launched(devices)}
        descriptors: tuple[int, ...] = ()
        if self.hosts is None or self.hosts.ssh is None:
            environment["PLATOON_STATUS_FD"], descriptors = str(status), (status,)
        if self.hosts is None and set(devices) != {"cpu"}:
            environment["PLATOON_GPUS"] = ",".join(visible_gpus(os.environ))
        name = f"controller_{self.names[host]}" if self.hosts else "controller"
        made = program(name, start.arguments(devices), "cpu", start.logs, environment, descriptors=descriptors)
        return replace(made, command=self.hosts.on(host, made.command, _PASSED_ON)) if self.hosts else made


def _checked_here(devices: list[str]) -> list[str]:
    """Returns devices of this machine: an error now, and not when some workers run already."""
    for device in set(devices):
        device_environment(device, os.environ)
    return devices
