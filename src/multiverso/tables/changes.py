"""Which rows of a matrix have changed since a worker last asked: by the versions of its stripes."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from multiverso.consistency.protocol import Array, ByStripe, Call, RowIds, Versions
from multiverso.deadline import Deadline
from multiverso.spec.table import Partition, TableSpec


class Changed(Struct, frozen=True):
    """What has changed: the rows of some stripes.

    Attributes:
        stripes: their numbers, ascending.
        versions: of each, when it was read.
        row_ids: ascending.
        values: flat.
    """

    stripes: Versions
    versions: Versions
    row_ids: RowIds
    values: Array


class Changes:
    """What one worker has seen of a matrix. Owner: its handler.

    Args:
        spec: the matrix.
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._partition = Partition.of(spec)
        self._seen: Versions | None = None  # of each stripe; none has a version below 0

    def read(self, how: ByStripe, call: Call, deadline: Deadline | None) -> Changed:
        """Reads the stripes that have changed since what was last noted: each as it was at one moment."""
        seen = self._versions()
        found = np.empty_like(seen)
        stripes = found[: how.changed_stripes(seen, found)]
        row_ids = self._rows(stripes)
        values = np.empty(row_ids.size * self._spec.columns, self._spec.dtype)
        versions = np.empty_like(stripes)
        how.get_stripes(stripes, versions, values, call, deadline)
        return Changed(stripes, versions, row_ids, values)

    def note(self, changed: Changed) -> None:
        """Notes that the caller has got it."""
        self._versions()[changed.stripes] = changed.versions

    def _versions(self) -> Versions:
        if self._seen is None:
            self._seen = np.full(self._partition.stripe_count, -1, np.int64)
        return self._seen

    def _rows(self, stripes: Versions) -> RowIds:
        height = 1 << self._partition.shift
        rows = (stripes[:, None] * height + np.arange(height)).reshape(-1)
        return rows[rows < self._spec.rows]
