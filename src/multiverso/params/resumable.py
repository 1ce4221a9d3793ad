"""What the managers of all bindings have alike: they exchange when that is due, and are saved and loaded."""

from __future__ import annotations

import os
from typing import Any

from multiverso.checkpoints.parts import Parts
from multiverso.params.shared import SharedParams
from multiverso.params.values import Files
from multiverso.tables import TableHandler


class Resumable:
    """A manager that is saved and loaded by one call of all its workers. A subclass makes its shared arrays."""

    _shared: SharedParams

    def sync_all_param(self) -> None:
        """Exchanges now; a subclass knows how."""
        raise NotImplementedError

    def _sync(self, whole: bool) -> None:
        """The same, and ``whole`` as for `SharedParams.exchange`; where there are no fragments it is no other."""
        self.sync_all_param()

    def step(self) -> bool:
        """Counts one training step and exchanges when that is due (``every=``); returns whether it did."""
        if due := self._shared.due():
            self._sync(whole=False)
        return due

    def finish(self) -> None:
        """Shares the rest of all changes after the last step, before the model is validated or saved; collective.

        It pushes this worker's changes since its last exchange, whatever ``every=`` and the rule's intervals are, waits
        until all workers have, and takes the values of all. Under EASGD workers keep their own values, and
        `SharedParams.centre` returns the shared ones. In rounds between hosts with ``wire=`` what rounding has left out
        of the last is in none.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not all workers came. Call it again.
        """
        self._shared.finish(self.sync_all_param)

    def save(
        self, directory: str | os.PathLike[str], own: dict[str, Any] | None = None, *, files: Files | None = None
    ) -> None:
        """Saves the job's state: collective, whole or not at all.

        The state is the shared parameters, the rule's state, and each worker's model, unexchanged changes and ``own``.
        Nothing is exchanged. If a worker is killed meanwhile, the earlier save is still there.

        Args:
            directory: the same for all workers, and for this model alone.
            own: this worker's own state, a dictionary such as
                ``{"optimizer": optimizer.state_dict(), "random": random_state(), "step": step}``. It may hold
                tensors, arrays, numbers, strings, bytes, None, and dictionaries, lists and tuples of these; other
                objects are refused, as nothing is pickled.
            files: writes more files of this worker into the empty folder that it is given.

        Raises:
            TypeError: ``own`` holds something else; the message says where.
            SnapshotError: it could not be written by some worker; or the directory holds something else, which is kept.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not all workers came.
        """
        self._shared.save(directory, own, files=files)

    def load(self, directory: str | os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any] | None:
        """Goes back to what `save` wrote: collective; all of it fits in all workers, or nothing is changed.

        Make the same model, its manager and its optimizer first.

        There may be more or fewer workers than saved: with fewer, the parts of the missing workers are dropped; with
        more, the additional workers begin from the shared values (see `newcomer`). A line on standard error says so.

        Args:
            directory: as for `save`.
            missing_ok: return None where nothing has been saved yet, as at a job's first start.

        Returns:
            This worker's ``own`` (a newcomer's: another worker's); tensors on the CPU, JAX's arrays as NumPy's.

        Raises:
            SnapshotError: nothing is there, it is damaged, or it was saved of another model or by another rule; or
                fewer workers continue than saved, in the middle of a round whose rule takes the mean of them.

        Examples:
            >>> own = manager.load("saved", missing_ok=True)  # doctest: +SKIP
            >>> if own is not None:  # doctest: +SKIP
            ...     optimizer.load_state_dict(own["optimizer"])
        """
        return self._shared.load(directory, missing_ok=missing_ok)

    def collect_parts(self) -> Parts:
        """Returns what is this worker's own, for a `multiverso.Checkpoint`."""
        return self._shared.collect_parts()

    def check_parts(self, parts: Parts) -> None:
        """Raises SnapshotError where what was collected does not fit; changes nothing."""
        self._shared.check_parts(parts)

    def apply_parts(self, parts: Parts) -> None:
        """Continues from what was collected, once the tables have their values."""
        self._shared.apply_parts(parts)

    def saved_tables(self) -> dict[str, TableHandler]:
        """Returns the tables by what a save calls them."""
        return self._shared.saved_tables()

    @property
    def newcomer(self) -> bool:
        """Whether the last `load` had no part of this worker, because fewer workers had saved.

        It then returned another worker's ``own``: a warm start for an optimizer, but random numbers that two workers
        would draw alike (``set_random_state(state, apart=mv.worker_id())``).
        """
        return self._shared.newcomer
