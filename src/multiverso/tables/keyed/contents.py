"""Gives out a keyed table's contents: in batches, and as files, whole, incremental, or for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from multiverso.errors import SnapshotError
from multiverso.kernels.keyed.passes import GONE
from multiverso.layout.keyed import MIXED, NO_ROW, at
from multiverso.runtime.session.replacing import leaves_values
from multiverso.saying import Progress
from multiverso.spec.table import checked_count
from multiverso.tables.keyed import export, saving, snapshots
from multiverso.tables.keyed.calls import KeyedCalls
from multiverso.tables.keyed.held import HeldKeyedTable
from multiverso.tables.keyed.keys import Keys, as_keys
from multiverso.tables.keyed.progress import Removing
from multiverso.tables.keyed.saving import Content
from multiverso.tables.keyed.snapshots import Snapshot
from multiverso.tables.keyed.spread import SpreadCalls, SpreadPasses
from multiverso.tables.keyed.whole import KeyedPasses
from multiverso.tables.typed import Scalar

_MOST_AT_ONCE, _MOST_LOADED_AT_ONCE = 1 << 16, 1 << 20


class KeyedContents(HeldKeyedTable, Generic[Scalar]):
    """The part of a keyed table that goes through all that it holds, and writes and reads files."""

    @property
    def ticks(self) -> int:
        """How often `tick` was called, by all workers; what ``Eviction.idle_ticks`` counts in."""
        return self._memory.word("TICK")

    def items(self, batch: int = _MOST_AT_ONCE) -> Iterator[tuple[Keys, npt.NDArray[Scalar]]]:
        """Yields all keys and their rows, in batches of at most ``batch`` keys, in no particular order.

        Every key that has a row when the iteration begins comes exactly once, with the row as it is when its batch is
        read, unless it is removed before; keys that get a row meanwhile may come or not.
        """
        batch = checked_count(batch, "batch")
        for keys, _, rows in self._passes.rows_since(0, self.dim * self._dtype.itemsize):
            for start in range(0, keys.size, batch):
                part = slice(start, start + batch)
                yield keys[part], rows[part].view(self._dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes keys, rows and updater state to a safetensors file, whole or not at all.

        Other workers' adds meanwhile may be in it or not: call ``barrier()`` first for an exact moment.

        Raises:
            SnapshotError: it cannot be written; its cause is the system's error.
        """
        self.copied().save(path)

    def copied(self) -> saving.Copied:
        """Returns what `save` writes; in a synchronous job all of it is of this worker's last round."""
        return saving.Copied(self._spec, self._content(0))

    def save_increment(self, directory: str | os.PathLike[str], *, whole: bool = False) -> Snapshot:
        """Writes the changes since the last snapshot to a directory; everything the first time.

        Other workers, and this one's other threads, continue. Their changes are in this snapshot or in the next one;
        after a `barrier()` the snapshots together are the table, bit for bit. It takes as much memory as it writes.

        On several hosts it writes the rows that live on this one, to a folder of this host's in the directory: call it
        in one worker of each host.

        Everything is written again, and earlier files removed, with ``whole``, in the first call of a run that has
        loaded the directory, and after the removal of more keys than the table remembers (a few million).

        Args:
            directory: a folder of its own for this table's snapshots, made if it is not there.
            whole: write everything, and remove earlier files, even of another table.

        Returns:
            A record of the snapshot: its number, its parent's, how many keys, how many bytes.

        Raises:
            SnapshotError: it cannot be written, or the directory holds something else, such as the snapshots of another
                table or run, unless this table was loaded from them.
            TimeoutError: another process writes to it.
        """
        self._session.check()
        place, passes, calls = self._part_here(Path(directory))
        with snapshots.alone_in(place) as opened:
            before = snapshots.chain(opened)
            table = f"{self._memory.word('IDENTITY'):014x}"
            run = snapshots.run_of(self._session.job, self._called)
            loaded = self._memory.word("CONTINUES")
            if before and not whole and before[-1].run != run and loaded not in (MIXED, int(before[-1].run, 16)):
                raise SnapshotError(
                    f"{place} holds snapshots of another table or of another run, and this table was not loaded from "
                    "them: load them first, use another directory, or remove them by whole=True"
                )
            if whole or not before or before[-1].table != table:
                before = []
            generation, removals = passes.begin_snapshot()
            if before and removals - before[-1].removals > self._memory.word("RING") // 2:
                before = []
            content = self._content(before[-1].generation if before else 0, passes)
            if before:
                gone = np.unique(self._memory.removals(before[-1].removals, removals))
                content = replace(content, removed=gone[~calls.contains(gone)])
            of = {"run": run, "table": table, "generation": generation, "removals": removals}
            return snapshots.write(opened, self._spec, content, before, **of)

    def _part_here(self, directory: Path) -> tuple[Path, KeyedPasses, KeyedCalls]:
        """Returns where the rows that live on this host are written, and what goes through them."""
        calls, passes = self._calls, self._passes
        if isinstance(calls, SpreadCalls) and isinstance(passes, SpreadPasses):
            return snapshots.part_of(directory, *calls.part), passes.own, calls.own
        assert isinstance(passes, KeyedPasses)
        return snapshots.whole_in(directory), passes, calls

    def export(self, path: str | os.PathLike[str], *, name: Callable[[int], str] | None = None) -> int:
        """Writes keys and values for other programs, sorted by key, whole or not at all.

        Args:
            path: its suffix chooses the format: ``.npz`` (NumPy: ``keys``, ``values``), ``.parquet`` (columns ``key``
                and ``values``; needs pyarrow), ``.txt`` or ``.vec`` (the text format of word2vec, as gensim reads it).
            name: returns a key's name there, instead of its number.

        Returns:
            How many keys.

        Raises:
            ValueError: another suffix.
            SnapshotError: it cannot be written.
        """
        return export.export(path, self.items(), self._spec.dim, name)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces all keys, rows and states by those of a file that `save` wrote.

        Or by those of a directory of `save_increment`: all its snapshots, each checked. Any number of hosts can load
        the snapshots of several hosts; that takes memory for one host's part at a time.

        Call it in one worker, and ``barrier()`` before anyone continues. In a replacement (`multiverso.incarnation`) it
        changes nothing, and says so.

        Raises:
            SnapshotError: no such file, not a saved keyed table, or another dim, dtype or updater; a snapshot that is
                missing, damaged or does not follow the one before. Nothing was changed.
        """
        self._session.check()
        saved, run = self._read(path), snapshots.run_in(Path(path))
        if not leaves_values(self._session, f"the table {self.name!r}"):
            self._replace(*saved)
            self._calls.set_word(at.CONTINUES, run)

    def _content(self, since: int, passes: KeyedPasses | None = None) -> Content:
        """Returns what was changed after a generation, sorted by key; of those rows that ``passes`` go through."""
        size = sum(self._spec.widths()) * self._dtype.itemsize
        found = list((passes or self._passes).rows_since(since, size))
        keys, values, rows = (np.concatenate(part) for part in zip(*found, strict=True))
        order = np.argsort(keys, kind="stable")
        knows_use = self._spec.keeps_use and (passes is not None or isinstance(self._passes, KeyedPasses))
        uses = values[order] & ~NO_ROW if knows_use else None
        return Content(keys[order], rows[order], uses, ticks=self.ticks)

    def _read(self, path: str | os.PathLike[str]) -> tuple[Keys, int, Iterable[Content]]:
        """Returns the keys of what was saved, if it fits this table, its time, and its parts, read when asked for."""
        place = Path(path)
        parts = snapshots.parts_in(place) if place.is_dir() else []
        if len(parts) > 1:  # each is as large as what a host can hold
            found = [(content.keys, content.ticks) for content in (snapshots.read(part, self._spec) for part in parts)]
            keys, ticks = zip(*found, strict=True)
            return np.concatenate(keys), max(ticks), (snapshots.read(part, self._spec) for part in parts)
        content = snapshots.read(parts[0], self._spec) if parts else saving.load(place, self._spec)
        return content.keys, content.ticks, [content]

    def _replace(self, keys: Keys, ticks: int, parts: Iterable[Content]) -> None:
        """Makes the table hold what was saved, and nothing else."""
        keys = np.sort(keys)
        for some, _, kinds in self._passes.entries(_MOST_AT_ONCE):
            there = some[kinds != GONE]
            places = np.searchsorted(keys, there)
            places[places == keys.size] = 0
            self._remove(there[keys[places] != there] if keys.size else there)
        self._calls.set_word(at.TICK, ticks)  # before the rows: on several hosts they count as used now
        row_bytes = sum(self._spec.widths()) * self._dtype.itemsize
        progress = Progress(f"loading rows into the table {self.name!r}", keys.size * row_bytes)
        for content in parts:
            for low in range(0, content.keys.size, _MOST_LOADED_AT_ONCE):
                now = slice(low, low + _MOST_LOADED_AT_ONCE)
                self._calls.overwrite(content.keys[now], content.rows[now])
                if content.uses is not None and self._spec.keeps_use:
                    self._passes.note_use(content.keys[now], content.uses[now])
                progress.add(content.keys[now].size * row_bytes)

    def _remove(self, keys: Any, timeout_seconds: float | None = None) -> npt.NDArray[np.bool_]:
        array, calls = as_keys(keys), self._calls
        work = Removing.of(array.reshape(-1))
        remove = lambda call, deadline: calls.remove(call, deadline).reshape(array.shape)  # noqa: E731
        return calls.make(work, remove, self._deadline(timeout_seconds))
