"""Which hosts and devices a run uses, from the environment and from ``.platoonrc`` files.

In order of priority, the first that says something wins:

1. ``PLATOON_DEVICES`` and ``PLATOON_HOSTS``: names separated by commas;
2. the files named in ``PLATOONRC``, separated by colons, the rightmost first;
3. ``.platoonrc`` in the working directory;
4. ``~/.platoonrc``.

A file has the sections ``platoon`` (``hosts = ...``) and ``devices`` (one line for each host)::

    [platoon]
    hosts = first, second

    [devices]
    first = cuda0, cuda1
    second = cuda0

Everything is read when it is asked for, so a change of the environment counts.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from pathlib import Path

from platoon.util import PlatoonError


def config_files_from_platoonrc() -> list[str]:
    """Returns the configuration files in the order in which they are read: a later one wins."""
    files = [Path("~/.platoonrc").expanduser(), Path.cwd() / ".platoonrc"]
    files += [Path(name).expanduser() for name in os.environ.get("PLATOONRC", "").split(os.pathsep) if name]
    return [str(file) for file in files]


def fetch_devices_for_host(host: str) -> list[str]:
    """Returns the devices that the configuration names for a host.

    Raises:
        KeyError: it names none.
        PlatoonError: a configuration file cannot be read.
    """
    return _from_environment("PLATOON_DEVICES") or _from_files("devices", host)


def fetch_hosts() -> list[str]:
    """Returns the hosts that the configuration names.

    Raises:
        KeyError: it names none.
        PlatoonError: a configuration file cannot be read.
    """
    return _from_environment("PLATOON_HOSTS") or _from_files("platoon", "hosts")


def _from_environment(name: str) -> list[str]:
    return _names(os.environ.get(name, ""))


def _from_files(section: str, option: str) -> list[str]:
    parser = configparser.ConfigParser(_variables())
    for file in config_files_from_platoonrc():
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise PlatoonError(f"cannot read the configuration file {file}", error) from error
    if not parser.has_option(section, option):
        raise KeyError(option)
    try:
        value = parser.get(section, option)
    except configparser.InterpolationError:
        value = parser.get(section, option, raw=True)
    names = _names(value)
    if not names:
        raise KeyError(option)
    return names


def _names(text: str) -> list[str]:
    return [name.strip("\"'") for name in re.split(r"[,\s]+", text) if name.strip("\"'")]


def _variables() -> Mapping[str, str]:
    # What a value may refer to as %(USER)s. A per cent sign in the environment must not be expanded in turn.
    user = os.environ.get("USER") or Path("~").expanduser().name
    names = {name: os.environ.get(name, "") for name in ("LSCRATCH", "TMPDIR", "TEMP", "TMP")}
    return {key: value.replace("%", "%%") for key, value in {"USER": user, "PID": str(os.getpid()), **names}.items()}
