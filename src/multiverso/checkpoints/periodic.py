"""`multiverso.checkpoint`: a run is saved repeatedly in the background.

No worker waits for another. The lowest worker says (on the `Board`) that a generation is due; each worker packs what is
its own at its next step and continues, and a thread of its own writes it. The lowest worker's thread writes the tables,
waits until all have written, and then lets the generation count. In a synchronous job each worker counts its own
steps instead, which are those of the rounds, and the lowest packs the tables with its own: all is of one moment. With
a quorum workers are in different rounds, so that is done as in an asynchronous job.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, Self

from multiverso.checkpoints.background_writer import LOOK_SECONDS, Task, Writer, copied
from multiverso.checkpoints.beginning import begin_alone, begin_together
from multiverso.checkpoints.board import FAILED, WRITING, Board
from multiverso.checkpoints.loading import STEPS_OF_LOAD, load, load_own
from multiverso.checkpoints.parts import Packed, Parts, check_own
from multiverso.checkpoints.stores import PathLike, open_store
from multiverso.checks import whole
from multiverso.due import Due
from multiverso.errors import ClosedError, SnapshotError, WaitTimeoutError
from multiverso.in_process import InProcess
from multiverso.runtime import Session
from multiverso.runtime.session.current import current
from multiverso.tables.save_all import handlers, keyed_tables

Own = dict[str, Any] | Callable[[], dict[str, Any]] | None
_NAME = "checkpoint"  # of what is to be done before a session ends
# a worker that has waited that long may wait for the leader: a shorter wait ends by itself
_STUCK_SECONDS = 1.0


class Manager(Protocol):
    """What shares a model: a ``ParamManager``, or `multiverso.params.SharedParams`."""

    def collect_parts(self) -> Parts:
        """Returns what is this worker's own."""

    def check_parts(self, parts: Parts) -> None:
        """Raises where that, as it was saved, does not fit; changes nothing."""

    def apply_parts(self, parts: Parts) -> None:
        """Continues from it, once the tables have their values."""

    def saved_tables(self) -> Any:
        """Returns the tables that it shares, by name."""


_continued: set[tuple[str, int, str]] = set()  # the stores whose newest state a worker of a job has


