"""The arrays of a model, shared: parameters add up what each worker changed, statistics are averaged.

What every binding needs once: many arrays become a few flat buffers, one for each dtype, so that a model of a
thousand arrays is one exchange and not a thousand.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from multiverso import checkpoints
from multiverso.checkpoints.parts import Parts, check_own
from multiverso.checks import whole
from multiverso.due import Due
from multiverso.errors import InterruptedRoundError, SnapshotError
from multiverso.params.flats import Averaged, Flat, pack, steps_between_turns
from multiverso.params.hold import Hold, Use
from multiverso.params.rows import RowExchange, goes_by_rows
from multiverso.params.values import Files, Model, Values, placed
from multiverso.rules import Rule, RuleName, rule_of
from multiverso.rules.shared import check_mode
from multiverso.runtime import Session
from multiverso.runtime.session.current import current
from multiverso.spec.table import Initial, check_name
from multiverso.tables import TableHandler

Array = NDArray[Any]
Result = TypeVar("Result")


class SharedParams:
    """Shares a model's arrays between all workers: collective, or (asynchronous) by name.

    Each worker's changes since its last exchange are added to the shared parameters; of ``statistics``
    (running means and variances) it contributes a weighted average instead, so that a variance stays one. All
    workers begin with the same values.

    Attributes:
        arrays: one writable view for each given array, of its shape, in float32 or float64 (`shared_dtype`).
            Train on these views themselves, or copy into them before an exchange and out of them after it.
        statistics: the same for the given statistics.
        newcomer: whether this worker had nothing of its own in what `load` loaded last.
        matrices: the same for the given matrices.
        workers_num: how many workers the job has.
        ending: how far `finish` is: 2 and more once this worker has pushed everything.
        hold: what a binding takes its framework's parameters with, so that no older manager exchanges them too.
        model: what a binding knows about the model whose arrays these are, for `save` and `load`.
        by_rows: for each matrix what is told which rows are read and changed (`RowExchange.read`), or None where all
            rows are exchanged each time.

    Not thread-safe: one thread at a time.

    Examples:
        >>> import numpy as np, multiverso as mv
        >>> session = mv.init()
        >>> shared = SharedParams([np.zeros((2, 3), "float32"), np.zeros(3, "float32")])
        >>> shared.arrays[0] += 1  # a training step
        >>> shared.exchange()
        >>> mv.shutdown()
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        statistics: Sequence[Array] = (),
        matrices: Sequence[Array] = (),
        *,
        whole_every: int = 100,
        name: str | None = None,
        every: int | timedelta = 1,
        fragments: int = 1,
        initial: Initial = "master",
        rule: Rule | RuleName | None = None,
        names: Sequence[str] = (),
        allocate: Callable[[int, np.dtype[Any]], Array] = np.empty,
        session: Session | None = None,
    ) -> None:
        """Makes the tables; returns when every live worker has done so (asynchronous, with ``name``: at once).

        Args:
            arrays: parameters of any shape, float16, bfloat16, float32 or float64. Copied, never modified.
            statistics: arrays that are averaged; the same dtypes.
            matrices: two-dimensional arrays of which each step reads and changes few rows; float32 or float64.
            whole_every: matrices are exchanged whole at every N-th exchange, and by rows between; 1 for always
                whole. With rules other than ASGD and Downpour, and in a synchronous job, they always are.
            name: create the tables, or attach to those of this name.
            every: a bare number counts calls of `step`, a ``datetime.timedelta`` is the time since the last exchange.
                Time does not tick alike in all workers, so a synchronous job refuses it.
            fragments: into so many equal parts the parameters are cut. They take turns, each at every ``every`` steps,
                so each exchange moves that much less (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512).
                All are whole then, matrices too.
            initial: whose values count, as in `multiverso.ArrayTableHandler`.
            rule: how parameters are exchanged: one of `multiverso.rules`, or its name; ASGD by default: changes add up.
            names: what the arrays are called, in the order of the lists; workers with other names are refused.
            allocate: makes the flat buffers, given a size and a dtype: pinned memory, say.
            session: the session to use instead of the current one.

        Raises:
            DtypeMismatchError: an array that is not of a floating dtype; nothing has been made then.
            TableMismatchError: other workers share other arrays, or by other names.
            ValueError: no arrays at all; a name that is not a text; ``every`` below one call or not above zero time;
                a rule that is not defined for the session's consistency; ``every`` steps that ``fragments`` do not
                divide.
        """
        given = [(np.asarray(array), False) for array in arrays]
        given += [(np.asarray(array), True) for array in statistics]
        dense = len(given)
        given += [(np.asarray(array), False) for array in matrices]
        if not given:
            raise ValueError("there is nothing to share: all lists of arrays are empty")
        check_name(name)
        whole_every = whole(whole_every, "whole_every", 1)
        session = session or current()
        rule = rule_of(rule, session.workers_num)
        every = steps_between_turns(every, fragments)
        by_rows = goes_by_rows(rule, session) and whole_every > 1 and fragments == 1
        in_rows = range(dense, len(given)) if by_rows else range(0)
        check_mode(rule, session.consistency)  # before any table is made
        self._session = session
        self.workers_num = session.workers_num
        self.model = Model()
        self.hold = Hold()
        self.newcomer = False
        self._due = Due(every)
        if self._due.by_time and session.consistency.in_rounds:
            raise ValueError(
                "every= by time lets workers exchange unequally often, and a synchronous round needs all of "
                "them: give a number of steps"
            )
        self._under_way: list[Flat | RowExchange] | None = None  # the tables of an exchange that has not ended
        self._at = 0  # how many of them it has done
        self._turn = 0  # which fragment the next step exchanges
        self._begun = False  # whether a call of `as_one_call` has taken the model's values and not returned
        self._taken: list[Any] | None = None  # by a `sync` that raised
        self.ending = 0  # how far `finish` is
        tables: dict[str, Any] = {"name": name, "holds": _words_of(names), "initial": initial, "session": session}
        self._packed = pack(given, in_rows, allocate, rule, whole_every, fragments, **tables)
        self._flats, views = self._packed.flats, self._packed.views
        self._values = Values(views, [array.dtype for array, _ in given])
        self.arrays = views[: len(arrays)]
        self.statistics = views[len(arrays) : dense]
        self.matrices = views[dense:]
        rows: list[RowExchange | None] = [flat for flat in self._flats if isinstance(flat, RowExchange)]
        self.by_rows = rows or [None] * len(self.matrices)
        self._use = Use(session.worker_id, self.hold)
        if session.workers_num > 1:
            session.before_end[f"use of {id(self._use)}"] = self._use.warn

    def values(self) -> list[Array]:
        """Returns fresh copies of all arrays and then all statistics, in the dtypes that were handed in."""
        return self._values.give()

    def sync(self, values: Sequence[Any], whole: bool = True) -> list[Array]:
        """Takes a model's values, exchanges, and returns what they are now: for models that are not views.

        Of 16-bit values only what changed since they were given out is taken: the shared ones are finer, and
        a rounding error is nothing that this worker has learned.

        Args:
            values: all arrays and then all statistics, of the shapes handed in. They are not modified.
            whole: as for `exchange`.

        Raises:
            ShapeMismatchError: other shapes, or another number of arrays; nothing has been exchanged.
        """
        self._values.place()
        taken_before = self._taken if self._begun else None
        if taken_before is not None:  # the call before this one raised
            changes = self._values.changed_since(values, taken_before)
            if changes:  # and training continued: that one first, and then what was learned since
                self._exchange(whole)
                new, taken = self._values.plus(changes), [np.array(value) for value in values]
                turn = self._next_turn()
                # no exception comes between these
                self._values.placing, self._taken, self._turn, self._under_way, self._at = new, taken, turn, None, 0
                self._values.place()
        else:
            self._taken = list(values)
        try:
            result = self.as_one_call(lambda: self._values.take(values), self.values, whole)
        except BaseException:
            if taken_before is None:  # the caller may train on in the same arrays
                self._taken = [np.array(value) for value in values]
            raise
        self._taken = None
        return result

    def as_one_call(self, take: Callable[[], None], give: Callable[[], Result], whole: bool = True) -> Result:
        """An exchange with what comes before and after it, as one call that is finished by calling it again.

        Args:
            take: brings the model's values into the arrays; nothing is exchanged before it has returned once.
            give: takes the exchanged values out of them; its result is that of the call.
            whole: as for `exchange`.

        What was done of a call that raised is not done again; of ``take`` and ``give`` only what did not return is.
        """
        self.hold.check()
        if not self._begun:
            take()
            self._begun = True
        self._exchange(whole)
        result = give()
        self._due.restart()
        turn = self._next_turn()
        # last, so that no exception comes between this and the return
        self._turn, self._under_way, self._at, self._begun = turn, None, 0, False
        return result

    def exchange(self, whole: bool = True) -> None:
        """Adds this worker's changes to the shared values and takes the values of all, in place.

        With ``whole=False`` as a step does: of fragments the one whose turn it is, and of matrices that go by rows
        perhaps not those that were not touched.

        Blocks as `multiverso.ArrayTableHandler.exchange` does: for the round in a synchronous job (one exchange is
        one round), for workers too far behind with bounded staleness, in an asynchronous job only for a worker that
        is writing to the same stripe. After one that raised, the next takes it up where it stopped: there the
        others wait.
        """
        self.as_one_call(_nothing, _nothing, whole)

    def finish(self, exchange: Callable[[], Result]) -> Result:
        """Shares the rest of all changes after the last step, so that all workers have the same values; collective.

        Whatever ``every`` and the rule's intervals are, it pushes the rest, waits until all workers have, and takes the
        values of all. After an exception, call it again.

        Args:
            exchange: `exchange`, or what a binding does instead.

        Returns:
            What the last exchange returned.
        """
        if self.ending < 2:
            self.ending = 1
            exchange()
            self.ending = 2
        if self.ending < 3:
            self._session.barrier()
            self.ending = 3
        result = exchange()
        self.ending = 0
        return result

    def begin(self) -> Callable[[], None]:
        """Counts steps from here, and returns what exchanges: for another thread, during training."""
        self.hold.check()
        self._due.restart()
        return self._exchange_beside

    def _exchange_beside(self) -> None:
        self._exchange(whole=len(self._packed.fragments) == 1)
        self._turn, self._under_way, self._at = self._next_turn(), None, 0

    def make_due(self) -> None:
        """Makes an exchange due at the next step: one that was begun has failed."""
        self._due.make_due()

    def _exchange(self, whole: bool) -> None:
        """Finishes an exchange that has not ended: a whole one is that, but one fragment is not all of them."""
        self._session.check()
        self._use.shared = True
        by_turn = len(self._packed.fragments) > 1 and not whole and not self.ending
        if self._is_fragment() and not by_turn:
            self._exchange_tables(whole)
            self._turn, self._under_way, self._at = self._next_turn(), None, 0
        if self._under_way is None:
            self._under_way = self._packed.fragments[self._turn] if by_turn else self._flats
        self._exchange_tables(whole)

    def _exchange_tables(self, whole: bool) -> None:
        assert self._under_way is not None
        while self._at < len(self._under_way):
            workers = self._session.workers_num
            self._under_way[self._at].exchange(workers, whole, self.ending > 0)
            self._at += 1  # no exception comes between the two

    def _is_fragment(self) -> bool:
        return self._under_way is not None and self._under_way is not self._flats

    def _next_turn(self) -> int:
        return (self._turn + self._is_fragment()) % len(self._packed.fragments)

    def centre(self) -> list[Array]:
        """Returns copies of the shared arrays and then statistics as they are now: what to validate and save.

        Exchanges nothing, and waits only as `multiverso.ArrayTableHandler.snapshot` does. This worker's own may
        differ, and with EASGD they do.
        """
        self._use.shared = True
        return self._packed.centre()

    def save(
        self, directory: str | os.PathLike[str], own: dict[str, Any] | None = None, *, files: Files | None = None
    ) -> None:
        """Saves everything that training continues from: collective, whole or not at all.

        That is the shared values with their updater's state, and of each worker its own arrays, its rule's state
        and what it hands over. Nothing is exchanged. If a worker is killed meanwhile, the save before stays.

        Args:
            directory: the same for all workers; for one `SharedParams` alone. A save takes the place of the one
                before when it is complete, so for a moment both need room.
            own: this worker's own state, a dictionary (an optimizer's, random numbers', how
                many steps there were): numbers, strings, bytes, None, arrays of NumPy or JAX, tensors, and lists,
                tuples and dictionaries of these. Nothing is pickled.
            files: writes more files of this worker into an empty folder.

        Raises:
            TypeError: ``own`` holds something else; the message says where.
            SnapshotError: it could not be written by some worker; or the directory holds something else, which is kept.
            InterruptedRoundError: an exchange was interrupted: finish it first, by calling it again.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not all workers came.
        """
        checkpoints.save(self._session, directory, self.saved_tables(), lambda: self.collect_parts(own), files)

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        missing_ok: bool = False,
        check: Callable[[dict[str, Any], bool], None] = lambda *_: None,
    ) -> dict[str, Any] | None:
        """Goes back to what `save` wrote: collective; all of it fits in all workers, or nothing is changed.

        There may be more or fewer workers than saved. The shared values and their updater's state are for all of
        them. With fewer, what those without a place had of their own is left out, except what they have contributed to
        a synchronous round already. With more, those who have nothing of their own (`newcomer`) begin from the shared
        values, and get as ``own`` what another worker had handed over. A line on standard error says which.

        Args:
            directory: as for `save`.
            missing_ok: return None where nothing has been saved yet.
            check: raises where ``own`` does not fit; nothing has been changed then. Its other argument says whether
                that is another worker's.

        Returns:
            What this worker has handed over as ``own``; tensors on the CPU, JAX's arrays as NumPy's.

        Raises:
            SnapshotError: nothing is there, it is damaged, or it is the state of another model or of another rule; or
                fewer workers continue than saved, in the middle of a round whose rule takes the mean of them.
        """

        def check_all(parts: Parts) -> None:
            self.check_parts(parts)
            check(parts.own["own"], parts.newcomer)

        tables = self.saved_tables()
        found = checkpoints.load(self._session, directory, tables, check_all, self.apply_parts, missing_ok)
        own: dict[str, Any] | None = found.own["own"] if found else None
        return own

    def collect_parts(self, own: dict[str, Any] | None = None) -> Parts:
        """Returns what is this worker's own, for a `multiverso.Checkpoint` too: the arrays themselves, not copies.

        Raises:
            TypeError: ``own`` is not a dictionary.
            InterruptedRoundError: an exchange was interrupted: finish it first, by calling it again.
        """
        self.hold.check()
        handed = check_own(own)
        narrow = self._values.take_wide(self.model.values()) if self.model.values else {}
        parts = self.model.read()
        if self._at or self._begun:
            raise InterruptedRoundError("an exchange was interrupted; call it again to finish it before saving")
        state = {
            "own": handed,
            "model": parts.own,
            "narrow": narrow,
            "steps": self._due.count,
            "turn": self._turn,
            "flats": [flat.state() for flat in self._flats],
        }
        return Parts(state, parts.common)

    def check_parts(self, parts: Parts) -> None:
        """Raises SnapshotError where what was collected does not fit; changes nothing."""
        self.hold.check()
        fragments = len(self._packed.fragments)
        if parts.own.get("turn") not in range(fragments):
            raise SnapshotError(f"this was saved with other fragments than {fragments}. Nothing was changed")
        for index, flat in enumerate(self._flats):  # as many as there are tables
            flat.check(parts.own["flats"][index], [left["flats"][index] for left in parts.left])
        self.model.check(Parts(parts.own["model"], parts.common, parts.newcomer))

    def apply_parts(self, parts: Parts) -> None:
        """Continues from what was collected, once the tables have their values."""
        self._due.resume(parts.own["steps"])
        self._use.shared = True
        self._at, self._begun, self._values.placing, self._taken, self.ending = 0, False, {}, None, 0
        self._turn, self._under_way = parts.own["turn"], None
        self.newcomer = parts.newcomer
        for index, flat in enumerate(self._flats):
            if parts.newcomer:
                flat.join(parts.own["flats"][index])
            else:
                flat.restore(parts.own["flats"][index], [left["flats"][index] for left in parts.left])
        narrow = {} if parts.newcomer else parts.own["narrow"]
        values = placed(self.values(), narrow) if self.model.values else []
        self.model.write(values, Parts(parts.own["model"], parts.common, parts.newcomer))

    def saved_tables(self) -> dict[str, TableHandler]:
        """Returns the tables by what a save calls them."""
        return {f"table-{index}-{_kind(flat)}": flat.table for index, flat in enumerate(self._flats)}

    def due(self) -> bool:
        """Counts one step of training; returns whether an exchange is due now, or one that raised is to be finished."""
        self.ending = 0  # a `finish` that raised is over where training continues
        return self._begun or self._due.step()

    def step(self) -> bool:
        """Counts one step of training and exchanges when that is due; returns whether it did."""
        due = self.due()
        if due:
            self.exchange(whole=False)
        return due


def _words_of(names: Sequence[str]) -> str:
    return f"by the names {hashlib.sha256(repr(list(names)).encode()).hexdigest()[:12]}" if names else ""


def _kind(flat: Flat | RowExchange) -> str:
    if isinstance(flat, RowExchange):
        return "rows"
    return "statistics" if isinstance(flat, Averaged) else "parameters"


def _nothing() -> None:
    return None
