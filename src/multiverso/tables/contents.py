"""A table past its rounds and clocks: windows on its memory, copies, files, overwriting."""

from __future__ import annotations

import os
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from multiverso.errors import NotInThisJobError
from multiverso.layout import words as at
from multiverso.memory import words
from multiverso.runtime.session.refusals import refuse_under_rule
from multiverso.runtime.session.replacing import leaves_values
from multiverso.runtime.session.watching import await_version
from multiverso.tables import loading, saving
from multiverso.tables.convert import Array, Out
from multiverso.tables.held import HeldTable


class Contents(HeldTable):
    """What a table shows and takes at any moment, whatever the consistency; see ``TableHandler``."""

    def view(self) -> Array:
        """Returns a read-only window on the shared memory, without a copy, in the table's shape.

        It shows other workers' adds as they come, with no promise about their order (in synchronous mode: the
        last finished round; take a new view after each read). It outlives ``shutdown``, frozen.
        """
        self._session.check()
        offset = self._shard.values_offset()
        return self._shard.segment.window(offset, self.size, self._dtype).reshape(self.shape)

    def memory(self) -> Array:
        """Returns the values themselves, writable, in the table's shape; it outlives ``shutdown``.

        What is written there is what all workers see, and nothing locks it: for code that keeps the others away
        by itself. Not in synchronous mode, where the values change places with each round.

        Raises:
            NotInThisJobError: the session is in synchronous mode.
        """
        self._session.check()
        if self._session.consistency.in_rounds:
            raise NotInThisJobError("there is no memory() in synchronous mode, whose rounds keep two copies")
        return self._shard.values().reshape(self.shape)

    def note_written(self) -> None:
        """Marks :meth:`memory` as written to, which nothing else notices, so that it is sent to other hosts, too.

        What comes from other hosts while it is being written to may be overwritten.
        """
        self._session.check()
        words.store64(self._shard.base + at.WRITTEN, words.load64(self._shard.base + at.WRITTEN) + 1)
        rests = self._session.control.address + at.NODE_RESTS
        if words.load32(rests):
            words.bump_and_wake(rests)

    @overload
    def snapshot(self, out: None = None) -> Array: ...
    @overload
    def snapshot(self, out: Out) -> Out: ...
    def snapshot(self, out: Any = None) -> Any:
        """Returns a copy of the values outside the rounds and clocks, at any time, in any mode.

        In synchronous mode it is the last finished round. Otherwise each stripe (128 KiB; 8 KiB of a matrix) is
        consistent. It does first what is left of calls that this worker has begun (asynchronous ones, and one that
        raised), and waits for no worker's progress, only for one that is writing to the same stripe, as :meth:`get`
        does; the deadline is the session's.

        Raises:
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
            WaitTimeoutError: a stopped process holds a part of the table.
        """
        self._ready(None)
        output = self._output(out, None, self.shape)
        self._operations.settle(None)
        self._how.snapshot(output.flat)
        return output.give()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """What ``np.asarray(table)`` gives: a :meth:`snapshot`, which ends no round and waits for no clock.

        Raises:
            ValueError: ``copy=False``: :meth:`view` shows the values without a copy.
        """
        if copy is False:
            raise ValueError("np.array(table, copy=False): a table is copied; table.view() is a window on it")
        values: Array = self.snapshot()
        return values if dtype is None else values.astype(dtype, copy=False)

    def set(self, values: Any) -> None:
        """Overwrites the values of all workers, past the updater, whose state stays.

        Call it in one worker, and ``barrier()`` before anyone goes on: adds of others meanwhile may be lost or not,
        stripe by stripe. In synchronous mode it takes the place of the last finished round.

        Args:
            values: as for :meth:`add`; not modified.

        Raises:
            ShapeMismatchError, DtypeMismatchError: the values do not fit; nothing was changed.
            NotInThisJobError: a rule between hosts would make something else of them; nothing was changed.
        """
        self._ready(None)
        refuse_under_rule(self._session.hosts, self._session.exchange, "set", self._dtype)
        new = self._delta(values, "values")
        self._operations.settle(None)
        self._how.put(new)

    def wait_version(self, version: int, *, timeout_seconds: float | None = None) -> int:
        """Waits until all workers together have done so many adds and exchanges; returns how many they are.

        For readers that want to see something new, and nothing twice: ``seen = table.wait_version(seen + 1)``, and
        then ``table.snapshot()``. In synchronous mode it counts finished rounds. It sleeps until something is added;
        in a job on several hosts it looks every few milliseconds.

        Args:
            version: a number of adds and exchanges, as `version` has it.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ValueError: ``version`` is not a number of operations.
            WorkerLostError, NodeLostError, WaitTimeoutError: the wait could not end well.
        """
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version is a number of operations, 0 or more; got {version!r}")
        self._ready(timeout_seconds)
        reached, what = self._how.version, f"version {version} of {self._name}"
        await_version(self._session, self._shard.base, lambda: reached() >= version, what, timeout_seconds)
        return reached()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes values and updater state to a safetensors file, whole or not at all.

        Other workers' adds meanwhile may be in it or not: call ``barrier()`` first for an exact moment.
        """
        self._ready(None)
        self._operations.settle(None)
        self.copied().save(path)

    def copied(self) -> saving.Copied:
        """Returns what :meth:`save` writes; for another thread, too, beside this worker's own operations."""
        self._session.check()
        values = np.empty(self._size, self._dtype)
        self._how.snapshot(values)
        states = [np.array(state) for state in self._states()]
        return saving.Copied(self._spec, self.version, values, states)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces values and updater state by what :meth:`save` wrote.

        Call it in one worker (or in all), and ``barrier()`` before anyone goes on. In a job on several hosts also
        ``barrier()`` before; where the updater has a state, all workers have to call it there. In a worker that has
        taken a dead one's place (`multiverso.incarnation`) it changes nothing, and says so, unless all have to call
        it and come to it only now.

        Raises:
            SnapshotError: no such file, not a saved table, or another shape, dtype or updater; or, where all workers
                have to, they load different things. Nothing was changed.
        """
        self._ready(None)
        saved = self._read(path)
        if leaves_values(self._session, self._name, self._steps_of_load):
            return
        self._check_others(*saved)
        self._replace(*saved)

    @property
    def _steps_of_load(self) -> int:
        """How many barriers all workers pass where they load together: each host has states to be overwritten."""
        return int(bool(self._session.hosts and self._states()))

    def _check_others(self, values: Array, states: list[Array]) -> None:
        """Before a load: where each host has something of its own to be overwritten, all workers load the same."""
        if self._steps_of_load:
            loading.check_all(self._session, self._name, [values, *states])

    def _read(self, path: str | os.PathLike[str]) -> tuple[Array, list[Array]]:
        """Returns the values and updater state that :meth:`save` wrote, if they fit this table."""
        return saving.load(path, self._spec)

    def _replace(self, values: Array, states: list[Array]) -> None:
        """Overwrites values and updater state (flat, of the table's dtype and size)."""
        self._ready(None)
        refuse_under_rule(self._session.hosts, self._session.exchange, "load", self._dtype)
        self._operations.settle(None)
        if self._writes():
            self._how.put(values)
        if self._spec.step_count is not None:
            *states, count = states
            self._shard.set_steps(int(count[0]))
        for state, saved in zip(self._shard.states(), states, strict=True):
            state[:] = saved

    def _states(self) -> list[Array]:
        """Returns what the updater keeps, in the order of its states: arrays, and a count of steps."""
        arrays = self._shard.states()
        return arrays if self._spec.step_count is None else [*arrays, np.array([self._shard.steps])]

    def _writes(self) -> bool:
        """Whether this worker overwrites the values: of several hosts one does, as differences add up."""
        session = self._session
        if not session.hosts or self._how.in_rounds:
            return True
        if not loading.is_first(session, self._number, self._loaded_at):
            return False
        self._loaded_at = session.barriers
        return True
