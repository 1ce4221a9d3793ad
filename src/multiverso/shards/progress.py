"""How far each worker is in one table, which the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerProgress:
    """How far one worker is in one table: in steps of rounds, and in ticks.

    Attributes:
        staged, folded, first_step, clock, reached: see ``layout/words.py``.
    """

    staged: int
    folded: int
    first_step: int
    clock: int
    reached: int = 0

    @property
    def has_begun(self) -> bool:
        """Whether it has been in a round since it takes part."""
        return self.staged >= self.first_step

    def is_behind(self, step: int, stage: int) -> bool:
        """Returns whether a step waits for it: for its slot (stage 0), or for its part of the folding (stage 1)."""
        if step < self.first_step:
            return False
        return self.folded < step if stage else self.staged < step or self.folded < step - 1


@dataclass(frozen=True)
class TableProgress:
    """A table's workers."""

    name: str
    chunks: int
    members: Mapping[int, WorkerProgress]
