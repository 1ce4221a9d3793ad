"""The thread during training: it writes what a worker has handed over, and the leader's lets a generation count."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from multiverso.checkpoints.board import ABANDONED, CLOSED, DONE, FAILED, FAILED_AND_CLOSED, Board
from multiverso.checkpoints.generations import check_tables, commit_generation, discard, remove_others
from multiverso.checkpoints.manifests import Generation, inherit, read_generations, read_receipt, write_receipt
from multiverso.checkpoints.parts import Packed, write_part, write_tables
from multiverso.checkpoints.stores import Store
from multiverso.errors import SnapshotError
from multiverso.layout import words as at
from multiverso.runtime import Session
from multiverso.saying import say

LOOK_SECONDS = 0.02
_END_SECONDS = 30.0  # for what is being written when a job is interrupted


@dataclass(frozen=True)
class Task:
    """A worker's part of a checkpoint, to be written."""

    number: int
    packed: Packed
    tables: dict[str, Any] | None  # of the worker that leads
    keys: list[str]


@dataclass(frozen=True)
class Interrupted:
    """An exception came while a worker handed over: its task is in the queue before this, or never will be."""

    number: int
    begun: int


class Writer:
    """Writes one worker's part of each generation, and as the leader's the tables. Its thread starts with the first.

    Attributes:
        idle: set while nothing that was handed over is being written, or waits for the others' parts.
        giving_up: set where nobody waits any longer for those who have handed nothing over.
        failure: what the last part could not be written for; the caller that reports it clears it.
    """

    def __init__(self, session: Session, store: Store, board: Board, keep: int) -> None:
        self._session, self._store, self._board, self._keep = session, store, board, keep
        self._present = session.control.live()  # what others have abandoned was before this one
        self._tasks: queue.SimpleQueue[Task | Interrupted | None] = queue.SimpleQueue()
        self.idle = threading.Event()
        self.idle.set()
        self.giving_up = threading.Event()
        self.failure: Exception | None = None
        self._ending = False
        self._thread: threading.Thread | None = None
        # how often something was about to be handed over; the last number that was
        self._begun = self._last = 0

    def begin(self) -> None:
        """Announces that something is about to be handed over."""
        self._begun += 1
        self.giving_up.clear()
        self.idle.clear()

    def interrupted(self, number: int) -> None:
        """After an exception since `begin`: what has not been handed over of this number counts as failed."""
        self.write(Interrupted(number, self._begun))

    def write(self, task: Task | Interrupted) -> None:
        """Hands it over."""
        self._tasks.put(task)
        if self._thread is None or self._thread.ident is None:  # an exception may have kept it from beginning
            self._thread = threading.Thread(target=self._run, name="multiverso-checkpoint", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends the thread, once what it has begun is written; after a while without."""
        self._ending = True
        self.giving_up.set()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, Interrupted):
                self._settle(task)
                continue
            self._last = task.number
            try:
                with self._session.threads.in_background():
                    self._write(task)
            except Exception as error:  # whatever a file system of others raises
                self.failure = error
                self._board.say(task.number, FAILED)
                if task.tables is not None:
                    discard(self._store, task.number)
            finally:
                self.idle.set()
        self._tasks.put(None)  # for another such thread, where an exception came while the first began

    def _settle(self, left: Interrupted) -> None:
        if self._last < left.number:
            self._board.say(left.number, FAILED)
        if self._begun == left.begun:
            self.idle.set()

    def _write(self, task: Task) -> None:
        store, me = self._store, self._session.worker_id
        generation = Generation(task.number, task.keys, {me: task.packed.common_name})
        store.make(generation.folder)
        hashes = write_part(store, generation, me, task.packed, generation.common)
        if task.tables is not None:
            if not self._session.consistency.in_rounds:
                self._gather()
            hashes |= write_tables(store, generation, copied(task.tables))
        write_receipt(store, generation.folder, me, hashes, task.packed.common_name)
        self._board.say(task.number, DONE)
        if task.tables is not None:
            why, done = self._await_others(generation)
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
                time.sleep(LOOK_SECONDS)  # the nodes do it, whatever their workers wait for
                if self._ending or session.node_lost or deadline.passed:
                    raise SnapshotError("the other hosts have not sent all that their workers have added")

    def _await_others(self, generation: Generation) -> tuple[str, list[int]]:
        """Waits until all that take part have written; returns why it is given up (or nothing), and who has written.

        Giving up is about those who have handed nothing over: what is being written is waited for.
        """
        control, number = self._session.control, generation.number

        def has_said(worker: int) -> bool:
            return read_receipt(self._store, generation.folder, worker) is not None

        while True:
            waited_for: list[int] = []
            idle: list[int] = []
            done: list[int] = []
            for worker in range(control.capacity):
                said, phase = self._board.of(worker)
                failed = said == number and phase in (FAILED, FAILED_AND_CLOSED)
                if failed or (said > number and not has_said(worker)):
                    return f"worker {worker} could not write its part", done
                abandoned = phase == ABANDONED and worker in self._present
                written = phase in (DONE, CLOSED) or (abandoned and has_said(worker))
                if said > number or (said == number and written):
                    done.append(worker)
                elif not control.continues and (abandoned or control.liveness(worker) == at.LOST):
                    return f"worker {worker} {'ended with an error' if abandoned else 'was lost'}", done
                elif control.is_live(worker) and not self._board.has_closed(worker):
                    waited_for.append(worker)
                    if said < number:
                        idle.append(worker)
            if not waited_for:
                return "", done
            if self._session.node_lost:
                return "the job's node is gone", done
            if self.giving_up.is_set() and idle:
                return f"worker {idle[0]} has handed nothing over", done
            time.sleep(LOOK_SECONDS)

    def _commit(self, generation: Generation, done: list[int]) -> None:
        store = self._store
        before = read_generations(store, missing_ok=True)
        check_tables(store, before, generation.tables, "it was not replaced")
        common = {}
        in_step = self._session.consistency.in_step
        for worker in range(self._session.control.capacity):
            said = read_receipt(store, generation.folder, worker)
            if said is None and not in_step and before and worker in before[-1].common:
                # This worker has left, or is lost: its last part counts. In rounds it would take steps again that the
                # tables have: there it is in step with the others when all resume.
                said = inherit(store, worker, before[-1], generation)
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


def copied(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tables as they are now; what is a copy already, as it is."""
    return {key: table.copied() if hasattr(table, "copied") else table for key, table in tables.items()}
