"""The graph of waits: read from shared memory, then pure functions over it.

From the same facts come the error after a deadline, the warning after ten seconds, the answer to SIGUSR1 and
`multiverso top`, and the discovery that nobody can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from multiverso.layout import words as at
from multiverso.layout.worker_index import has_bit
from multiverso.memory.mutex import owner_pid
from multiverso.memory.words import load64
from multiverso.runtime.job.control import Control, Wait, WorkerState
from multiverso.shards.shard import Shard, TableProgress, WorkerProgress

COLLECTIVE = (
    "all workers make a table together, in the same order; only in an asynchronous job may each open one with name= "
    "when it likes"
)


class WaitGraph(Struct, frozen=True):
    """Everything that is needed to say who waits for whom.

    Attributes:
        workers: who is there, by number.
        tables: how far each is, by table.
        here: this host's name, in a job on several.
    """

    workers: Mapping[int, WorkerState]
    tables: Mapping[int, TableProgress]
    here: str = ""

    def missing(self, wait: Wait) -> list[int]:
        """Returns the live workers that a wait is for; empty when it can continue or that is unknown."""
        table = self.tables.get(wait.table)
        members = table.members if table is not None else {}
        behind = table.behind(wait.target, wait.stage) if table is not None and wait.kind == at.FOR_ROUND else []
        needs: dict[int, Callable[[WorkerState], object]] = {
            at.FOR_BARRIER: lambda one: one.barrier < wait.target,
            at.FOR_TABLE: lambda one: one.created < wait.target,
            at.FOR_LOCK: lambda one: wait.holder and (one.pid, one.host) == (wait.holder, wait.holder_host),
            at.FOR_WORD: lambda one: one.worker_id == wait.stage,
            at.FOR_REDUCTION: lambda one: one.worker_id in [i for i, n in enumerate(wait.phases) if n < wait.target],
            at.FOR_BATCHES: lambda one: has_bit(wait.target, wait.stage, one.worker_id),
            at.FOR_OTHER_HOSTS: lambda one: has_bit(wait.target, wait.stage, one.worker_id),
            at.FOR_ROUND: lambda one: one.worker_id in behind and one.worker_id in members,
            at.FOR_CLOCK: lambda one: one.worker_id in members and members[one.worker_id].clock < wait.target,
        }
        if wait.kind not in needs:
            return []
        return [worker.worker_id for worker in self.workers.values() if worker.is_live and needs[wait.kind](worker)]

    def is_awaited(self, me: int, table: int, clock: int) -> bool:
        """Returns whether all whose clock of a table is below this one wait for a worker."""
        behind = self.missing(Wait(at.FOR_CLOCK, 0, table, 0, clock, 0))
        waits = [self.workers[i].wait for i in behind]
        return bool(behind) and all(wait is not None and me in self.missing(wait) for wait in waits)

    def name_of(self, wait: Wait) -> str:
        """Returns a wait in words."""
        table = self.tables.get(wait.table)
        name = table.name if table else f"table {wait.table}" if wait.table > 0 else "shared memory"
        lock = f"a lock of {name}" + (f" that process {wait.holder} holds" if wait.holder else "")
        return {
            at.FOR_BARRIER: f"barrier {wait.target}",
            at.FOR_ROUND: f"round {(wait.target - 1) // (table.chunks if table else 1) + 1} of {name}",
            at.FOR_CLOCK: f"tick {wait.target} (bounded staleness) of {name}",
            at.FOR_BATCHES: "the end of an epoch's last batches",
            at.FOR_OTHER_HOSTS: "what others add to a reduction" if wait.target else "rows of other hosts",
            at.FOR_TABLE: f"the creation of table number {wait.target}",
            at.FOR_LOCK: lock,
            at.FOR_WORD: lock,
            at.FOR_REDUCTION: f"step {wait.target} of a reduction by {wait.stage} workers",
        }.get(wait.kind, "nothing")

    def deadlocked(self) -> bool:
        """Returns whether every live worker waits for one that waits too, so that nobody can continue.

        Only workers can make each other continue. A wait whose condition holds (its worker only has to wake up)
        and a worker that is used by several threads both mean: no. So does a wait for a word: its holder waits for
        nobody meanwhile, and one that is free by now does not show.

        What is known of different workers may be of different moments: each worker's words have to be as new as the
        wait that is shown of it. Then the first of them to continue would have needed another one to do so before.
        """
        live = [worker for worker in self.workers.values() if worker.is_live]
        return len(live) > 0 and all(
            worker.wait is not None
            and worker.wait.kind != at.FOR_WORD
            and not worker.threaded
            and self._needs_somebody(worker.wait)
            for worker in live
        )

    def waits_for_newcomers(self) -> tuple[tuple[int, int], ...] | None:
        """Returns the waits of all but those in dead ones' places that have been in no round yet, if those are needed.

        Each as a worker and its wait's number. None: another one can continue, or all wait for each other: what is
        known of different workers may be of different moments. A round whose members are decided (stage 1) needs no
        newcomer, whatever its table says of it.
        """
        live = [worker for worker in self.workers.values() if worker.is_live]
        new = {worker.worker_id for worker in live if self._is_new(worker)}
        waits = {worker.worker_id: worker.wait for worker in live if worker.worker_id not in new}
        needed = [
            (worker_id, wait.sequence, not new.isdisjoint(self.missing(wait)) and not _is_decided(wait))
            for worker_id, wait in waits.items()
            if wait is not None and self._needs_somebody(wait)
        ]
        if len(needed) < len(waits) or (waits and not any(for_new for *_, for_new in needed)):
            return None
        return tuple((worker_id, sequence) for worker_id, sequence, _ in needed)

    def _is_new(self, worker: WorkerState) -> bool:
        places = (table.members.get(worker.worker_id) for table in self.tables.values())
        return worker.incarnation > 0 and not any(place is not None and place.has_begun for place in places)

    def _needs_somebody(self, wait: Wait) -> bool:
        """Returns whether a wait is for what live workers have not done, and not for what is on its way from them."""
        table = self.tables.get(wait.table)
        if wait.kind != at.FOR_CLOCK or table is None:
            return bool(self.missing(wait))
        return any(
            self._has_not_ticked(i, member, wait.target)
            for i, member in table.members.items()
            if i in self.workers and self.workers[i].is_live
        )

    def _has_not_ticked(self, worker_id: int, member: WorkerProgress, target: int) -> bool:
        """Returns whether a worker's clock is known to be lower than that, wherever it is."""
        if self.workers[worker_id].host == self.here:
            return member.clock < target
        return 0 < member.reached <= target

    def given_up(self, worker_id: int) -> bool:
        """Returns whether another worker has ended a deadlock that this worker, still waiting, is part of."""
        wait = self.workers[worker_id].wait
        return wait is not None and any(
            worker.gave_up_ns > wait.since_ns for i, worker in self.workers.items() if i != worker_id
        )

    def describe(self, now_ns: int) -> list[str]:
        """Returns a line for each worker: what it waits for, for whom, since when."""
        lines = []
        for worker in self.workers.values():
            again = ", in the place of one that died" if worker.incarnation else ""
            who = f"worker {worker.worker_id} ({worker.process}{again})"
            if worker.liveness == at.LOST:
                lines.append(f"{who} is lost")
            elif worker.has_left:
                lines.append(f"{who} has left")
            elif worker.wait is None:
                lines.append(f"{who} is not waiting")
            else:
                seconds = (now_ns - worker.wait.since_ns) / 1e9
                missing = self.missing(worker.wait)
                for_whom = f", which needs {names(missing)}" if missing else ""
                lines.append(f"{who} has waited {seconds:.1f} s for {self.name_of(worker.wait)}{for_whom}")
        return lines


