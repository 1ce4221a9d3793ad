"""A manager that is saved and resumed with everything that its binding and its user keep beside the shared arrays."""

from __future__ import annotations

import os
from typing import Any

from multiverso.checkpoints import Parts
from multiverso.params.resuming import Files
from multiverso.params.shared import SharedParams
from multiverso.tables import TableHandler


class Resumable:
    """A manager that is saved and loaded by one call of all its workers. A subclass makes its shared arrays."""

    _shared: SharedParams

    def sync_all_param(self) -> None:
        """Exchanges now; a subclass knows how."""
        raise NotImplementedError

    def finish(self) -> None:
        """After the last step, before the model is validated or saved: shares what is left; collective.

        It pushes what this worker has learned since its last exchange, whatever ``every=`` and the rule's intervals
        are, waits until all workers have, and takes the values of all. In a rule whose workers keep values of their
        own (EASGD) those stay their own, and `SharedParams.centre` is what all have.

        Raises:
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not everyone came. Call it again.
        """
        self._shared.finish(self.sync_all_param)

    def save(
        self, directory: str | os.PathLike[str], own: dict[str, Any] | None = None, *, files: Files | None = None
    ) -> None:
        """Saves everything that this job continues from: collective, whole or not at all.

        That is the shared parameters and the rule's state, and of each worker its model, what it has not exchanged
        yet, and ``own``. Nothing is exchanged, and training continues as if nothing had been saved. If a worker is
        killed meanwhile, what was saved before is still there.

        Args:
            directory: the same for all workers, and for this model alone.
            own: what this worker wants to have back: a dictionary of state, such as
                ``{"optimizer": optimizer.state_dict(), "random": random_state(), "step": step}``. It may hold
                tensors, arrays, numbers, strings, bytes, None, and dictionaries, lists and tuples of these; other
                objects are refused, as nothing is pickled.
            files: writes more files of this worker into the empty folder that it is given.

        Raises:
            TypeError: ``own`` holds something else; the message says where.
            SnapshotError: it could not be written by some worker; or the directory holds something else, which is kept.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not everyone came.
        """
        self._shared.save(directory, own, files=files)

    def load(self, directory: str | os.PathLike[str], *, missing_ok: bool = False) -> dict[str, Any] | None:
        """Goes back to what `save` wrote: collective; all of it fits in all workers, or nothing is changed.

        Make the same model, its manager and its optimizer first.

        There may be more or fewer workers than saved: with fewer, what those without a place had of their own is left
        out; with more, the others begin from the shared values (see `newcomer`). A line on standard error says so.

        Args:
            directory: as for `save`.
            missing_ok: return None where nothing has been saved yet, as at a job's first start.

        Returns:
            What this worker handed over as ``own``, or a newcomer what another worker did; tensors on the CPU, JAX's
            arrays as NumPy's.

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
        """Whether this worker had nothing of its own in what `load` loaded last, as fewer workers had saved it.

        What `load` returned was another worker's then: a warm start for an optimizer, but random numbers that two
        workers would draw alike (``set_random_state(state, apart=mv.worker_id())``).
        """
        return self._shared.newcomer
