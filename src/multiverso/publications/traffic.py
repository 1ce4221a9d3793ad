"""What travels when a host follows a publication of another one: typed messages, with a body of bytes behind some."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

from multiverso.hosts.transport.channel import Channel
from multiverso.hosts.transport.credentials import Credentials, derived_credentials
from multiverso.publications.slots import Note
from multiverso.publications.tensors import Layout
from multiverso.wire.requests import Seen

_HEAD = struct.Struct("!IQ")  # bytes of the message, and of the body behind it
_LONGEST = 64 << 20
_LEAST_TOKEN = 16


class Follow(Struct, tag="follow"):
    """The first message of a follower: ``seen`` is the newest version that its readers have had from anybody."""

    seen: Seen


class Begin(Struct, tag="begin"):
    """The first answer: where the tensors lie in a slot."""

    layout: Layout


class Version(Struct, tag="version"):
    """A version begins, as what differs from ``base``; 0: it comes whole. Its parts follow, and `Whole`."""

    version: int
    base: int
    note: Note
    checksums: list[int]


class Part(Struct, tag="part"):
    """So many bytes of a tensor; its body is the bytes themselves, or a difference."""

    tensor: int
    first: int
    nbytes: int
    differs: bool


class Whole(Struct, tag="whole"):
    """All parts of the version have come."""


class Alive(Struct, tag="alive"):
    """Nothing new, and the sender is there."""


Message = Follow | Begin | Version | Part | Whole | Alive


def credentials_of(name: str, token: str, encrypted: bool) -> Credentials:
    """Returns what both ends of a connection have in common.

    Raises:
        ValueError: the token is too short to keep anybody out.
        StartupError: what encrypts connections is not installed.
    """
    if not isinstance(token, str) or len(token) < _LEAST_TOKEN:
        raise ValueError(
            f"a token is a text of {_LEAST_TOKEN} characters or more, as random as secrets.token_hex() makes"
        )
    return derived_credentials(token, f"publication {name}", encrypted)


def send(channel: Channel, message: Message, body: bytes | memoryview = b"") -> None:
    """Sends a message and its body."""
    text = msgspec.json.encode(message)
    channel.send(_HEAD.pack(len(text), len(body)) + text, body)


def receive(channel: Channel) -> tuple[Message, int]:
    """Returns the next message, and how many bytes of body come behind it.

    Raises:
        ValueError: it is none.
        OSError: the connection has ended.
    """
    length, body = _HEAD.unpack(receive_bytes(channel, _HEAD.size))
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes")
    message: Message = msgspec.json.decode(receive_bytes(channel, length), type=Message)
    return message, body


def receive_bytes(channel: Channel, count: int) -> bytearray:
    """Returns so many bytes."""
    data = bytearray(count)
    receive_into(channel, memoryview(data))
    return data


def receive_into(channel: Channel, view: memoryview) -> None:
    """Fills a piece of memory."""
    while view:
        got = channel.recv_into(view)
        if not got:
            raise ConnectionError("the other host has ended the connection")
        view = view[got:]
