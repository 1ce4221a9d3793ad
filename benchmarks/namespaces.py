"""Hosts of this machine with limited links between them: network namespaces, and a token bucket at either end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESSES = ("10.78.0.1", "10.78.0.2")
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TICKS = 250  # the bucket is filled at least as often in a second


def ip(*arguments: object) -> None:
    """Changes the network."""
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


def inside(name: str, *command: object) -> str:
    """Returns what a command prints in a namespace."""
    whole = ["ip", "netns", "exec", name, *map(str, command)]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout


_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@contextlib.contextmanager
def two_hosts(rate: str, control: str | None = None) -> Iterator[list[str]]:
    """Gives the names of two namespaces.

    Args:
        rate: of the link between them, as tc names it, such as ``10mbit``.
        control: how TCP there decides how much it sends; as on this machine by default.
    """
    names = [f"mvbench{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", f"v{host}")
            ip("-n", name, "link", "set", f"v{host}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            _limit(name, f"v{host}", rate)
            if control is not None:
                inside(name, "sh", "-c", f"echo {control} > {_CONTROL}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def star(rate: str, hosts: int) -> Iterator[list[str]]:
    """Gives the names of several namespaces, at `address_in_star` each, whose links `v` meet in a switch.

    Args:
        rate: of each host's link, each way, as of `two_hosts`.
        hosts: how many.
    """
    switch, *names = [f"mvbench{os.getpid()}-{host}" for host in ("switch", *range(hosts))]
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            ip("link", "add", "v", "netns", name, "type", "veth", "peer", "name", f"w{host}", "netns", switch)
            ip("-n", switch, "link", "set", f"w{host}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address_in_star(host)}/24", "dev", "v")
            ip("-n", name, "link", "set", "v", "up")
            ip("-n", name, "link", "set", "lo", "up")
            _limit(name, "v", rate)
            _limit(switch, f"w{host}", rate)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def address_in_star(host: int) -> str:
    """Returns the address of a host of a `star`."""
    return f"10.79.0.{host + 1}"


def bytes_a_second(rate: str) -> float:
    """Returns what a rate as of `two_hosts` is."""
    number, unit = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit] / 8


def _limit(name: str, device: str, rate: str) -> None:
    burst = max(64 * 1024, int(bytes_a_second(rate)) // _TICKS)
    limit = ("tbf", "rate", rate, "burst", burst, "latency", "50ms")
    inside(name, "tc", "qdisc", "add", "dev", device, "root", *limit)


def sent(names: list[str]) -> int:
    """Returns how many bytes both hosts have sent over the link, headers and all."""
    files = [f"/sys/class/net/v{host}/statistics/tx_bytes" for host in range(2)]
    return sum(int(inside(name, "cat", file)) for name, file in zip(names, files, strict=True))


def mpi_results(
    names: list[str],
    hosts: int,
    each: int,
    folder: Path,
    command: list[object],
    environment: dict[str, str],
    seconds: float,
) -> list[Any]:
    """Returns what the workers print, a line of JSON each, that MPICH's mpiexec starts in `two_hosts`.

    Args:
        names: of the namespaces.
        hosts: on how many of them.
        each: workers on each.
        folder: an empty one, for the script by which mpiexec enters a namespace.
        command: a worker's.
        environment: variables of the workers, beside this process's own.
        seconds: of all of it, at most.
    """
    enter = folder / "enter"
    enter.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=${1##*.}; shift\n'
        f'exec ip netns exec {names[0][:-1]}$((host - 1)) sh -c "$*"\n'
    )
    enter.chmod(0o755)
    mpiexec = Path(sys.executable).parent / "mpiexec.hydra"
    whole = [
        *("ip", "netns", "exec", names[0], mpiexec, "-launcher", "ssh", "-launcher-exec", enter),
        *("-hosts", ",".join(ADDRESSES[:hosts]), "-ppn", each, "-n", hosts * each, *command),
    ]
    with subprocess.Popen(
        list(map(str, whole)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as started:
        try:
            out, err = started.communicate(timeout=seconds)
        finally:  # also after SIGTERM: mpiexec's own helpers are in its group, and end its workers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
    if started.returncode:
        raise SystemExit(f"{command} failed with exit code {started.returncode}:\n{out}{err}")
    return [json.loads(line) for line in out.splitlines()]


def enter(name: str) -> None:
    """This process is in a namespace from here on."""
    with open(f"/var/run/netns/{name}", "rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def own_loopback(control: str | None = None) -> None:
    """This process and those that it starts have a loopback device of their own from here on; needs root.

    Args:
        control: how TCP there decides how much it sends; by default as in any new network of this machine.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    ip("link", "set", "lo", "up")
    if control is not None:
        _CONTROL.write_text(control)


def congestion_control() -> str:
    """Returns how this machine's TCP decides how much it sends: BBR and the others differ much on such links."""
    return _CONTROL.read_text().strip()