class Checkpoint(InProcess):
    """A run that is saved in the background, and resumed. Collective: all workers make it, in the same place.

    Attributes:
        newcomer: whether `restore` has given this worker what another one had handed over, as fewer had saved.

    Not thread-safe: one thread at a time.
    """

    def __init__(
        self,
        directory: PathLike,
        *managers: Manager,
        every: int | timedelta | None = None,
        keep: int = 2,
        resume: bool = False,
        session: Session | None = None,
    ) -> None:
        """See `multiverso.checkpoint`."""
        self._every = None if every is None else Due(every)
        keep = whole(keep, "keep", 1)
        for manager in managers:
            if not hasattr(manager, "collect_parts"):
                raise TypeError(
                    f"{type(manager).__name__} is not a manager that a checkpoint can hold: expected a ParamManager of "
                    "torch, keras or theano, or SharedParams; with JAX, use manager.save() and load()"
                )
        self._session = session or current()
        self._in_step = self._session.consistency.in_step
        if self._in_step and self._every is not None and self._every.by_time:
            raise ValueError(
                "every= by time would mean different steps in different workers, and a synchronous job is saved "
                "after a round: give a number of steps"
            )
        self._store, self._place = open_store(directory), directory
        self._managers = managers
        self.newcomer = False
        self._board = Board(self._session)
        self._writer = Writer(self._session, self._store, self._board, keep)
        self._own: Own = None
        self._closed = False
        self._held = contextlib.ExitStack()
        if _NAME in self._session.before_end:
            raise SnapshotError("this worker has a checkpoint already: close it before the next one is made")
        begin = begin_alone if self._session.incarnation else begin_together
        try:
            self._last, self._resumes = begin(self._session, self._store, self._board, self._held, resume)
        except BaseException:
            self._held.close()
            raise
        self._use = self._session.job, self._session.worker_id, str(self._store)
        if not self._resumes or self._session.incarnation:  # a dead worker's place can do without
            _continued.add(self._use)
        self._session.before_end[_NAME] = self.close

    # -- what users call ------------------------------------------------------------------------------------

    def restore(self) -> dict[str, Any] | None:
        """Goes back to the newest checkpoint that is whole: collective. Make tables, models and managers first.

        Every file is checked against its hash; where one is damaged, the checkpoint before is taken, and a line on
        standard error says so. There may be more or fewer workers than saved, as with ``manager.load``.

        A worker that takes a dead one's place (`multiverso.incarnation` is above 0) does this alone: it gets what that
        one had handed over last, its managers begin with the shared values as they are now, and no table changes.

        Returns:
            What this worker had handed over; tensors on the CPU, JAX's arrays as NumPy's. None where nothing has been
            saved, as at the first start.

        Raises:
            SnapshotError: what is there is damaged, or of other tables or another model. Nothing was changed.
        """
        self._check()
        if not self._resumes:
            return None
        count = len(self._managers)

        def part(parts: Parts, index: int) -> Parts:
            common = parts.common[index] if parts.common else None
            left = tuple(left["managers"][index] for left in parts.left)
            return Parts(parts.own["managers"][index], common, parts.newcomer, left)

        tables = self._tables()

        def check(parts: Parts) -> None:
            if not isinstance(parts.own["own"], dict | None):
                raise TypeError(f"what restore() returns is {parts.own['own']!r:.80}")
            unread = {key for saved in (parts.own, *parts.left) for key in saved.get("unread", {})}
            if unknown := unread - tables.keys():
                raise KeyError(*unknown)
            for key in {key for left in parts.left for key in left.get("unread", ())}:
                if key in tables and tables[key]._takes_mean:
                    raise SnapshotError(
                        f"the updater of {tables[key]!r} takes the mean of what workers add in a round, and this was "
                        "saved in the middle of one, by more workers than resume: start as many again. Nothing was "
                        "changed"
                    )
            if len(parts.own["managers"]) != count:
                raise SnapshotError(f"{len(parts.own['managers'])} managers were saved, and here are {count}")
            for index, manager in enumerate(self._managers):
                manager.check_parts(part(parts, index))

        def apply(parts: Parts) -> None:
            for index, manager in enumerate(self._managers):
                manager.apply_parts(part(parts, index))
            self.newcomer = parts.newcomer
            if not self._session.incarnation:  # the others have long read what the dead one had added
                for saved in parts.left if parts.newcomer else (parts.own, *parts.left):
                    for key, added in saved.get("unread", {}).items():
                        tables[key]._add_unread(*added)

        if self._session.incarnation:
            return self._restore_alone(check, apply)
        found = load(self._session, self._place, tables, check, apply)
        _continued.add(self._use)
        own: dict[str, Any] | None = found.own["own"] if found else None
        return own

    def _restore_alone(self, check: Callable[[Parts], None], apply: Callable[[Parts], None]) -> dict[str, Any] | None:
        session = self._session
        found = load_own(session, self._store, check, apply)
        if found is None:
            return None
        saved, is_its_own = found
        self.newcomer = not is_its_own
        job, barriers = saved.get("barriers", ("", 0))
        if job == session.job:
            session.count_barriers(barriers)
        else:  # it was saved before the job was started again, and the others have restored it together
            session.count_barriers(session.barriers + STEPS_OF_LOAD)  # which the others have passed
        own: dict[str, Any] | None = saved["own"]
        return own

    def step(self, own: Own = None) -> bool:
        """Counts a step of training, and saves this worker's state if a checkpoint is due.

        It waits only for its own last checkpoint, if that is still being written.

        Args:
            own: the worker's state, which `restore` returns: a dictionary, as for ``manager.save``, or a function that
                returns it, which is called only if a checkpoint is due. It is copied.

        Returns:
            Whether it did.

        Raises:
            SnapshotError: the last checkpoint could not be written by this worker; the ones before are still there, and
                this step has counted. Or there is a run to resume, and `restore` was not called.
            TypeError: ``own`` holds what cannot be saved; the message says where. The step has counted; in a
                synchronous job this checkpoint is given up, otherwise the next step hands over.
        """
        self._check()
        due = self._every is not None and self._every.step()
        return self._hand_over_if(due, own)

    def save(self, own: Own = None) -> bool:
        """As `step`, but a checkpoint is due now, whatever ``every`` says. To be called in all workers.

        The lowest worker begins one, after the one before is written; the others hand over when it has: here, at
        their next step, or when they close.
        """
        self._check()
        if self._leads():
            self._wait_idle(unless_all_wait=True)
        return self._hand_over_if(True, own)

    def close(self) -> None:
        """Waits until everything is written, and saves no more. A second call does nothing.

        It takes part in a checkpoint that has begun meanwhile, with the last argument of `step`.

        Raises:
            SnapshotError: it could not be written.
        """
        if self._closed:
            return
        try:
            if self._board.newest() > self._last and self._writer.failure is None and not self._in_step:
                self._hand_over(self._board.newest(), self._own)
            self._wait_idle(unless_all_wait=True)
        finally:
            self._end()
        self._raise_failure()

    @property
    def is_writing(self) -> bool:
        """Whether what this worker has handed over is still being written, or waits for the others' parts."""
        return not self._writer.idle.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end(abandoned=True)

    # -- handing over ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("this checkpoint was closed")
        self._session.check()

    def _raise_failure(self) -> None:
        failure, self._writer.failure = self._writer.failure, None
        if failure is not None:
            raise SnapshotError(f"{self._store} was not saved: {failure}") from failure

    def _hand_over_if(self, due: bool, own: Own) -> bool:
        if self._use not in _continued:
            raise SnapshotError(
                f"{self._store} holds a run that is to be resumed, and this program has not called restore(): it would "
                "begin again, and write over what is saved. Call restore() once tables, models and managers are made"
            )
        self._own = own
        number = self._number(due)
        if number:
            try:
                self._hand_over(number, own)
            finally:  # also of what failed: in a synchronous job all workers continue counting from the same step
                if self._every is not None and (self._in_step or self._last == number):
                    self._every.restart()
        self._raise_failure()
        return number > 0

    def _number(self, due: bool) -> int:
        """Returns the number of the checkpoint that this worker is to hand over to now, or 0."""
        if self._in_step:
            return self._last + 1 if due else 0
        asked = self._board.newest()
        if asked > self._last:
            return asked
        return self._last + 1 if due and self._leads() and self._writer.idle.is_set() else 0

    def _hand_over(self, number: int, own: Own) -> None:
        try:
            self._wait_idle()
            packed = self._packed(own)
            named = self._tables()
        except BaseException:
            if self._in_step:  # a later step's part must not stand beside the others' of this one
                self._last = number
                if self._writer.idle.is_set():
                    self._board.say(number, FAILED)
            raise
        tables = named if self._leads() else None
        if tables and self._session.consistency.in_rounds:
            tables = copied(tables)  # before others hand over what no round has taken up by then
        task = Task(number, packed, tables, list(named))
        try:
            self._writer.begin()
            self._last = number
            self._board.say(number, WRITING)
            self._writer.write(task)
        except BaseException:
            self._last = number
            self._writer.interrupted(number)
            raise

    def _packed(self, own: Own) -> Packed:
        handed = check_own(own() if callable(own) else own)
        parts = [manager.collect_parts() for manager in self._managers]
        common = [each.common for each in parts]
        at_barrier = (self._session.job, self._session.barriers)
        state = {"own": handed, "managers": [each.own for each in parts], "barriers": at_barrier}
        if self._session.consistency.in_rounds:  # a rule keeps its own
            unread = {key: table._unread() for key, table in self._tables().items() if not key.startswith("manager-")}
            state["unread"] = {key: list(added) for key, added in unread.items() if added is not None}
        return Packed.of(Parts(state, common if any(common) else None))

    def _leads(self) -> bool:
        return self._board.writers()[:1] == [self._session.worker_id]

    def _tables(self) -> dict[str, Any]:
        """All tables of this worker, by what files can be called."""
        named: dict[str, Any] = {}
        for index, manager in enumerate(self._managers):
            named |= {f"manager-{index}-{key}": table for key, table in manager.saved_tables().items()}
        moved = {id(table) for table in named.values()}
        for table in handlers(self._session):
            if id(table) not in moved:
                for user in table._users:
                    raise SnapshotError(
                        f"{table!r} is moved by the rule {user.rule}: give its manager to multiverso.checkpoint, too"
                    )
                named[f"name-{_quoted(table.name)}" if table.name else f"order-{table.number}"] = table
        return named | {f"keyed-{_quoted(name)}": t for name, t in keyed_tables(self._session).items()}

    def _wait_idle(self, unless_all_wait: bool = False) -> None:
        end = time.monotonic() + self._session.timeout_seconds
        while not self._writer.idle.wait(LOOK_SECONDS):
            if time.monotonic() > end:
                self._writer.giving_up.set()
                raise WaitTimeoutError(
                    f"gave up after {self._session.timeout_seconds:.1f} s waiting for the checkpoint {self._last} in "
                    f"{self._store} to be written; a longer deadline: init(timeout_seconds=)"
                )
            if unless_all_wait and self._all_wait():
                self._writer.giving_up.set()

    def _all_wait(self) -> bool:
        """Whether everybody else has been waiting, perhaps for this worker: nobody is on the way to the next step."""
        others = [w for w in self._board.writers() if w != self._session.worker_id]
        waits = [self._session.control.worker(worker).wait for worker in others]
        latest = time.monotonic_ns() - _STUCK_SECONDS * 1e9
        return bool(waits) and all(
            wait is not None and not wait.is_for_lock and wait.since_ns <= latest for wait in waits
        )

    def _end(self, abandoned: bool = False) -> None:
        self._closed = True
        self._writer.end()
        self._board.close(abandoned)
        self._held.close()
        if self._session.before_end.get(_NAME) == self.close:
            del self._session.before_end[_NAME]


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe=" ,()[]=+@").replace("/", "%2F")


