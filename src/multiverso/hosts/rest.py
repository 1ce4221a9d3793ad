"""How a node that has nothing to do is woken by the first change of a table."""

from __future__ import annotations

from ctypes import addressof, c_int32

from multiverso import layout as at
from multiverso.memory import words

_NAP_SECONDS = 0.005


class Rest:
    """A sleep that ends when a worker changes a table. One thread sleeps, any may wake it.

    The word on which it sleeps is 1 from when that is announced until somebody ends it. Who sleeps looks at the tables
    after it was announced: so a worker either finds the word, or was seen.
    """

    def __init__(self) -> None:
        self._own = c_int32(0)
        self._word = addressof(self._own)

    def share(self, control: int) -> None:
        """Says where the control segment is, in which workers find the word. Until then a sleep is a nap."""
        self._word = control + at.NODE_RESTS

    def announce(self) -> None:
        """Asks workers to end the sleep that may follow."""
        words.store32(self._word, 1)

    def sleep(self, seconds: float) -> None:
        """Sleeps for at most so long, unless it was ended since it was announced."""
        word = self._word
        words.wait_for_change(
            word, 1, min(seconds, _NAP_SECONDS) if word == addressof(self._own) else seconds
        )

    def wake(self) -> None:
        """Ends a sleep, or one that was announced."""
        words.bump_and_wake(self._word)
