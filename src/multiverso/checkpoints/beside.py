"""`multiverso.checkpoint`: a run is saved beside the training, again and again.

Nobody waits for anybody. The lowest worker says (on the `Board`) that a generation is due; each worker packs what is
its own at its next step and goes on, and a thread of its own writes it. The lowest worker's thread writes the tables,
waits until all have written, and then lets the generation count. In a synchronous job each worker counts its own
steps instead, which are those of the rounds, and the lowest packs the tables with its own: all is of one moment.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, Self

from multiverso import layout as at
from multiverso.checkpoints.alone import load_own
from multiverso.checkpoints.board import (
    CLOSED,
    DONE,
    FAILED,
    FAILED_AND_CLOSED,
    NOTHING,
    WRITING,
    Board,
)
from multiverso.checkpoints.generations import (
    STEPS_OF_LOAD,
    Packed,
    Parts,
    Table,
    check_tables,
    commit_generation,
    discard,
    load,
    numbers_in,
    refuse_strangers,
    remove_others,
    write_part,
    write_tables,
)
from multiverso.checkpoints.manifests import Generation, Receipts, inherit, read_generations
from multiverso.checkpoints.roles import say
from multiverso.checkpoints.stores import PathLike, open_store
from multiverso.errors import ClosedError, SnapshotError, WaitTimeoutError
from multiverso.runtime import Session
from multiverso.runtime.agreement import Together, count_as_done
from multiverso.runtime.current import current
from multiverso.runtime.every import Every
from multiverso.runtime.restarts import may_resume

Own = dict[str, Any] | Callable[[], dict[str, Any]] | None
_LOOK_SECONDS = 0.02
_STUCK_SECONDS = (
    1.0  # a worker that has waited that long may wait for the leader: a shorter wait ends by itself
)
_END_SECONDS = 30.0  # for what is being written when a job is interrupted
_STEPS_OF_BEGIN = 2  # that all workers do together
_LOCK_SECONDS = 5.0  # one that was killed just now holds its lock until it has ended


class Manager(Protocol):
    """What shares a model: a ``ParamManager``, or `multiverso.params.SharedParams`."""

    def collect_parts(self) -> Parts:
        """Returns what is this worker's own."""

    def check_parts(self, parts: Parts) -> None:
        """Raises where that, as it was saved, does not fit; changes nothing."""

    def apply_parts(self, parts: Parts) -> None:
        """Goes on from it, once the tables have their values."""

    def saved_tables(self) -> Any:
        """Returns the tables that it shares, by name."""


@dataclass(frozen=True)
class _Task:
    """What a worker has handed over."""

    number: int
    packed: Packed
    tables: dict[str, Table] | None  # of the worker that leads
    keys: list[str]


