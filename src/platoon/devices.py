"""Device names (``cpu``, ``cuda1``, ``gpu1``) and what a process must have in its environment to use one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence

from multiverso.launch import visible_gpus
from platoon import configparser
from platoon.util import PlatoonError, counted

_DEVICE = re.compile(r"^(?:cpu|(?:cuda|gpu)(\d*))$")


def check_devices(names: list[str]) -> list[str]:
    """Returns the names if all of them are devices.

    Raises:
        PlatoonError: one is not ``cpu``, ``cudaN`` or ``gpuN``.
    """
    for name in names:
        if not _DEVICE.match(name):
            raise PlatoonError(f"{name!r} is not a device; expected cpu, cuda0, cuda1, ... (or gpu0, gpu1, ...)")
    return names


def find_devices(names: Sequence[str] | None = None, other_host: str | None = None) -> list[str]:
    """Returns the devices to use: those given, else the configured ones, else all GPUs of this host.

    Raises:
        PlatoonError: there are none, or a name is not a device.
    """
    host = other_host or socket.gethostname()
    try:
        return check_devices(list(names or configparser.fetch_devices_for_host(host)))
    except KeyError:
        gpus = visible_gpus(os.environ)
    if other_host:
        raise PlatoonError(
            f"no devices for {host}: name those of every host with -D, or its own in a configuration file's [devices]"
        )
    if not gpus:
        raise PlatoonError(
            f"no devices: none were given, the configuration names none for {host}, and it has no GPU. "
            "For two workers on the processor say -D cpu cpu"
        )
    return [f"cuda{i}" for i in range(len(gpus))]


def device_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what to add to the environment of a process that is to use one device.

    The process sees its GPU as the only one, number 0, whatever framework it uses; one on ``cpu`` sees none.
    """
    match = _DEVICE.match(check_devices([device])[0])
    assert match is not None
    number = match.group(1)
    added = {"PLATOON_DEVICE": device}
    if number is None:
        added["CUDA_VISIBLE_DEVICES"] = ""
        theano_device = "cpu"
    else:
        gpus, index = _gpus(environment), int(number or 0)
        if index >= len(gpus):
            raise PlatoonError(
                f"{device} was asked for, but only {counted(len(gpus), 'GPU')} can be seen here. If it "
                "exists and was not found, name it in CUDA_VISIBLE_DEVICES"
            )
        added["CUDA_VISIBLE_DEVICES"] = gpus[index]
        theano_device = "cuda0"
    # Of two entries for one flag Theano and PyTensor take the last; an empty first entry is an error for
    # them.
    flags = [environment.get("THEANO_FLAGS", ""), f"device={theano_device}"]
    added["THEANO_FLAGS"] = ",".join(flag for flag in flags if flag)
    return added


def _gpus(environment: Mapping[str, str]) -> list[str]:
    # A controller sees no GPU, so the launcher lists them.
    given = environment.get("PLATOON_GPUS")
    return visible_gpus(environment) if given is None else given.split(",")
