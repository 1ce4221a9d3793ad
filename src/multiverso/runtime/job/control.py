"""The control segment: who is in the job, how far each is, what each waits for; and each worker's words, as read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from msgspec import Struct

from multiverso.deadline import SLICE_SECONDS, Deadline
from multiverso.layout import words as at
from multiverso.layout.worker_index import WorkerIndex
from multiverso.memory import mutex
from multiverso.memory.segment import Segment
from multiverso.memory.words import bump_and_wake, load32, load64, store32, store64


class Wait(Struct, frozen=True):
    """A worker's wait.

    Attributes:
        kind, table, stage, target: see ``layout/words.py``.
        sequence: another one for each wait.
        since_ns: when it began, on CLOCK_MONOTONIC.
        holder: of a lock or a word: the process that holds it now; 0 for none.
        holder_host: the name of its host, in a job on several.
        phases: of a reduction: how far workers 0, 1, ... are.
    """

    kind: int
    sequence: int
    table: int
    stage: int
    target: int
    since_ns: int
    holder: int = 0
    holder_host: str = ""
    phases: tuple[int, ...] = ()

    @property
    def is_for_lock(self) -> bool:
        """Whether a process has something that it will give back by itself."""
        return self.kind in (at.FOR_LOCK, at.FOR_WORD)


class WorkerState(Struct, frozen=True):
    """The contents of one worker's block of the control segment."""

    worker_id: int
    pid: int
    liveness: int
    participation: int
    barrier: int
    created: int
    threaded: bool
    gave_up_ns: int
    wait: Wait | None
    host: str = ""
    life: int = 0
    incarnation: int = 0

    @property
    def owner(self) -> int:
        """A number that no other session of this worker's number has: its process's may be given out again."""
        return self.life << 32 | self.pid

    @property
    def process(self) -> str:
        """Its pid, and where that is in a job on several hosts."""
        return f"pid {self.pid} on {self.host}" if self.host else f"pid {self.pid}"

    @property
    def has_left(self) -> bool:
        """Whether it has left in order, by its own word or its node's."""
        return self.participation == at.LEFT or self.liveness == at.GONE

    @property
    def is_live(self) -> bool:
        """Alive and not left: others wait for it."""
        return self.liveness == at.ALIVE and self.participation == at.ACTIVE


_READS = 10