class Checkpoint:
    """A run that is saved beside the training, and resumed. Collective: all workers make it, in the same place.

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
        self._every = None if every is None else Every(every)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep={keep!r}: expected a number of checkpoints, 1 or more")
        for manager in managers:
            if not hasattr(manager, "collect_parts"):
                raise TypeError(
                    f"{type(manager).__name__} is not a manager that a checkpoint can hold: expected a ParamManager of "
                    "torch, keras or theano, or SharedParams; with JAX, use manager.save() and load()"
                )
        self._session = session or current()
        self._in_rounds = self._session.consistency.in_rounds
        if self._in_rounds and self._every is not None and self._every.by_time:
            raise ValueError(
                "every= by time would mean different steps in different workers, and a synchronous job is saved "
                "after a round: give a number of steps"
            )
        self._store, self._place = open_store(directory), directory
        self._managers, self._keep = managers, keep
        self.newcomer = False
        self._board = Board(self._session)
        self._own: Own = None
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._giving_up = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._held = contextlib.ExitStack()
        if any(getattr(f, "__self__", None).__class__ is Checkpoint for f in self._session.before_end):
            raise SnapshotError("this worker has a checkpoint already: close it before the next one is made")
        begin = self._begin_alone if self._session.incarnation else self._begin
        self._last, self._resumes = begin(resume)
        self._session.before_end.append(self.close)

    def _begin(self, resume: bool) -> tuple[int, bool]:
        """Looks at what is saved, the same in all workers: the last number, and whether this run goes on from there."""
        task = Together(self._session, lambda why: SnapshotError(f"{self._store} cannot be used: {why}"))

        def look() -> str:
            if self._session.worker_id != min(self._session.live_workers()):
                return ""
            self._store.make()
            self._held.enter_context(self._store.alone(_LOCK_SECONDS))
            there = read_generations(self._store, missing_ok=True)
            if there and not (resume or may_resume()):
                raise SnapshotError(
                    f"{self._store} holds a run already (saved as {there[-1].folder}). To go on from it: `multiverso "
                    "run --resume`, MULTIVERSO_RESUME=1, or checkpoint(..., resume=True); to begin a new one, give "
                    "another directory, or remove this one"
                )
            refuse_strangers(self._store, there)
            remove_others(self._store, there)
            return f"{max([0, *numbers_in(self._store)])} {len(there)}"

        try:
            said = "".join(task.step(look).values())
        except BaseException:
            self._held.close()
            raise
        last, there = map(int, said.split())
        self._board.say(last, NOTHING)  # what was said of another checkpoint does not count
        task.step()
        return last, there > 0

    def _begin_alone(self, resume: bool) -> tuple[int, bool]:
        """As `_begin`, for a worker that takes a dead one's place: the others have done so before, and go on."""
        session = self._session
        if self._in_rounds:
            raise SnapshotError(
                "in a synchronous job all workers count the steps to a checkpoint alike, so that none can take the "
                "place of one that died: start the job again (multiverso run --max-restarts), or make no checkpoints"
            )
        if session.worker_id == min(session.live_workers()):  # then nobody has what the dead one held
            self._store.make()
            self._held.enter_context(self._store.alone(_LOCK_SECONDS))
        newest = self._board.newest()
        if newest:  # if it is being written, its other parts do not wait for this worker's
            self._board.say(newest, FAILED)
        count_as_done(session, _STEPS_OF_BEGIN)
        return newest, bool(read_generations(self._store, missing_ok=True))

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

        def check(parts: Parts) -> None:
            if len(parts.own["managers"]) != count:
                raise SnapshotError(f"{len(parts.own['managers'])} managers were saved, and here are {count}")
            for index, manager in enumerate(self._managers):
                manager.check_parts(part(parts, index))

        def apply(parts: Parts) -> None:
            for index, manager in enumerate(self._managers):
                manager.apply_parts(part(parts, index))
            self.newcomer = parts.newcomer

        if self._session.incarnation:
            return self._restore_alone(check, apply)
        found = load(self._session, self._place, self._tables(), check, apply)
        own: dict[str, Any] | None = found.own["own"] if found else None
        return own

    def _restore_alone(
        self, check: Callable[[Parts], None], apply: Callable[[Parts], None]
    ) -> dict[str, Any] | None:
        session = self._session
        found = load_own(session, self._store, check, apply)
        if found is None:
            return None
        saved, is_its_own = found
        self.newcomer = not is_its_own
        job, barriers = saved.get("barriers", ("", 0))
        if job == session.address:
            session.count_barriers(barriers)
        else:  # it was saved before the job was started again, and the others have restored it together
            count_as_done(session, STEPS_OF_LOAD)
        own: dict[str, Any] | None = saved["own"]
        return own

    def step(self, own: Own = None) -> bool:
        """Counts a step of training, and hands over what is this worker's own where a checkpoint is due.

        It waits for nobody, except for its own last checkpoint where that is still being written.

        Args:
            own: what this worker wants to have back from `restore`: a dictionary of state, as for ``manager.save``, or
                a function that returns it, which is called only when it is needed. It is copied.

        Returns:
            Whether it did.

        Raises:
            SnapshotError: the last checkpoint could not be written by this worker; the ones before are still there, and
                this step has counted.
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
        """Waits until what has been handed over is written, and hands over no more. A second call does nothing.

        It takes part in a checkpoint that has been begun meanwhile, with what `step` was given last.

        Raises:
            SnapshotError: it could not be written.
        """
        if self._closed:
            return
        try:
            if self._board.newest() > self._last and self._failure is None and not self._in_rounds:
                self._hand_over(self._board.newest(), self._own)
            self._wait_idle(unless_all_wait=True)
        finally:
            self._end()
        self._raise_failure()

    @property
    def is_writing(self) -> bool:
        """Whether what this worker has handed over is still being written, or waits for the others' parts."""
        return not self._idle.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    # -- handing over ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("this checkpoint was closed")
        self._session.check()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise SnapshotError(f"{self._store} was not saved: {failure}") from failure

    def _hand_over_if(self, due: bool, own: Own) -> bool:
        self._own = own
        number = self._number(due)
        if number:
            try:
                self._hand_over(number, own)
            finally:  # also of what failed: in a synchronous job all workers go on counting from the same step
                if self._every is not None and (self._in_rounds or self._last == number):
                    self._every.restart()
        self._raise_failure()
        return number > 0

    def _number(self, due: bool) -> int:
        """Returns the number of the checkpoint that this worker is to hand over to now, or 0."""
        if self._in_rounds:
            return self._last + 1 if due else 0
        asked = self._board.newest()
        if asked > self._last:
            return asked
        return self._last + 1 if due and self._leads() and self._idle.is_set() else 0

    def _hand_over(self, number: int, own: Own) -> None:
        try:
            self._wait_idle()
            packed = self._packed(own)
            named = self._tables()
        except BaseException:
            if self._in_rounds:  # a later step's part must not stand beside the others' of this one
                self._last = number
                if self._idle.is_set():
                    self._board.say(number, FAILED)
            raise
        tables = named if self._leads() else None
        if tables and self._in_rounds:
            tables = _copied(tables)
        self._giving_up.clear()
        self._idle.clear()
        self._last = number
        self._board.say(number, WRITING)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="multiverso-checkpoint", daemon=True)
            self._thread.start()
        self._tasks.put(_Task(number, packed, tables, list(named)))

    def _packed(self, own: Own) -> Packed:
        handed = own() if callable(own) else own
        if handed is not None and not isinstance(handed, dict):
            raise TypeError(f"own is a dictionary of state; got {type(handed).__name__}")
        parts = [manager.collect_parts() for manager in self._managers]
        common = [each.common for each in parts]
        at_barrier = (self._session.address, self._session.barriers)
        state = {"own": handed or {}, "managers": [each.own for each in parts], "barriers": at_barrier}
        return Packed.of(Parts(state, common if any(common) else None))

    def _leads(self) -> bool:
        return self._board.writers()[:1] == [self._session.worker_id]

    def _tables(self) -> dict[str, Any]:
        """All tables of this worker, by what files can be called."""
        named: dict[str, Any] = {}
        for index, manager in enumerate(self._managers):
            named |= {f"manager-{index}-{key}": table for key, table in manager.saved_tables().items()}
        moved = {id(table) for table in named.values()}
        for table in self._session.handlers():
            if id(table) not in moved:
                for user in table._users:
                    raise SnapshotError(
                        f"{table!r} is moved by the rule {user.rule}: give its manager to multiverso.checkpoint, too"
                    )
                named[f"name-{_quoted(table.name)}" if table.name else f"order-{table.number}"] = table
        return named | {f"keyed-{_quoted(name)}": t for name, t in self._session.keyed_tables.items()}

    def _wait_idle(self, unless_all_wait: bool = False) -> None:
        end = time.monotonic() + self._session.timeout_seconds
        while not self._idle.wait(_LOOK_SECONDS):
            if time.monotonic() > end:
                self._giving_up.set()
                raise WaitTimeoutError(
                    f"gave up after {self._session.timeout_seconds:.1f} s waiting for the checkpoint {self._last} in "
                    f"{self._store} to be written; a longer deadline: init(timeout_seconds=)"
                )
            if unless_all_wait and self._all_wait():
                self._giving_up.set()

    def _all_wait(self) -> bool:
        """Whether everybody else has been waiting, perhaps for this worker: nobody is on the way to the next step."""
        others = [w for w in self._board.writers() if w != self._session.worker_id]
        waits = [self._session.control.worker(worker).wait for worker in others]
        latest = time.monotonic_ns() - _STUCK_SECONDS * 1e9
        return bool(waits) and all(
            wait is not None and not wait.is_for_lock and wait.since_ns <= latest for wait in waits
        )

    def _end(self) -> None:
        self._closed = True
        self._giving_up.set()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_END_SECONDS)
        self._board.close()
        self._held.close()
        if self.close in self._session.before_end:
            self._session.before_end.remove(self.close)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._write(task)
            except Exception as error:  # whatever a file system of others raises
                self._failure = error
                self._board.say(task.number, FAILED)
                if task.tables is not None:
                    discard(self._store, task.number)
            finally:
                self._idle.set()

    def _write(self, task: _Task) -> None:
        store, me = self._store, self._session.worker_id
        generation = Generation(task.number, task.keys, {me: task.packed.common_name})
        store.make(generation.folder)
        hashes = write_part(store, generation, me, task.packed, generation.common)
        if task.tables is not None:
            if not self._in_rounds:
                self._gather()
            hashes |= write_tables(store, generation, _copied(task.tables))
        receipts = Receipts(store, generation.folder)
        receipts.write(me, hashes, task.packed.common_name)
        self._board.say(task.number, DONE)
        if task.tables is not None:
            why, done = self._await_others(task.number, receipts)
            if why:
                say(f"{store}: {generation.folder} is not kept: {why}; the checkpoint before it stays")
                store.remove(generation.folder)
            else:
                self._commit(generation, done)

    def _gather(self) -> None:
        """On several hosts: waits until this host's copies have what the others had when it was called."""
        session = self._session
        if session.hosts:
            number = session.node.gather()
            deadline = session.start_deadline()
            while session.control.gathered < number:
                time.sleep(_LOOK_SECONDS)  # the nodes do it, whatever their workers wait for
                if self._closed or session.node_lost or deadline.passed:
                    raise SnapshotError("the other hosts have not brought what they had not sent yet")

    def _await_others(self, number: int, receipts: Receipts) -> tuple[str, list[int]]:
        """Waits until all that take part have written; returns why it is given up (or nothing), and who has written.

        Giving up is about those who have handed nothing over: what is being written is waited for.
        """
        control, writers = self._session.control, set(self._board.writers())
        while True:
            waited_for: list[int] = []
            idle: list[int] = []
            done: list[int] = []
            for worker in writers:
                said, phase = self._board.of(worker)
                failed = said == number and phase in (FAILED, FAILED_AND_CLOSED)
                if failed or (said > number and receipts.read(worker) is None):
                    return f"worker {worker} could not write its part", done
                if said > number or (said == number and phase in (DONE, CLOSED)):
                    done.append(worker)
                    continue
                if control.liveness(worker) == at.LOST and not control.continues:
                    return f"worker {worker} was lost", done
                if worker in control.live() and not self._board.has_closed(worker):
                    waited_for.append(worker)
                    if said < number:
                        idle.append(worker)
            if not waited_for:
                return "", done
            if self._session.node_lost:
                return "the job's node is gone", done
            if self._giving_up.is_set() and idle:
                return f"worker {idle[0]} has handed nothing over", done
            time.sleep(_LOOK_SECONDS)

    def _commit(self, generation: Generation, done: list[int]) -> None:
        store = self._store
        before = read_generations(store, missing_ok=True)
        check_tables(store, before, generation.tables, "it was not replaced")
        common = {}
        receipts = Receipts(store, generation.folder)
        for worker in range(self._session.control.capacity):
            if before and worker in before[-1].common and receipts.read(worker) is None:
                inherit(
                    store, worker, before[-1], generation
                )  # it has left, or is lost: its last part counts
            said = receipts.read(worker)
            if said is not None:
                common[worker] = said.common
            elif worker in done:
                raise SnapshotError(
                    f"worker {worker} has written its part, and it is not in {store}/{generation.folder}: do all "
                    "workers see the same files there?"
                )
        older = before[len(before) - self._keep + 1 :] if self._keep > 1 else []
        whole = commit_generation(store, Generation(generation.number, generation.tables, common), older)
        remove_others(store, [*older, whole], above=generation.number)


