"""A whole number that all workers of a job share."""

from __future__ import annotations

from operator import index

from multiverso.runtime.current import current
from multiverso.runtime.session import Session
from multiverso.runtime.shared_lock import held, prepare

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Counter:
    """A whole number of 64 bits that all workers of the job share, 0 at first.

    Made by the first worker that asks for the name; the others attach to it whenever they come. It lasts as long as
    the job, is not saved, and knows no rounds: a change is seen at once, in every consistency.

    Args:
        name: what the workers call it; tables have names of their own.
        session: the session; the current one by default.

    Example:
        >>> import multiverso as mv
        >>> mv.init()
        >>> tickets = mv.Counter("tickets")
        >>> tickets.fetch_add(), tickets.fetch_add(), tickets.value
        (0, 1, 2)
        >>> mv.shutdown()
    """

    def __init__(self, name: str, session: Session | None = None) -> None:
        self.name = name
        self._session = current() if session is None else session
        self._session.refuse_across_hosts(
            "a Counter",
            "add ones to an ArrayTableHandler(1, dtype='int64'), or start all workers on one host",
        )
        self._memory = self._session.shared_memory(f"multiverso-counter-{name}", 128, prepare)
        self._word = self._memory.array[64:72].view("int64")

    def fetch_add(self, amount: int = 1) -> int:
        """Adds to the number and returns what it was before; no two workers get the same.

        Takes some microseconds. A worker that is killed meanwhile has added or has not, and stops nobody.

        Args:
            amount: a whole number, also below 0.

        Raises:
            OverflowError: the sum does not fit into 64 bits; nothing is added.
            ClosedError: the session is over.
        """
        amount = index(amount)
        self._session.check()
        with held(self._session, self._memory, self._session.deadline(), f"the counter {self.name!r}"):
            before = int(self._word[0])
            if not _LOWEST <= before + amount <= _HIGHEST:
                raise OverflowError(f"counter {self.name!r}: {before} + {amount} does not fit into 64 bits")
            self._word[0] = before + amount
        return before

    @property
    def value(self) -> int:
        """What it is now; another worker may change it at any time."""
        self._session.check()
        return int(self._word[0])

    def __repr__(self) -> str:
        return f"<Counter {self.name!r}: {int(self._word[0])}>"
