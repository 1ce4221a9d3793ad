"""Which versions a publisher has made: 1, 2, 3 ..., with a gap where another publisher of the name had come further."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass


@dataclass
class _Run:
    """Versions without a gap; ``order`` says how many times something had been published with the first of them."""

    first: int
    last: int
    order: int

    def order_of(self, version: int) -> int:
        return self.order + version - self.first


class History:
    """Owner: a publication, which serialises what changes it."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._least = 1  # of the next version

    def next(self, *, same: bool = False) -> int:
        """Returns the next version; ``same``: what is published stays, and gets another number."""
        last = self._runs[-1] if self._runs else _Run(0, 0, 0)
        version = max(last.last + 1, self._least)
        if version == last.last + 1 and self._runs and not same:
            last.last = version
        else:
            self._runs.append(_Run(version, version, last.order_of(last.last) + (not same)))
        return version

    def rise_above(self, seen: int) -> bool:
        """Makes all further versions higher than one; whether the newest is not."""
        self._least = max(self._least, seen + 1)
        return bool(self._runs) and seen >= self._runs[-1].last

    def accepts(self, version: int, lag: int) -> bool:
        """Whether a version is one of these, and at most ``lag`` older than the newest."""
        run = bisect(self._runs, version, key=lambda run: run.first) - 1
        if run < 0 or version > self._runs[run].last:
            return False
        newest = self._runs[-1]
        return newest.order_of(newest.last) - self._runs[run].order_of(version) <= lag
