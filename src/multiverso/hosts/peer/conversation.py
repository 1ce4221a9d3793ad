"""One end of a control connection, which goes on over the next TCP connection where one is cut.

A state machine without sockets, threads and clocks: what is said and what comes go in, with the time; bytes to send
come out. Each message has a number, and is kept until the other side says that it has heard it. Both ends of a new
connection say first what they have heard last; what comes after that is said again. So every message arrives once and
in order, through any number of cuts. Between messages both say once a second that they are there.

    {"heard": 7}                              at first, and when there is nothing to say
    {"heard": 7, "number": 12, "say": {...}}  a message
    {"end": "..."}                            this node ends, or does not take the other one: do not come again

An end that has heard nothing for `silence_seconds` gives the connection up and makes a new one. After `grace_seconds`
without a word the other host is lost; where the connection was ended, and not merely silent, after `ended_seconds`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from multiverso.hosts.peer.frames import ProtocolError


class _Envelope(Struct, forbid_unknown_fields=True):
    heard: Annotated[int, Meta(ge=0)] | None = None
    number: Annotated[int, Meta(ge=1)] | None = None
    say: Raw = Raw()
    end: str | None = None


_envelopes = msgspec.json.Decoder(_Envelope)


def ending(why: str) -> bytes:
    """Returns what says that nothing more comes from here."""
    return msgspec.json.encode({"end": why})


@dataclass(frozen=True)
class Timeouts:
    """How long an end waits for the other.

    Attributes:
        grace_seconds: without a word, until the other host counts as lost.
        ended_seconds: the same once a connection was ended: whose process lives makes a new one at once.
        silence_seconds: until a connection that says nothing is given up.
        beat_seconds: how often an end says that it is there.
    """

    grace_seconds: float = 30.0
    ended_seconds: float = 5.0
    silence_seconds: float = 5.0
    beat_seconds: float = 1.0

    @classmethod
    def of(cls, grace_seconds: float) -> Timeouts:
        """Returns those of an end that gives the other host up after so long."""
        return cls(
            grace_seconds, min(5.0, grace_seconds), min(5.0, grace_seconds / 2), min(1.0, grace_seconds / 6)
        )


class Conversation:
    """Owner: whoever calls it, one call at a time. All times are of one clock, in seconds.

    Attributes:
        ended: why the other side has ended it, once it has.
        cuts: how often a connection ended before that.
    """

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._said: deque[tuple[int, bytes]] = deque()  # not heard yet by the other side
        self._number = self._heard = 0
        self._connected = self._greeted = False
        self._heard_at = self._connected_at = self._sent_at = now
        self._cut_at = math.inf
        self.ended: str | None = None
        self.cuts = 0

    def connected(self, now: float) -> list[bytes]:
        """A connection is there, in place of any before; returns what to send over it."""
        self._connected, self._greeted = True, False
        self._connected_at = self._sent_at = now
        self._cut_at = math.inf
        return [self._beat()]

    def cut(self, now: float) -> None:
        """The connection has ended."""
        self._connected = self._greeted = False
        self._cut_at = min(self._cut_at, now)
        self.cuts += 1

    def say(self, message: bytes, now: float) -> list[bytes]:
        """Queues a message, which is JSON; returns what to send now."""
        self._number += 1
        self._said.append((self._number, message))
        return self._numbered([self._said[-1]], now) if self._greeted else []

    def receive(self, body: bytes, now: float) -> tuple[bytes | None, list[bytes]]:
        """Takes what has come; returns a message that is new, and what to send now.

        Raises:
            ProtocolError: it is not what the other end may say.
        """
        try:
            found = _envelopes.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"that is no message: {error}") from error
        self._heard_at = now
        if found.end is not None:
            self.ended = found.end
            return None, []
        heard = found.heard
        if heard is None or heard > self._number:
            raise ProtocolError(f"it has heard {heard} of {self._number} messages")
        while self._said and self._said[0][0] <= heard:
            self._said.popleft()
        out = []
        if not self._greeted and self._connected:
            if heard < self._number - len(self._said):
                raise ProtocolError(f"it has heard {heard} messages, and had heard more before")
            self._greeted = True
            out = self._numbered(self._said, now)
        number, message = found.number, bytes(found.say)
        if number is None or number <= self._heard:
            return None, out
        if number != self._heard + 1 or not message:
            raise ProtocolError(f"message {number} comes after {self._heard}")
        self._heard = number
        return message, out

    @property
    def all_heard(self) -> bool:
        """Whether the other side has heard all that was said."""
        return not self._said

    def tick(self, now: float) -> list[bytes]:
        """Returns what to send where nothing was for a while."""
        if not self._connected or now - self._sent_at < self._timeouts.beat_seconds:
            return []
        self._sent_at = now
        return [self._beat()]

    def is_silent(self, now: float) -> bool:
        """Returns whether the connection is to be given up, as nothing comes over it."""
        since = max(self._heard_at, self._connected_at)
        return self._connected and now - since >= self._timeouts.silence_seconds

    def why_lost(self, now: float) -> str:
        """Returns why the other host counts as lost, in words; nothing as long as it does not."""
        if self.ended is not None:
            return self.ended
        cut = now - max(self._cut_at, self._heard_at)
        if (
            not self._connected
            and cut >= self._timeouts.ended_seconds
            and self._cut_at - self._heard_at < (self._timeouts.silence_seconds)
        ):
            return f"the connection to it ended, and was not made again within {self._timeouts.ended_seconds:g} s"
        if now - self._heard_at >= self._timeouts.grace_seconds:
            return f"nothing was heard of it for {self._timeouts.grace_seconds:g} s"
        return ""

    def _numbered(self, messages: Iterable[tuple[int, bytes]], now: float) -> list[bytes]:
        out = [b'{"heard": %d, "number": %d, "say": %s}' % (self._heard, *message) for message in messages]
        if out:
            self._sent_at = now
        return out

    def _beat(self) -> bytes:
        return b'{"heard": %d}' % self._heard
