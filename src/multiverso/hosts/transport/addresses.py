"""Finds the address by which other hosts reach this one: that of a network device, unless it is given."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

ADDRESS_VARIABLE = "MULTIVERSO_ADDRESS"
ANY = "0.0.0.0"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_DISCARD = 9  # any port: nothing is sent there


def listen_at(address: str, port: int, backlog: int | None = None) -> socket.socket:
    """Opens a port for connections.

    Args:
        address: a name or an address; `ANY` is all of this host's, those of IPv6, too, where the system has it.
        port: 0 for any that is free.
        backlog: how many connections may wait; the system's default.

    Raises:
        OSError: it is taken, or this host does not have the address.
    """
    if address == ANY and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=backlog)


def own_addresses() -> list[str]:
    """Returns this host's IPv4 addresses with the lengths of their networks ("10.0.0.7/24"), without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asking.fileno(), what, request)[20:24])
                    for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # a device without one
                continue
            place = ipaddress.ip_interface(f"{address}/{mask}")
            if not place.is_loopback:
                found.append(str(place))
    return found


def reachable(first: Sequence[str], others: Sequence[Sequence[str]]) -> str | None:
    """Chooses the address of a host at which others reach it: one in a network that most of them are in, too.

    Args:
        first: the host's, as `own_addresses` returns them.
        others: the other hosts'.

    Returns:
        The address, or None where it has none. One that other hosts have, too (a container's bridge), is taken only
        if there is no other.
    """
    places = [ipaddress.ip_interface(text) for text in first]
    theirs = [{ipaddress.ip_interface(text) for text in host} for host in others]
    own = [place for place in places if not any(place in host for host in theirs)] or places

    def neighbours(place: ipaddress.IPv4Interface | ipaddress.IPv6Interface) -> int:
        return sum(any(other.network == place.network for other in host) for host in theirs)

    return str(max(own, key=neighbours).ip) if own else None


def address_towards(address: str) -> str:
    """Returns this host's address on the way to another one. Nothing is sent.

    Raises:
        OSError: there is no way, or no such host.
    """
    family, kind, _, _, place = socket.getaddrinfo(address, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(place)
        return str(way.getsockname()[0])
