"""A whole number that all workers of a job share."""

from __future__ import annotations

from operator import index

from multiverso.deadline import Deadline
from multiverso.in_process import InProcess
from multiverso.runtime.collective.job_lock import held, prepare
from multiverso.runtime.session.current import current
from multiverso.runtime.session.session import Session

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Counter(InProcess):
    """A whole number of 64 bits that all workers of the job share, 0 at first.

    The first worker that asks for the name makes it; the others attach to it. It lasts as long as the job, is not
    saved, and has no rounds: a change is visible at once, in every consistency. In a job on several hosts the first
    host's node keeps it, and each use takes a round trip.

    Args:
        name: what the workers call it; tables have names of their own.
        session: the session; the current one by default.

    Raises:
        ValueError: ``name`` is not a valid name.

    Examples:
        >>> import multiverso as mv
        >>> session = mv.init()
        >>> tickets = mv.Counter("tickets")
        >>> tickets.fetch_add(), tickets.fetch_add(), tickets.value
        (0, 1, 2)
        >>> mv.shutdown()
    """

    def __init__(self, name: str, session: Session | None = None) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ValueError(f"a counter's name is a text of 1 to 200 characters; got {name!r:.80}")
        self.name = name
        self._session = current() if session is None else session
        kind = _Asked if self._session.hosts else _Shared
        self._number: _Asked | _Shared = kind(self._session, name)

    def fetch_add(self, amount: int = 1, timeout_seconds: float | None = None) -> int:
        """Adds to the number and returns what it was before; no two workers get the same.

        Takes a few microseconds, across hosts a few hundred and a round trip to the first host. The add of a worker
        that is killed meanwhile counts or does not, and blocks nobody.

        Args:
            amount: a whole number, also below 0.
            timeout_seconds: deadline, instead of the session's.

        Raises:
            OverflowError: the sum does not fit into 64 bits; nothing is added.
            ClosedError: the session is over.
            WaitTimeoutError, NodeLostError: no answer came in time, or will come; the add may count or not.
        """
        amount = index(amount)
        self._session.check()
        if not _LOWEST <= amount <= _HIGHEST:
            raise self._overflow(self.value, amount)
        deadline = self._session.start_deadline(timeout_seconds)
        before, done = self._number.fetch_add(amount, deadline, f"the counter {self.name!r}")
        if not done:
            raise self._overflow(before, amount)
        return before

    def _overflow(self, before: int, amount: int) -> OverflowError:
        return OverflowError(f"counter {self.name!r}: {before} + {amount} does not fit into 64 bits")

    @property
    def value(self) -> int:
        """The current value; another worker may change it at any time."""
        self._session.check()
        return self._number.read(self._session.start_deadline(), f"the counter {self.name!r}")

    def __repr__(self) -> str:
        return f"<Counter {self.name!r}{self._number}>"


class _Shared:
    """A number in memory that the workers of one host share."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._memory = session.shared_memory(f"multiverso-counter-{name}", 128, prepare)
        self._word = self._memory.array[64:72].view("int64")

    def fetch_add(self, amount: int, deadline: Deadline, what: str) -> tuple[int, bool]:
        """Returns what it was, and whether it was added to."""
        with held(self._session, self._memory, deadline, what):
            before = int(self._word[0])
            fits = _LOWEST <= before + amount <= _HIGHEST
            if fits:
                self._word[0] = before + amount
        return before, fits

    def __str__(self) -> str:
        return f": {int(self._word[0])}"

    def read(self, deadline: Deadline, what: str) -> int:
        """Returns what it is."""
        return int(self._word[0])


class _Asked:
    """A number that the first host's node keeps."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self.read(session.start_deadline(), f"the counter {name!r}")

    def fetch_add(self, amount: int, deadline: Deadline, what: str) -> tuple[int, bool]:
        """Returns what it was, and whether it was added to."""
        question = {"about": "count", "name": self._name, "amount": amount}
        answer = self._session.node.ask_hosts(question, deadline, what)
        done = "before" in answer
        return int(answer["before" if done else "overflow"]), done

    def __str__(self) -> str:
        return ", kept by the first host"

    def read(self, deadline: Deadline, what: str) -> int:
        """Returns what it is."""
        return self.fetch_add(0, deadline, what)[0]
