"""Where tables lie: many small ones in one segment, a large one in its own (a descriptor per table is too many)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from multiverso.layout import CACHE_LINE, PAGE, round_up
from multiverso.memory import segment

ARENA_BYTES = 64 * 1024 * 1024
_SMALLEST_OWN = 8 * 1024 * 1024
_FIRST_ARENA = 1024 * 1024


@dataclass
class Arena:
    """One segment and how much of it is used. Owner: the node's thread."""

    number: int
    descriptor: int
    mapped: segment.Segment
    used: int = 0


@dataclass
class Arenas:
    """All segments of a job. Owner: the node's thread."""

    all: list[Arena] = field(default_factory=list)
    _open: Arena | None = None

    def place(self, size: int) -> tuple[Arena, int]:
        """Finds room for a table.

        Returns:
            The segment and the offset in it.

        Raises:
            OutOfMemoryError: there is no memory for it.
        """
        if size >= _SMALLEST_OWN:
            return self._new(size), 0
        arena = self._open
        start = round_up(arena.used, PAGE if size >= PAGE else CACHE_LINE) if arena else 0
        if arena is None or start + size > arena.mapped.size:
            # each arena is twice as large as the last, so that a job with one small table stays small
            grown = min(ARENA_BYTES, 2 * arena.mapped.size) if arena else _FIRST_ARENA
            arena, start = self._new(max(grown, size)), 0
            self._open = arena
        arena.used = start + size
        return arena, start

    def _new(self, size: int) -> Arena:
        descriptor = segment.create(f"arena-{len(self.all)}", size)
        arena = Arena(len(self.all), descriptor, segment.Segment(descriptor), size)
        self.all.append(arena)
        return arena

    def close(self) -> None:
        """Lets go of the descriptors; the memory stays for as long as somebody has it mapped."""
        for arena in self.all:
            os.close(arena.descriptor)
        self.all.clear()
        self._open = None
