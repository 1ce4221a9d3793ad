"""Steps that all workers do together: every one learns whether it went well everywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from multiverso import layout as at
from multiverso.errors import MultiversoError
from multiverso.runtime.session.replacing import is_behind
from multiverso.runtime.session.session import Session

_NOTE_BYTES = 1024
_HEADER_BYTES = 16  # int64: the number of the barrier before it was told, and its length
_MEMORY = "multiverso-told"


def tell_all(session: Session, note: str) -> dict[int, str]:
    """Tells all workers something short and returns what each has told, by its number: collective.

    Args:
        session: this worker's session.
        note: cut after about 1,000 bytes of UTF-8.

    Raises:
        WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not everyone came; see ``barrier``.
        MultiversoError: the others have done so before this worker took a dead one's place. Nothing was changed.
    """
    if is_behind(session):
        raise MultiversoError(
            f"worker {session.worker_id} has taken the place of one that died, and the others have saved or loaded "
            "together before that: what it goes on from comes from mv.checkpoint (mv.incarnation() tells that it "
            "is a replacement)"
        )
    if session.hosts:
        session.barrier()  # what the others have changed before is seen here
        return session.node.tell_all(note.encode()[: _NOTE_BYTES - _HEADER_BYTES].decode(errors="ignore"))
    pages = session.shared_memory(_MEMORY, at.MAX_WORKERS * _NOTE_BYTES).array.reshape(-1, _NOTE_BYTES)
    text = note.encode()[: _NOTE_BYTES - _HEADER_BYTES]
    session.barrier()  # what was told before has been read
    now = session.barriers  # the same number in all workers: it tells these notes from older ones
    mine = pages[session.worker_id]
    mine[_HEADER_BYTES : _HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    header = mine[:_HEADER_BYTES].view("int64")
    header[1] = len(text)
    header[0] = now  # last: a worker that is killed before has told nothing
    session.barrier()
    # by the notes, not by which workers are live: the first to read may have left before the last one does
    return {worker: _read(page) for worker, page in enumerate(pages) if _header(page)[0] == now}


def count_as_done(session: Session, steps: int) -> None:
    """Counts the barriers of so many steps of a `Together` as passed: the others have, before this worker came."""
    session.count_barriers(session.barriers + steps * (1 if session.hosts else 2))


def _header(page: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return page[:_HEADER_BYTES].view("int64")


def _read(page: npt.NDArray[np.uint8]) -> str:
    size = int(_header(page)[1])
    return page[_HEADER_BYTES : _HEADER_BYTES + size].tobytes().decode(errors="ignore")


class Together:
    """A task in steps: each is done by all workers, and one that fails anywhere ends the task everywhere.

    All have to make the same steps. Who takes part is settled by the first; one that is lost later ends it.

    Args:
        session: this worker's session.
        failure: makes the error for workers whose own part went well, from a sentence about the others' parts.
    """

    def __init__(self, session: Session, failure: Callable[[str], Exception]) -> None:
        self._session = session
        self._failure = failure
        self._members: set[int] = set()

    @property
    def leader(self) -> int:
        """The lowest worker that takes part: it does what only one may do."""
        return min(self._members)

    @property
    def leads(self) -> bool:
        """Whether this worker is the leader."""
        return self._session.worker_id == self.leader

    @property
    def leads_host(self) -> bool:
        """Whether this worker is the lowest of its host that takes part: it does what is done once on each host."""
        control = self._session.control
        places = control.places
        here = [worker for worker in self._members if not places or places[worker] == control.here]
        return self._session.worker_id == min(here)

    def step(self, action: Callable[[], str | None] | None = None) -> dict[int, str]:
        """Does this worker's part, waits for the others', and returns what each part returned.

        Raises:
            Exception: what ``action`` raised here; or ``failure``, where it went wrong in another worker.
        """
        note, raised = "", None
        try:
            self._session.flush()
            note = (action() if action else None) or ""
        except Exception as error:
            raised = error
        said = tell_all(self._session, f"-{type(raised).__name__}: {raised}" if raised else f"+{note}")
        if raised is not None:
            raise raised
        self._members = self._members or set(said)
        failed = [f"worker {worker} raised {text[1:]}" for worker, text in said.items() if text[:1] == "-"]
        failed += [f"worker {worker} was lost" for worker in sorted(self._members - set(said))]
        if failed:
            raise self._failure("; ".join(failed))
        return {worker: text[1:] for worker, text in said.items()}
