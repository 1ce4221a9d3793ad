"""Hosts that are reached by ssh: what they are called, where the others reach them, and how a command runs on one."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from multiverso.errors import StartupError

MOST_HOSTS = 64
# No questions: nobody sees them.
DEFAULT_SSH = "ssh -o BatchMode=yes"
_LOOK_SECONDS = 5.0
_PROBES = 3
_LONGEST_SILENCE_SECONDS = 1e6
_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")


def checked_names(option: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of a job's hosts, which may have a user's before an @.

    Args:
        option: what they were given by.
        hosts: their names.

    Raises:
        StartupError: one is no name or stands there twice, or there are too many.
    """
    # an address of IPv6 has brackets before a port, and none for ssh
    names = tuple(name.strip().replace("[", "").replace("]", "") for name in hosts)
    if not all(re.fullmatch(r"[\w.@:%-]+", name) and not name.startswith("-") for name in names):
        raise StartupError(f"{option} {','.join(hosts)}: give a number, or hosts' names.")
    if len(set(names)) < len(names) or len(names) > MOST_HOSTS:
        raise StartupError(f"{option} {','.join(hosts)}: each host once, {MOST_HOSTS} at most.")
    return names


def checked_ssh(ssh: str) -> list[str]:
    """Returns the words of the command that reaches a host.

    Raises:
        StartupError: there is no such program.
    """
    words = shlex.split(ssh)
    if not words or shutil.which(words[0]) is None:
        raise StartupError(f"--ssh {ssh}: {words[0] if words else 'it'} is not found.")
    return words


def _noticing(ssh: Sequence[str], seconds: float) -> list[str]:
    """Returns a command that ends by itself once a host has been silent for longer than that.

    A host whose power or cable is pulled ends no connection. Only OpenSSH is told so; what `ssh` says already counts.

    Args:
        ssh: what reaches a host.
        seconds: for how long a host may be silent.
    """
    if Path(ssh[0]).name != "ssh":
        return list(ssh)
    interval = math.ceil(min(seconds, _LONGEST_SILENCE_SECONDS) / _PROBES) + 1
    return [*ssh, "-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={_PROBES}"]


def addresses_of(names: Sequence[str], ssh: Sequence[str]) -> tuple[str, ...]:
    """Returns where the hosts reach each other: by the names that are given, or those that ssh's configuration has.

    Args:
        names: the hosts', as `checked_names` returns them.
        ssh: what reaches one.

    Raises:
        StartupError: one of several hosts is called by a name that means another host on each.
    """
    addresses = tuple(_configured(name, ssh) or name.rpartition("@")[2] for name in names)
    own = [name for name, address in zip(names, addresses, strict=True) if _LOOPBACK.fullmatch(address)]
    if own and len(own) < len(names):
        raise StartupError(
            f"--hosts: {own[0]} leads every host to itself: give the name or address by which the other hosts reach it."
        )
    return addresses


def _configured(name: str, ssh: Sequence[str]) -> str | None:
    """Returns what OpenSSH makes of a name, such as an alias of ~/.ssh/config's; None where nothing can be said."""
    if Path(ssh[0]).name != "ssh":
        return None
    try:
        said = subprocess.run(
            [*ssh, "-G", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    found = re.search(r"^hostname ([\w.:%-]+)$", said, re.MULTILINE)
    # the near end of a tunnel: no other host gets through there
    return None if found is None or _LOOPBACK.fullmatch(found[1]) else found[1]


def command_line(arguments: Sequence[str], variables: Sequence[str]) -> str:
    """Returns what a shell on another host is given, to run a command in the same folder as here.

    Args:
        arguments: the command.
        variables: what its environment has, as NAME=VALUE.
    """
    return f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join(variables)} {shlex.join(arguments)}"


def over_ssh(
    ssh: Sequence[str], host: str, arguments: Sequence[str], variables: Sequence[str], silence: float
) -> tuple[str, ...]:
    """Returns the command that runs a launcher on a host; see `_ssh` and `place`.

    Args:
        ssh: what reaches a host: it gets the host's name and one command line.
        host: its name.
        arguments: the command to run there, whose environment has to say where the roster comes from.
        variables: what its environment has, as NAME=VALUE.
        silence: seconds for which the host may be silent; some time later OpenSSH ends by itself.
    """
    helper = (sys.executable, "-I", "-S", str(Path(__file__).parent / "_ssh.py"))
    return (*helper, *_noticing(ssh, silence), host, command_line(arguments, variables))