def _is_decided(wait: Wait) -> bool:
    return wait.kind == at.FOR_ROUND and wait.stage == 1


def names(worker_ids: list[int]) -> str:
    """Returns "worker 3", or "workers 1, 2"."""
    return f"worker{'s' if len(worker_ids) > 1 else ''} {', '.join(map(str, worker_ids))}"


def read_wait_graph(control: Control, shards: Mapping[int, Shard], memories: Mapping[int, range]) -> WaitGraph:
    """Returns who is there, how far each is, and what each waits for.

    Args:
        control: the job's control segment.
        shards: the tables that this process has mapped, by number.
        memories: the addresses of the shared memories that it has mapped, by number (below 0).
    """
    shards = dict(shards)
    mapped = {**memories, **{number: shard.addresses for number, shard in shards.items()}}
    states = control.workers()
    all_workers = {worker.worker_id: worker for worker in states}
    workers = {worker.worker_id: _resolved(worker, mapped, control.here, all_workers) for worker in states}
    return WaitGraph(workers, {number: shard.progress() for number, shard in shards.items()}, control.here)


def _resolved(
    worker: WorkerState, mapped: Mapping[int, range], here: str, workers: Mapping[int, WorkerState]
) -> WorkerState:
    """Adds what a wait points to: who holds the lock, how far the others are. Another host's memory is not ours."""
    wait = worker.wait
    if wait is not None and wait.kind == at.FOR_WORD:
        holder = workers.get(wait.stage)
        if holder is None:  # the node, or it is free by now
            return worker
        return replace(worker, wait=replace(wait, holder=holder.pid, holder_host=holder.host))
    memory = mapped.get(wait.table) if wait is not None else None
    if wait is None or memory is None or worker.host != here:
        return worker
    return replace(worker, wait=_look_at(wait, memory, here))


def _look_at(wait: Wait, memory: range, here: str) -> Wait:
    if wait.kind == at.FOR_LOCK and 0 <= wait.target < len(memory):
        return replace(wait, holder=owner_pid(memory.start + wait.target) or 0, holder_host=here)
    if wait.kind == at.FOR_REDUCTION and 0 < wait.stage * at.REDUCTION_STRIDE <= len(memory):
        lines = (memory.start + at.REDUCTION_STRIDE * worker for worker in range(wait.stage))
        return replace(wait, phases=tuple(load64(line + at.PHASE) for line in lines))
    return wait