@dataclass(frozen=True)
class Control:
    """A mapped control segment. The node writes who is alive, each worker the rest of its block.

    Attributes:
        segment: the memory.
        places: in a job on several hosts, the name of each worker's host; otherwise nothing.
        here: the name of this one.
        lost_in_order: the workers that this process has called lost, the first one first (the node's).
    """

    segment: Segment
    places: tuple[str, ...] = ()
    here: str = ""
    lost_in_order: dict[int, None] = field(default_factory=dict, compare=False)

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return self.segment.address

    @functools.cached_property
    def index(self) -> WorkerIndex:
        """Which block is whose."""
        if not self.places:
            return WorkerIndex(load32(self.address + at.CAPACITY))
        return WorkerIndex(len(self.places), tuple(i for i, name in enumerate(self.places) if name == self.here))

    @property
    def capacity(self) -> int:
        """How many workers it has a block for."""
        return self.index.workers

    def block(self, worker_id: int) -> int:
        """Address of a worker's block."""
        return self.address + at.worker_block(self.index.of(worker_id))

    def initialise(self, capacity: int) -> None:
        """Writes the header into zeroed memory (the node, once)."""
        store32(self.address + at.CAPACITY, capacity)
        store32(self.address + at.NODE_BLOCK, self.index.here)
        store32(self.address + at.CAPACITY, self.index.count)
        mutex.initialise(self.address + at.NODE_LIFE)
        node = self.block(capacity)  # as a worker that changes tables, for other hosts
        store64(node + at.ATTACHMENT, 1)
        store32(node + at.LIVENESS, at.ALIVE)

    def continue_without_lost(self, do: bool) -> None:
        """Sets whether waits continue without lost workers (the node, before the first worker may begin)."""
        store32(self.address + at.CONTINUE_WITHOUT_LOST, int(do))

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """The workers of this host."""
        return tuple(range(self.capacity)) if self.index.local is None else self.index.local

    @property
    def continues(self) -> bool:
        """Whether waits continue without lost workers."""
        return load32(self.address + at.CONTINUE_WITHOUT_LOST) == 1

    def span_hosts(self) -> None:
        """Marks the job as one on several hosts: no barrier ends before the node releases it (the node, once)."""
        store32(self.address + at.SPANS_HOSTS, 1)

    def release(self, barrier: int) -> None:
        """Lets workers pass the barriers up to this one (the node)."""
        store64(self.address + at.RELEASED, barrier)
        self.notify()

    @property
    def released(self) -> int:
        """The last barrier that the node has let workers pass, in a job on several hosts."""
        return load64(self.address + at.RELEASED)

    def note_gathered(self, number: int) -> None:
        """Publishes that what other hosts had not sent yet is here (the node)."""
        store64(self.address + at.GATHERED, number)

    @property
    def gathered(self) -> int:
        """The last gathering that is done."""
        return load64(self.address + at.GATHERED)

    def admit(self, worker_id: int, pid: int) -> None:
        """Gives a block to a new worker (the node)."""
        self.lost_in_order.pop(worker_id, None)
        block = self.block(worker_id)
        life = load64(block + at.ATTACHMENT) % 255 + 1
        for offset in range(at.LIVENESS, at.WORKER_STRIDE, 8):
            store64(block + offset, 0)
        store64(block + at.ATTACHMENT, life)
        mutex.initialise(block + at.LIFE)
        store32(block + at.PID, pid)
        store32(block + at.LIVENESS, at.ALIVE)

    def admit_again(self, worker_id: int, pid: int) -> None:
        """Gives a block back to a worker that has withdrawn (the node).

        It has done nothing, and has been live all the while for its waiters.
        """
        store32(self.block(worker_id) + at.PID, pid)

    def node_is_lost(self) -> None:
        """Publishes that the node will never release what it holds (any worker, which has seen it).

        Not as lost: on several hosts waits look for lost workers in all blocks, its own among them.
        """
        store32(self.block(self.capacity) + at.LIVENESS, at.GONE)

    def lost(self) -> list[int]:
        """Returns the workers that died, or exited without ``shutdown()``, the first one first (the node)."""
        return [worker_id for worker_id in tuple(self.lost_in_order) if self.liveness(worker_id) == at.LOST]

    def missed(self) -> list[int]:
        """Returns the same, where the others do not continue without them: what needs all fails (the node)."""
        return [] if self.continues else self.lost()

    def settle(self, worker_id: int, liveness: int) -> None:
        """Marks a worker as lost or gone, and wakes all waiters (the node)."""
        if liveness == at.LOST:
            self.lost_in_order.setdefault(worker_id)  # before it is seen, and others end because of it
        store32(self.block(worker_id) + at.LIVENESS, liveness)
        self.notify()

    def settle_without_node(self, worker_id: int) -> None:
        """Marks a worker as lost if it does not hold its life lock (any worker, once the node is gone)."""
        if not 0 <= worker_id < self.capacity or self.liveness(worker_id) != at.ALIVE:
            return
        life = self.block(worker_id) + at.LIFE
        code = mutex.try_lock(life)
        if code in (0, mutex.OWNER_DEAD):
            mutex.recover(life)
            mutex.unlock(life)
            self.settle(worker_id, at.LOST)

    def activate(self, worker_id: int, joins_late: bool, incarnation: int = 0) -> None:
        """Marks this worker as taking part, and says how many processes had its number before (the worker).

        A latecomer counts as having reached the barriers that the others have reached. Once it is seen as
        active no barrier completes without it, so the number is read again until it no longer moves.
        """
        block = self.block(worker_id)
        store32(block + at.INCARNATION, incarnation)
        store32(block + at.PARTICIPATION, at.ACTIVE)
        while joins_late:
            reached = max((w.barrier for w in self.workers() if w.is_live), default=0)
            if load64(block + at.BARRIER) >= reached:
                break
            store64(block + at.PASSED, reached)
            store64(block + at.BARRIER, reached)
        self.notify()

    def reach(self, worker_id: int, barrier: int) -> None:
        """Marks this worker as having reached a barrier, without waiting there (the worker)."""
        address = self.block(worker_id) + at.BARRIER
        store64(address, max(barrier, load64(address)))
        self.notify()

    def pass_to(self, worker_id: int, barrier: int) -> None:
        """Marks this worker as past a barrier in which it was not (the worker)."""
        store64(self.block(worker_id) + at.PASSED, barrier)
        self.reach(worker_id, barrier)

    def leave(self, worker_id: int) -> None:
        """Marks this worker as having left (the worker)."""
        store32(self.block(worker_id) + at.PARTICIPATION, at.LEFT)
        self.notify()

    def notify(self) -> None:
        """Wakes every waiter of the job to look again."""
        bump_and_wake(self.address + at.EVENT)

    def look_at(self, worker_id: int, deadline: Deadline) -> None:
        """Publishes a deadline that is nearer than a slice, so that this worker's next wait ends in time (the worker).

        Of several threads' deadlines the last one counts; the others are looked at when their slices are over.
        """
        if deadline.left() < SLICE_SECONDS:
            store64(self.block(worker_id) + at.LOOK_AT, math.ceil(deadline.at * 1e9))

    def give_up(self, worker_id: int, now_ns: int) -> None:
        """Marks this worker as one that ends a wait because of a deadlock (the worker)."""
        store64(self.block(worker_id) + at.GAVE_UP, now_ns)
        self.notify()

    def note_checkpoint(self, worker_id: int, word: int) -> None:
        """Publishes what this worker has handed over of a checkpoint (the worker)."""
        store64(self.block(worker_id) + at.CHECKPOINT, word)

    def checkpoint(self, worker_id: int) -> int:
        """What a worker says of it."""
        return load64(self.block(worker_id) + at.CHECKPOINT)

    def liveness(self, worker_id: int) -> int:
        """What the node says of a worker."""
        return load32(self.block(worker_id) + at.LIVENESS)

    def participation(self, worker_id: int) -> int:
        """What a worker says of itself."""
        return load32(self.block(worker_id) + at.PARTICIPATION)

    def worker(self, worker_id: int) -> WorkerState:
        """Everything in a worker's block."""
        block = self.block(worker_id)
        return WorkerState(
            worker_id=worker_id,
            pid=load32(block + at.PID),
            liveness=load32(block + at.LIVENESS),
            participation=load32(block + at.PARTICIPATION),
            barrier=load64(block + at.BARRIER),
            created=load64(block + at.CREATED),
            threaded=load32(block + at.THREADED) == 1,
            gave_up_ns=load64(block + at.GAVE_UP),
            wait=_wait_in(block, self.index),
            host=self.places[worker_id] if self.places else "",
            life=load64(block + at.ATTACHMENT),
            incarnation=load32(block + at.INCARNATION),
        )

    def workers(self) -> list[WorkerState]:
        """Every worker that has ever been admitted and whose number is not free again."""
        return [w for w in map(self.worker, range(self.capacity)) if w.liveness != at.FREE]

    def live(self) -> list[int]:
        """The numbers of those who are alive and have not left: others wait for them."""
        return list(filter(self.is_live, range(self.capacity)))

    def is_live(self, worker_id: int) -> bool:
        """Whether a worker is alive and has not left."""
        return self.liveness(worker_id) == at.ALIVE and self.participation(worker_id) == at.ACTIVE

    def waited_seconds(self, worker_id: int) -> float:
        """Returns the seconds that a worker has spent in finished waits of every kind."""
        return load64(self.block(worker_id) + at.WAITED_NS) / 1e9


def _wait_in(block: int, index: WorkerIndex) -> Wait | None:
    """Returns what a worker says that it waits for; None too when that changes all the while."""
    for _ in range(_READS):
        sequence = load32(block + at.WAIT_SEQ)
        kind = load32(block + at.WAIT_KIND)
        if kind == at.NOT_WAITING:
            return None
        stage = load32(block + at.WAIT_STAGE)
        wait = Wait(
            kind,
            sequence,
            load32(block + at.WAIT_TABLE),
            index.number_of(stage) if kind == at.FOR_WORD else stage,
            load64(block + at.WAIT_TARGET),
            load64(block + at.WAIT_SINCE),
        )
        if sequence % 2 == 0 and load32(block + at.WAIT_SEQ) == sequence:
            return wait
    return None
