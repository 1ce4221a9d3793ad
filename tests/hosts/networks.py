"""Hosts of one machine: with an address and a network device of their own, where namespaces can be made, or none."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Two hosts.

    Attributes:
        addresses: of each.
        inside: what stands before a command to run it on each.
        cable: the first one's end of what joins them: its namespace and device.
    """

    addresses: tuple[str, ...]
    inside: tuple[tuple[str, ...], ...]
    cable: tuple[str, str] | None = None

    def plug(self, there: bool) -> None:
        """Pulls the cable, so that neither hears of the other, or plugs it in again."""
        assert self.cable is not None
        _ip("-n", self.cable[0], "link", "set", self.cable[1], "up" if there else "down")


LOOPBACK = Network(("127.0.0.1", "127.0.0.1"), ((), ()))


def missing() -> str | None:
    """Returns why no namespaces can be made here; None where they can."""
    try:
        with namespaces():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        words = getattr(error, "stderr", None) or error
        return f"network namespaces want root and iproute2: {str(words).strip()}"


@contextmanager
def namespaces() -> Iterator[Network]:
    """Makes two network namespaces that a cable joins, and removes them with all that is in them."""
    names = [f"multiverso-{os.getpid()}-{host}" for host in range(2)]
    devices = [f"mv{os.getpid()}x{host}" for host in range(2)]
    addresses = ("10.77.7.1", "10.77.7.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", devices[1], "netns", names[1])
        for name, device, address in zip(names, devices, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        inside = tuple(("ip", "netns", "exec", name) for name in names)
        yield Network(addresses, inside, (names[0], devices[0]))
    finally:
        for name in names:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
