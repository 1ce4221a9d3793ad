"""Messages with a node that is watched: whether it is still there, and since when it has been silent.

A `Stream` that sends a beat once a second where it has nothing else to send. An end that has received nothing for
`silence_seconds` gives the connection up and makes a new one. After `grace_seconds` without a frame the other node
counts as lost, but not before a connection that was just made has had `silence_seconds`; where the connection was
ended, and not merely silent, after `ended_seconds`: only time counts there in which none is being made. Time in which
this node itself had no processor is none of the other's silence. A node that ends, or does not take the other one, says
so with a last frame (`ending`): do not connect again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from multiverso.hosts.peer.frames import LONGEST_BODY, NOTHING, Header, Outgoing, ProtocolError
from multiverso.hosts.peer.messages import MESSAGE, Stream
from multiverso.hosts.peer.resources import Buffers, owner

# flag of a message: its body is why this node ends; without a number, why it does not take the other one
ENDS = 1
_LONGEST_WHY = 4096
_LATE_SECONDS = 0.5  # a look that comes later than this after the last one: nobody has looked meanwhile


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
        return cls(grace_seconds, min(5.0, grace_seconds), min(5.0, grace_seconds / 2), min(1.0, grace_seconds / 6))


def ending(why: str) -> Outgoing:
    """Returns the frame that says that nothing more comes from this node."""
    text = why.encode()[:_LONGEST_WHY]
    return Outgoing(Header(MESSAGE, flags=ENDS, length=len(text)), memoryview(text))


class WatchedStream(Stream):
    """One end. Any thread may call.

    Args:
        deliver: gets each message once, in order, by one thread at a time.
        timeouts: how long this end waits for the other.
        clock: the time, in seconds.

    Attributes:
        ended: why the other side has ended it, once it has.
        cuts: how often a connection ended before that.
    """

    longest = 64 << 20

    def __init__(
        self, deliver: Callable[[memoryview], None], timeouts: Timeouts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(self._take, Buffers(1))
        self._take_message, self._timeouts, self._clock = deliver, timeouts, clock
        self._heard_at = self._connected_at = self._sent_at = self._looked_at = clock()
        self._cut_at = math.inf
        self._arriving_seconds = 0.0  # of the time since the cut
        self.ended: str | None = None
        self.cuts = 0

    def _take(self, message: memoryview) -> None:
        self._take_message(message)
        self._pool.give(owner(message))

    def end(self, why: str) -> None:
        """Says, after everything else, that nothing more comes from here."""
        self.post(ending(why))

    def connect(self, incarnation: int) -> None:
        """A connection is there, in place of any before."""
        super().connect(incarnation)
        self._connected_at = self._sent_at = self._clock()
        self._cut_at = math.inf

    def cut(self) -> None:
        """The connection has ended."""
        super().cut()
        self._cut_at = min(self._cut_at, self._clock())
        self._arriving_seconds = 0.0
        self.cuts += 1

    def wait(self, now: float) -> float | None:
        """Returns the seconds until there is something to send, at least the next beat."""
        if not self._connected:
            return None
        if self.has_something:
            return 0.0
        return max(0.0, self._sent_at + self._timeouts.beat_seconds - now)

    def next(self, now: float, most_new: int = LONGEST_BODY) -> Outgoing | None:
        """Returns the next message, or a beat where there was none for a while, or None."""
        if not self._connected:
            return None
        if now - self._sent_at >= self._timeouts.beat_seconds:
            self._say = True
        found = super().next(now, most_new)
        if found is not None:
            self._sent_at = now
        return found

    def accept(self, header: Header) -> memoryview | None:
        """Checks a header as `Stream.accept` does; a header that no node sends ends the conversation."""
        if header.flags & ENDS and not header.number and header.length <= _LONGEST_WHY:
            return memoryview(bytearray(header.length)) if header.length else NOTHING
        try:
            return super().accept(header)
        except ProtocolError as error:
            self._refuse(error)
            raise

    def arrived(self, header: Header, body: memoryview | None, now: float) -> bool:
        """Takes a frame; what no node sends ends the conversation."""
        self._heard_at = now
        if header.flags & ENDS and body is not None:
            self.ended = bytes(body).decode(errors="replace") if self.ended is None else self.ended
            if header.number:
                self.note(header)  # another thread there may have put a message after it
            return False
        try:
            return super().arrived(header, body, now)
        except ProtocolError as error:
            self._refuse(error)
            raise

    def _refuse(self, error: ProtocolError) -> None:
        self.ended = f"it sent what no node sends ({error})"

    @property
    def is_done(self) -> bool:
        """Whether the other side has received all messages, or has ended."""
        return self.ended is not None or not self._kept

    def look(self, now: float, arriving: bool = False) -> None:
        """Before one looks whether the other is there, several times a second.

        Where the last look is longer ago, this node was stopped, or so many wait for the processors that it had none:
        what the other has said meanwhile has not been heard yet, either.

        Args:
            now: the time, in seconds.
            arriving: whether a connection is being made that may be the other's: then its process lives, however long
                the exchange of proofs takes on a busy machine.
        """
        since = now - self._looked_at
        late = since - _LATE_SECONDS
        self._looked_at = now
        if arriving:
            self._arriving_seconds += min(since, _LATE_SECONDS)
        if late > 0:
            self._heard_at = min(now, self._heard_at + late)
            self._connected_at = min(now, self._connected_at + late)
            self._cut_at += late

    def is_silent(self, now: float) -> bool:
        """Returns whether the connection is to be given up, as nothing comes over it."""
        since = max(self._heard_at, self._connected_at)
        return self._connected and now - since >= self._timeouts.silence_seconds

    def why_lost(self, now: float) -> str:
        """Returns why the other host counts as lost, in words; nothing as long as it does not."""
        if self.ended is not None:
            return self.ended
        cut = now - max(self._cut_at, self._heard_at) - self._arriving_seconds
        was_heard = self._cut_at - self._heard_at < self._timeouts.silence_seconds
        if not self._connected and was_heard and cut >= self._timeouts.ended_seconds:
            return f"the connection to it ended, and was not made again within {self._timeouts.ended_seconds:g} s"
        just_made = self._connected and now - self._connected_at < self._timeouts.silence_seconds
        if now - self._heard_at >= self._timeouts.grace_seconds and not just_made:
            return f"it was silent for {self._timeouts.grace_seconds:g} s"
        return ""
