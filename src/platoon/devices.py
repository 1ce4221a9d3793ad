"""Device names (``cpu``, ``cuda1``, ``gpu1``) and what a process must have in its environment to use one."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from platoon import configparser
from platoon.util import PlatoonError

_DEVICE = re.compile(r"^(?:cpu|(?:cuda|gpu)(\d*))$")


def check_devices(names: list[str]) -> list[str]:
    """Returns the names if all of them are devices.

    Raises:
        PlatoonError: one is not ``cpu``, ``cudaN`` or ``gpuN``.
    """
    for name in names:
        if not _DEVICE.match(name):
            raise PlatoonError(f"{name!r} is no device; expected cpu, cuda0, cuda1, ... (or gpu0, gpu1, ...)")
    return names


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns what ``CUDA_VISIBLE_DEVICES`` allows, or all GPUs of this host, as CUDA names them."""
    environment = os.environ if environment is None else environment
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() and name.strip() != "-1"]
    files = [file for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name)]
    if files:
        return [str(i) for i in range(len(files))]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    count = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return [str(i) for i in range(count)]


def find_devices(names: list[str] | None = None) -> list[str]:
    """Returns the devices to use: those given, else the configured ones, else all GPUs of this host.

    Raises:
        PlatoonError: there are none, or a name is no device.
    """
    if names:
        return check_devices(list(names))
    host = socket.gethostname()
    try:
        return check_devices(configparser.fetch_devices_for_host(host))
    except KeyError:
        gpus = visible_gpus()
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
        gpus, index = visible_gpus(environment), int(number or 0)
        if gpus and index >= len(gpus):
            raise PlatoonError(f"{device} was asked for, but only {len(gpus)} GPUs are visible here")
        added["CUDA_VISIBLE_DEVICES"] = gpus[index] if gpus else str(index)
        theano_device = "cuda0"
    # Of two entries for one flag Theano and PyTensor take the last; an empty first entry is an error for
    # them.
    flags = [environment.get("THEANO_FLAGS", ""), f"device={theano_device}"]
    added["THEANO_FLAGS"] = ",".join(flag for flag in flags if flag)
    return added