def checkpoint(
    directory: str | os.PathLike[str],
    *managers: Manager,
    every: int | timedelta | None = None,
    keep: int = 2,
    resume: bool = False,
    session: Session | None = None,
) -> Checkpoint:
    """Saves a run repeatedly in the background, and resumes it: collective, whole or not at all.

    Each checkpoint has the values and updater states of all tables, of each of ``managers`` what is a worker's own, and
    what the worker hands over. `Checkpoint.step` counts and hands over; a thread writes. Training does not wait for it,
    so that in an asynchronous job, and with a quorum, the parts of different workers are of slightly different moments;
    in a synchronous one all is of one step. `Checkpoint.restore` continues from the newest that is whole.

    Args:
        directory: the same for all workers, who all see it, and for this run alone; or a URL that fsspec knows, such as
            ``s3://bucket/run`` (``pip install "multiverso[fsspec]"``).
        managers: the ParamManagers whose models are part of it, in the same order each time. Tables that no manager
            shares are part of it anyway.
        every: a bare number counts *steps*, of the lowest worker (in a synchronous job: of each worker); for time
            give a ``datetime.timedelta``; None: only at `Checkpoint.save`. (In ``init(every=)`` it is seconds.)
        keep: how many checkpoints stay, 1 or more; while one is written there is room needed for one more.
        resume: continue from what is there in any case. By default only a job that was started again does
            (``multiverso run --max-restarts``, torchrun's, a Slurm requeue), or one with ``multiverso run --resume``;
            any other start is refused where there is a run already.
        session: the session to use instead of the current one.

    Raises:
        SnapshotError: there is a run already, or something else; or another job saves there.
        ImportError, ValueError: a URL of a kind that cannot be reached here.

    Examples:
        >>> import tempfile, multiverso as mv
        >>> session = mv.init()
        >>> table = mv.ArrayTableHandler(3)
        >>> with mv.checkpoint(tempfile.mkdtemp(), every=10) as checkpoint:
        ...     own = checkpoint.restore()
        ...     for step in range(own["step"] if own else 0, 25):
        ...         table.add([1, 1, 1])
        ...         _ = checkpoint.step({"step": step + 1})
        >>> mv.shutdown()
    """
    return Checkpoint(directory, *managers, every=every, keep=keep, resume=resume, session=session)
