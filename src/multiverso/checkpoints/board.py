"""Shows all workers who has handed over what of which checkpoint: one shared word for each worker.

On several hosts the nodes show each other's workers these words as they do the others of their blocks.
"""

from __future__ import annotations

from multiverso.runtime import Session

NOTHING, WRITING, DONE, FAILED, CLOSED, FAILED_AND_CLOSED, ABANDONED = range(7)
_PHASES = 8


class Board:
    """One worker's view of the words of all. Any thread."""

    def __init__(self, session: Session) -> None:
        self._control, self._me = session.control, session.worker_id

    def say(self, number: int, phase: int) -> None:
        """Publishes how far this worker is with the checkpoint of a number."""
        self._control.note_checkpoint(self._me, number * _PHASES + phase)

    def of(self, worker_id: int) -> tuple[int, int]:
        """Returns the number and the phase that a worker has said last."""
        return divmod(self._control.checkpoint(worker_id), _PHASES)

    def close(self, abandoned: bool = False) -> None:
        """Publishes that this worker hands over nothing any more; ``abandoned`` by an exception, not at its end."""
        number, phase = self.of(self._me)
        closed = FAILED_AND_CLOSED if phase == FAILED else CLOSED
        self.say(number, ABANDONED if abandoned else closed)

    def newest(self) -> int:
        """Returns the highest number that any live worker has begun with."""
        return max(map(self._control.checkpoint, self._control.live()), default=0) // _PHASES

    def has_closed(self, worker_id: int) -> bool:
        """Returns whether a worker hands over nothing any more."""
        return self.of(worker_id)[1] in (CLOSED, FAILED_AND_CLOSED, ABANDONED)

    def writers(self) -> list[int]:
        """Returns the live workers that hand over; the first of them leads."""
        return [worker for worker in self._control.live() if not self.has_closed(worker)]
