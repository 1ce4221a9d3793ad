"""Steps that all workers do together: every one learns whether it went well everywhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from multiverso.errors import MultiversoError
from multiverso.layout import words as at
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.session.replacing import is_behind
from multiverso.runtime.session.session import Session

_NOTE_BYTES = 1024
_NOTES = 2  # of each worker, in turns: one is written while others still read the one before
_HEADER_BYTES = 16  # int64: the number of the barrier after which it is read, and its length
_MEMORY = "multiverso-notes"


def all_gather(session: Session, note: str) -> dict[int, str]:
    """Sends a short note to all workers and returns each worker's, by its number: collective.

    Args:
        session: this worker's session.
        note: cut after about 1,000 bytes of UTF-8.

    Raises:
        WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not all workers came; see ``barrier``.
        MultiversoError: the others have done so before this worker took a dead one's place, or another one was
            interrupted in it and has continued. Nothing was changed.
    """
    said = _tell(session, note)
    silent = [worker for worker, text in said.items() if text is None]
    if silent:
        raise MultiversoError(
            f"{names(silent)} continued without answering (interrupted, perhaps) where all workers exchange "
            "something; nothing was changed: all have to do it again"
        )
    return {worker: text for worker, text in said.items() if text is not None}


def _tell(session: Session, note: str) -> dict[int, str | None]:
    """As `all_gather`; None is said of one that was interrupted, and is at the next barrier without a word."""
    if is_behind(session):
        raise MultiversoError(
            f"worker {session.worker_id} has taken the place of one that died, and the others have saved or loaded "
            "together before that: what it resumes from comes from mv.checkpoint (mv.incarnation() tells that it "
            "is a replacement)"
        )
    if session.hosts:
        session.barrier()  # what the others have changed before is seen here
        return session.node.all_gather(note.encode()[: _NOTE_BYTES - _HEADER_BYTES].decode(errors="ignore"))
    memory = session.shared_memory(_MEMORY, at.MAX_WORKERS * _NOTES * _NOTE_BYTES)
    pages = memory.array.reshape(-1, _NOTES, _NOTE_BYTES)
    mine = pages[session.worker_id]
    number = session.barriers + 1
    if _header(mine[number % _NOTES])[0] == number:  # written by a call that was interrupted: others may read it now
        _pass(session, number)
        number += 1
    text = note.encode()[: _NOTE_BYTES - _HEADER_BYTES]
    page = mine[number % _NOTES]  # what it held was read before any worker came to the barrier before this one
    page[_HEADER_BYTES : _HEADER_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    header = _header(page)
    header[1] = len(text)
    header[0] = number  # last: a worker that is killed before has written nothing
    _pass(session, number)
    # by the notes, not by which workers are live: the first to read may have left before the last one does
    notes = pages[:, number % _NOTES]
    return {worker: _read(page) for worker, page in enumerate(notes) if _header(page)[0] == number}


def _pass(session: Session, number: int) -> None:
    while session.barriers < number:  # the first call may be the repetition of one that was interrupted
        session.barrier()


def _header(page: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    return page[:_HEADER_BYTES].view("int64")


def _read(page: npt.NDArray[np.uint8]) -> str:
    size = int(_header(page)[1])
    return page[_HEADER_BYTES : _HEADER_BYTES + size].tobytes().decode(errors="ignore")


class Together:
    """A task in steps: each is done by all workers, and one that fails anywhere ends the task everywhere.

    All have to make the same steps. Who takes part is settled by the first; one that is lost later ends it. So does one
    that was interrupted and begins again: it then waits for the others, who learn so, to begin again with it.

    Args:
        session: this worker's session.
        what: what it does, in a word.
        failure: makes the error for workers whose own part went well, from a sentence about the others' parts.
    """

    def __init__(self, session: Session, what: str, failure: Callable[[str], Exception]) -> None:
        self._session = session
        self._what = what
        self._steps = 0
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
        return self._session.worker_id == min(self._members.intersection(self._session.control.local))

    @property
    def _place(self) -> str:
        """Where this worker is in it, as the others see it."""
        return f"{self._what} {self._steps}"

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
        if raised is not None:
            _tell(self._session, f"{self._place}\n-{type(raised).__name__}: {raised}")
            raise raised
        said = self._tell(f"+{note}")
        self._members = self._members or set(said)
        failed = [f"worker {worker} raised {text[1:]}" for worker, text in said.items() if text[:1] == "-"]
        failed += [f"worker {worker} was lost" for worker in sorted(self._members - set(said))]
        if failed:
            raise self._failure("; ".join(failed))
        self._steps += 1
        return {worker: text[1:] for worker, text in said.items()}

    def _tell(self, note: str) -> dict[int, str]:
        """Sends all a note of this step, and returns theirs.

        Raises:
            Exception: ``failure``: one of them is not in this step.
        """
        place = self._place
        while True:
            said = {
                worker: (text or "?").partition("\n")
                for worker, text in _tell(self._session, f"{place}\n{note}").items()
            }
            elsewhere = {worker: where for worker, (where, _, _) in said.items() if where != place}
            if not elsewhere:
                return {worker: text for worker, (_, _, text) in said.items()}
            if self._steps or any(where.endswith(" 0") for where in elsewhere.values()):
                raise self._failure(self._why_not(elsewhere))
            # this worker has been interrupted before, and begins again: the others learn so now, or begin, too

    def _why_not(self, elsewhere: dict[int, str]) -> str:
        other = sorted(worker for worker, where in elsewhere.items() if where.split()[0] not in (self._what, "?"))
        if other:
            instead = elsewhere[other[0]].split()[0]
            return f"{names(other)} came to a {instead} instead, which all have to do together, too"
        return (
            f"{names(sorted(elsewhere))} began again, after an interrupt perhaps, while the others were in the middle "
            "of it; all have to begin again, together"
        )
