"""What a replacement resumes from: its own part of the newest checkpoint, and nothing else.

The others train on meanwhile, so that nothing here waits for them and no table changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multiverso.checkpoints.generations import newest_undamaged
from multiverso.checkpoints.loading import checked
from multiverso.checkpoints.manifests import read_generations
from multiverso.checkpoints.parts import Parts, read_part
from multiverso.checkpoints.stores import Store
from multiverso.errors import SnapshotError
from multiverso.runtime import Session

_TRIES = 3


def load_own(
    session: Session, store: Store, check: Callable[[Parts], None], apply: Callable[[Parts], None]
) -> tuple[dict[str, Any], bool] | None:
    """Reads what this worker's last process had handed over; its managers begin with the tables' values.

    Args:
        session: this worker's session.
        store: where.
        check: raises where it does not fit; changes nothing.
        apply: takes it over.

    Returns:
        what was saved, and whether it was this worker's: one that had saved nothing gets another's. None where nothing
        was saved.

    Raises:
        SnapshotError: all of it is damaged.
    """
    for attempt in range(_TRIES):
        generations = read_generations(store, missing_ok=True)
        if not generations:
            return None
        try:
            generation = newest_undamaged(store, generations)
            saved_as = session.worker_id if session.worker_id in generation.common else generation.workers[0]
            own, common = read_part(store, generation, saved_as)
        except (SnapshotError, OSError):
            if attempt == _TRIES - 1:
                raise
            continue  # it was replaced by a newer one meanwhile
        parts = Parts(own, common, newcomer=True)
        checked(store, check, parts)
        apply(parts)
        return own, saved_as == session.worker_id
    raise AssertionError("unreachable")
