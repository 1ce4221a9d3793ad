"""Two hosts of this machine with a limited link between them: network namespaces, and a token bucket at either end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

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
    number, unit = re.fullmatch(r"(\d+)(kbit|mbit|gbit)", rate).groups()  # type: ignore[union-attr]
    burst = max(64 * 1024, int(number) * _UNITS[unit] // 8 // _TICKS)
    names = [f"mvbench{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"{ADDRESSES[host]}/24", "dev", f"v{host}")
            ip("-n", name, "link", "set", f"v{host}", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ("tbf", "rate", rate, "burst", burst, "latency", "50ms")
            inside(name, "tc", "qdisc", "add", "dev", f"v{host}", "root", *limit)
            if control is not None:
                inside(name, "sh", "-c", f"echo {control} > {_CONTROL}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent(names: list[str]) -> int:
    """Returns how many bytes both hosts have sent over the link, headers and all."""
    files = [f"/sys/class/net/v{host}/statistics/tx_bytes" for host in range(2)]
    return sum(int(inside(name, "cat", file)) for name, file in zip(names, files, strict=True))


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