def _copied(tables: Mapping[str, Any]) -> dict[str, Table]:
    """Returns tables as they are now; what cannot be copied, or is one already, as it is."""
    return {key: table.copied() if hasattr(table, "copied") else table for key, table in tables.items()}


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
    """Saves a run beside the training, again and again, and goes on from it: collective, whole or not at all.

    Each checkpoint has the values and updater states of all tables, of each of ``managers`` what is a worker's own, and
    what the worker hands over. `Checkpoint.step` counts and hands over; a thread writes. Nobody waits for it, so that
    in an asynchronous job the parts of different workers are of slightly different moments; in a synchronous one all
    is of one step. `Checkpoint.restore` goes on from the newest that is whole.

    Args:
        directory: the same for all workers, who all see it, and for this run alone; or a URL that fsspec knows, such as
            ``s3://bucket/run`` (``pip install "multiverso[fsspec]"``).
        managers: the ParamManagers whose models are part of it, in the same order each time. Tables that no manager
            shares are part of it anyway.
        every: a number of the lowest worker's steps (in a synchronous job: of each worker's), or a
            ``datetime.timedelta``; None: only at `Checkpoint.save`.
        keep: how many checkpoints stay, 1 or more; while one is written there is room needed for one more.
        resume: go on from what is there in any case. By default only a job that was started again does
            (``multiverso run --max-restarts``, torchrun's, a Slurm requeue), or one with ``multiverso run --resume``;
            any other start is refused where there is a run already.
        session: the session to use instead of the current one.

    Raises:
        SnapshotError: there is a run already, or something else; or another job saves there.
        ImportError, ValueError: a URL of a kind that nobody here can reach.

    Example:
        >>> import tempfile, multiverso as mv
        >>> mv.init()
        >>> table = mv.ArrayTableHandler(3)
        >>> with mv.checkpoint(tempfile.mkdtemp(), every=10) as checkpoint:
        ...     own = checkpoint.restore()
        ...     for step in range(own["step"] if own else 0, 25):
        ...         table.add([1, 1, 1])
        ...         _ = checkpoint.step({"step": step + 1})
        >>> mv.shutdown()
    """
    return Checkpoint(directory, *managers, every=every, keep=keep, resume=resume, session=session)
