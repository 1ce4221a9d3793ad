"""The members of a job: gives out numbers and takes them back, starts all together, and begins new runs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from multiverso.errors import MultiversoError, StartupError
from multiverso.layout import words as at
from multiverso.memory import mutex
from multiverso.memory.heap import Heap
from multiverso.memory.segment import Segment
from multiverso.node_log import log
from multiverso.runtime.job.control import Control
from multiverso.runtime.job.options import begun_twice, differ, too_late
from multiverso.runtime.job.processes import ancestors
from multiverso.runtime.job.wait_graph import names
from multiverso.runtime.node.catalogue import Catalogue
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.deaths import Deaths
from multiverso.runtime.node.numbers import Numbers
from multiverso.runtime.node.one_host import Hosts
from multiverso.runtime.node.refusals import lost_error
from multiverso.wire import messages
from multiverso.wire.messages import Message
from multiverso.wire.requests import Attach, Ready, Withdraw

_ELASTIC_CAPACITY = at.MAX_WORKERS


class JobMemory:
    """A fresh control segment and no tables. Owner: the node's thread.

    Args:
        workers_num: how many workers the job has; None for any number that come and go.
        continues: whether the others continue without a lost worker, unless the workers say otherwise.
        hosts: those of the job, which begin with this memory.

    Attributes:
        control: the control segment.
        catalogue: the tables.
        creations: those in the making.
        heap: the memory that all of it lies in.
    """

    def __init__(self, workers_num: int | None, continues: bool, hosts: Hosts) -> None:
        capacity = workers_num or _ELASTIC_CAPACITY
        self.heap = Heap("job")
        try:
            size = at.control_bytes(capacity)
            segment = Segment(self.heap.descriptor, self.heap.reserve(size, "a job's control segment"), size)
            self.control = Control(segment, *hosts.places)
            self.control.initialise(capacity)
            self.control.continue_without_lost(continues)
            self.catalogue = catalogue = Catalogue(self.control, self.heap)
            self.creations = hosts.begin(self.control, catalogue, workers_num is not None)
        except BaseException:
            self.heap.close()
            raise

    def hold(self) -> None:
        """Takes the mutex that says that the node lives: its thread's end is the node's death."""
        mutex.lock(self.control.address + at.NODE_LIFE, 1.0)

    def close(self) -> None:
        """Frees the memory; those that still wait in it see that the node is gone."""
        self.heap.close()
        if mutex.is_ours(self.control.address + at.NODE_LIFE):
            mutex.unlock(self.control.address + at.NODE_LIFE)


BARRIERS = (0, "barriers")  # beside the tables, whose numbers begin at 1


def unequal(rounds: Mapping[tuple[int, str], Mapping[int, int]]) -> list[str]:
    """Returns a line for each table in which workers have ended after different numbers of rounds, or of barriers.

    Args:
        rounds: how many each worker had been in when it left, by the table's number and name; of barriers: `BARRIERS`.
    """
    lines = []
    for key, ended in rounds.items():
        if len(set(ended.values())) > 1:
            by_number: dict[int, list[int]] = {}
            for worker, number in sorted(ended.items()):
                by_number.setdefault(number, []).append(worker)
            said = ", ".join(f"{names(workers)} after {number}" for number, workers in sorted(by_number.items()))
            if key == BARRIERS:
                lines.append(
                    f"workers ended after different numbers of barriers ({said}), so one of them has waited at another "
                    "line than the others, or for nobody. Every worker has to call every barrier: none belongs in "
                    "`if mv.is_master_worker():`. If one has left early on purpose, all is well"
                )
                continue
            lines.append(
                f"{key[1]}: workers ended after different numbers of rounds ({said}). If a worker has skipped a step, "
                "the rounds after it put together different steps; if it only had less data, all is well. Equal parts: "
                "multiverso.shard(equal=True)"
            )
    return lines


class Membership:
    """The members of a job on this host, and the memory of this run of it.

    In a job of a fixed number of workers a run ends when all have left: one that comes then finds fresh
    memory and no tables. Owner: the node's thread; requests that cannot be granted raise what the worker is to get.

    Args:
        workers_num: how many workers the job has; None for any number that come and go.
        on_lost: ``"stop"`` or ``"continue"``, unless the workers say otherwise.
        deaths: watches the workers: `settle` one when it says so, and tell `process_ended` of a process's end.
        hosts: those of the job.

    Attributes:
        attached: the processes of the workers that are there, by number.
        had_workers: whether one has come in this run.
        memory, control, catalogue, creations: of this run, see `JobMemory`.
    """

    def __init__(self, workers_num: int | None, on_lost: str, deaths: Deaths, hosts: Hosts) -> None:
        self.workers_num = workers_num
        self._incarnations: dict[int, int] = {}  # how often a number has got a new process
        self.attached: dict[int, Connection] = {}
        self.had_workers = False
        self._on_lost = on_lost
        self._deaths = deaths
        # workers that died in a run that was over before others came for them
        self._missed: set[int] = set()
        self._hosts = hosts
        self._lives = 0
        self._waiting_ready: list[tuple[Connection, Ready]] = []
        self._waiting_attach: list[tuple[Connection, Attach]] = []
        self._begin()

    def _begin(self) -> None:
        """A new run: fresh control segment, no tables."""
        self.memory = memory = JobMemory(self.workers_num, self._on_lost == "continue", self._hosts)
        self.control, self.catalogue, self.creations = memory.control, memory.catalogue, memory.creations
        self._numbers = Numbers(
            self.control, self.catalogue, self.attached, self.workers_num is not None, self._hosts.replaces
        )
        self._incarnations.clear()
        self._rounds: dict[tuple[int, str], dict[int, int]] = {}  # of each table, of those who have left
        self._leaving: set[int] = set()  # who leaves, and asks what there is to be said
        self._options: Message | None = None
        self._refused: StartupError | None = None  # why this host's workers cannot take part
        self._agreed = False  # whether all hosts' first workers have come with the same options

    def _restart(self) -> None:
        """Begins a new run with fresh memory: all workers have left, and call `init` again."""
        old = self.memory
        if self._hosts.replaces:
            self._missed |= set(self.control.lost()) - self._hosts.ended
        old.catalogue.end_reading()
        self._begin()
        self.had_workers = False
        self.memory.hold()
        old.close()
        for worker_id in self._hosts.ended:
            self._mark_absent(worker_id)

    def end(self) -> None:
        """Frees the memory, and marks the node as gone for those that still wait in it."""
        left = [i for i in self.attached if self.control.participation(i) == at.LEFT]
        if len(left) == len(self.attached):  # who has left may not have been settled yet
            for worker_id in left:
                self._note_rounds(worker_id)
            self._tell_rounds()
        self.memory.close()
        self.control.notify()
        self.attached.clear()

    @property
    def mode(self) -> str:
        """The name of the consistency that the workers have asked for."""
        return str(self._options["consistency"]["mode"]) if self._options else "async"

    # -- coming ----------------------------------------------------------------------------------------------

    def attach(self, connection: Connection, request: Attach) -> None:
        """Gives a worker its number, or lets it wait until the last run has ended."""
        if request.protocol != messages.PROTOCOL:
            raise StartupError(
                f"this worker speaks protocol {request.protocol}, the job's node {messages.PROTOCOL}: "
                "use one version of multiverso in all workers"
            )
        options = {"consistency": msgspec.to_builtins(request.consistency), "on_lost": request.on_lost or self._on_lost}
        wish, number = request.worker_id, request.workers_num
        if self.workers_num is not None and number not in (None, self.workers_num):
            raise StartupError(f"this worker expects {number} workers, but the job has {self.workers_num}")
        if wish is not None and not 0 <= wish < self.control.capacity:
            raise StartupError(f"worker_id {wish} is not in 0 .. {self.control.capacity - 1}")
        if wish is not None and wish not in self.control.local:
            raise StartupError(f"worker {wish} belongs to {self.control.places[wish]}, not to {self.control.here}")
        options |= self._hosts.options_of(request)
        if self._numbers.is_late(wish) or self._hosts.is_entering:
            connection.reply(request.id, {"later": True})
            return
        if wish in self._missed:
            raise too_late(wish)
        if self._is_new_run(wish):
            if self._hosts.several:
                raise begun_twice()
            self._restart()
        worker_id = self._numbers.free(wish)
        if worker_id is None:
            if self.workers_num is not None and self._numbers.is_over(wish):
                if self._hosts.several:  # it would wait for the others to leave, and then get the same error
                    raise begun_twice()
                # it has left, others have not: a new job of the same processes begins when all have
                self._waiting_attach.append((connection, request))
                return
            raise StartupError(self._taken(wish, connection.pid))
        if self._options is None:
            self._options = options
            self.control.continue_without_lost(options["on_lost"] == "continue")
            self._agreed = self._hosts.agree_on(options)
        elif options != self._options:
            raise differ(options, self._options)
        self._admit(connection, request, worker_id)

    def _is_new_run(self, wish: int | None) -> bool:
        """Returns whether all have gone; one that comes after another's death at the start is still of the same run."""
        if self.workers_num is None or self.attached or not self.had_workers:
            return False
        return not self.control.lost() or self._numbers.free(wish) is None

    def _admit(self, connection: Connection, request: Attach, worker_id: int) -> None:
        if self.workers_num is not None and self.control.liveness(worker_id) == at.LOST:  # its place is taken again
            self._incarnations[worker_id] = self._incarnations.get(worker_id, 0) + 1
            self._hosts.ended.discard(worker_id)
        if worker_id in self.attached:
            self.control.admit_again(worker_id, connection.pid)
        else:
            self.catalogue.forget(worker_id)
            self.control.admit(worker_id, connection.pid)
        connection.worker_id, connection.life = worker_id, None
        self.attached[worker_id] = connection
        self._leaving.discard(worker_id)
        self.had_workers = True
        self._deaths.watch_process(worker_id, connection.pid)
        body: Message = {
            "worker_id": worker_id,
            "workers_num": self.workers_num,
            "control": self.control.segment.size,
            "incarnation": self._incarnations.get(worker_id, 0) + self._hosts.times_replaced,
            "job": self._hosts.job,
            "places": self.control.places,
            "here": self.control.here,
        }
        connection.reply(request.id, body, (self.memory.heap.descriptor,))

    def ready(self, connection: Connection, request: Ready) -> None:
        """The worker holds its life lock; it is answered once all are there."""
        worker_id = connection.worker_id
        if worker_id is None or worker_id not in self.attached:
            raise StartupError("attach before ready")
        if self._refused is not None:
            raise self._refused
        self._lives += 1
        # first, as there may be no thread left for it
        self._deaths.watch_life(self.control, worker_id, self._lives)
        connection.life = self._lives
        self._deaths.forget_process(worker_id)  # its life lock reports its end sooner
        self._waiting_ready.append((connection, request))
        self._answer_ready()

    def _answer_ready(self) -> None:
        if lost := self.control.missed():
            self._refuse_ready(lost_error(lost, "while the job was starting"))
        if self._agreed and not self._missing_at_start():
            for connection, request in self._waiting_ready:
                connection.reply(request.id, {"ready": True})
            self._waiting_ready.clear()

    def _missing_at_start(self) -> list[int]:
        """Returns the workers of a fixed-size job that have not come yet."""
        ready = {i for i, worker in self.attached.items() if worker.life is not None}
        ready |= {i for i in self._remote if self.control.participation(i) == at.ACTIVE}
        gone = (at.GONE, at.LOST) if self.control.continues else (at.GONE,)
        return [i for i in range(self.workers_num or 0) if i not in ready and self.control.liveness(i) not in gone]

    @property
    def _remote(self) -> list[int]:
        return [i for i in range(self.control.capacity) if i not in self.control.local]

    # -- going -----------------------------------------------------------------------------------------------

    def withdraw(self, connection: Connection, request: Withdraw) -> None:
        """A worker's `init` was interrupted: it is not lost, as its process may call it again. The others wait on."""
        worker_id = connection.attached_id
        done = self.control.worker(worker_id)
        if self.workers_num is None or done.created or done.barrier:
            raise StartupError("this worker has begun, or may come and go at will: it leaves, or is lost")
        if not self._deaths.watch_process(worker_id, connection.pid):
            raise StartupError(f"process {connection.pid} cannot be watched, so it is lost")
        if connection.life is not None:
            self._deaths.withdraw(connection.life)
        self.forget(connection)
        connection.worker_id = connection.life = None  # but its number is nobody else's yet
        connection.reply(request.id, {"withdrawn": True})

    def has_missed(self, worker_id: int) -> bool:
        """Returns whether a worker died in a job that was over before another process came for it. From any thread."""
        return worker_id in self._missed

    def process_ended(self, worker_id: int, pid: int) -> None:
        """A worker's process has ended: if it had its number and no life lock, that is the only sign of it."""
        worker = self.attached.get(worker_id)
        if worker is not None and worker.pid == pid and worker.life is None:
            self.settle(worker_id, at.LOST)

    def forget(self, connection: Connection) -> None:
        """A process no longer waits for a place or for the start: it gave up, or its socket is closed."""
        self._waiting_attach = [w for w in self._waiting_attach if w[0] is not connection]
        self._waiting_ready = [w for w in self._waiting_ready if w[0] is not connection]
        self._hosts.forget(connection)

    def absent(self, worker_id: int) -> None:
        """A worker's process has ended; if it never attached, the others need not wait for it."""
        self._hosts.ended.add(worker_id)
        if worker_id in self.attached:
            self.process_ended(worker_id, self.attached[worker_id].pid)
        self._mark_absent(worker_id)

    def _mark_absent(self, worker_id: int) -> None:
        if self.control.liveness(worker_id) == at.FREE:
            self.control.settle(worker_id, at.LOST)
            self.creations.dropped(worker_id)
            self._answer_ready()

    def agree(self) -> None:
        """The first workers of this host and of the others have called init with the same arguments."""
        self._agreed = True
        self._answer_ready()

    def refuse(self, options: Message) -> None:
        """The first worker of another host has called init with other arguments."""
        asked, self._options = self._options, options
        assert asked is not None
        self._refused = differ(asked, options)
        self._refuse_ready(self._refused)

    def _refuse_ready(self, error: MultiversoError) -> None:
        for connection, request in self._waiting_ready:
            connection.refuse(request.id, error)
        self._waiting_ready.clear()

    def changed(self, worker_id: int) -> None:
        """A worker of another host has come, left or died."""
        liveness = self.control.liveness(worker_id)
        if liveness in (at.LOST, at.GONE):
            self.creations.dropped(worker_id)
        if liveness == at.GONE:
            self._has_left(worker_id)
        self._answer_ready()

    def _taken(self, wish: int | None, pid: int) -> str:
        """Returns why there is no place for a process, in words."""
        above = [process.pid for process in ancestors(pid)][1:]
        for worker_id, worker in self.attached.items():
            if worker.pid in above:
                return (
                    f"process {pid} is a child of worker {worker_id} (process {worker.pid}), whose place in the job it "
                    "has no part in: use multiverso in the worker alone and give the child what it needs; for a job of "
                    "its own start it without MULTIVERSO_NODE and MULTIVERSO_WORKER_ID in its environment"
                )
        if wish is None:
            return f"the job's {self.control.capacity} places are taken"
        return f"worker {wish} is already there: two processes have the same worker_id"

    def leaving(self, worker_id: int) -> list[str]:
        """A worker of this host is about to leave; returns what its last one is to say, as nobody reads the log.

        On several hosts that is what is known here: news of the last tenth of a second may be missing.
        """
        self._leaving.add(worker_id)
        self._note_rounds(worker_id)
        return unequal(self._rounds) if self._leaving >= self.attached.keys() else []

    def _note_rounds(self, worker_id: int) -> None:
        """A worker leaves: notes how many rounds it was in, and barriers.

        Fewer in some is an uneven last batch, or a step that one of them has skipped: then all rounds after that have
        put together what does not belong together, and nothing else would say so. The same holds for barriers.
        """
        worker = self.control.worker(worker_id)
        if self.workers_num is not None and not self._incarnations and not worker.incarnation:
            self._rounds.setdefault(BARRIERS, {})[worker_id] = worker.barrier  # who comes later begins where others are
        for number, shard in self.catalogue.shards.items() if self.mode == "sync" else ():
            progress = shard.progress()
            mine = progress.members.get(worker_id)
            if mine is not None and mine.first_step <= 1:
                self._rounds.setdefault((number, progress.name), {})[worker_id] = mine.folded // progress.chunks

    def _has_left(self, worker_id: int) -> None:
        """A worker has left: once all have, unequal numbers of rounds, and of barriers, are reported."""
        self._note_rounds(worker_id)
        if not self.attached and not any(self.control.liveness(i) == at.ALIVE for i in range(self.control.capacity)):
            self._tell_rounds()

    def _tell_rounds(self) -> None:
        """The first host's node says what is unequal, unless each host's last worker does."""
        for line in unequal(self._rounds) if self._hosts.leads and not self._leaving else ():
            log(line)
        self._rounds.clear()

    def settle(self, worker_id: int, liveness: int) -> None:
        """A worker has left or is lost: notifies those that wait for it, and admits those that wait for its place."""
        self._deaths.forget_process(worker_id)
        worker = self.attached.pop(worker_id, None)
        if worker is None:
            return
        worker.worker_id = worker.life = None
        self.control.settle(worker_id, liveness)
        if liveness == at.GONE:
            self._has_left(worker_id)
        self.creations.dropped(worker_id)
        self._answer_ready()
        if self._waiting_attach and not self.attached:
            self._restart()
            waiting, self._waiting_attach = self._waiting_attach, []
            for connection, request in waiting:
                try:
                    self.attach(connection, request)
                except MultiversoError as error:
                    connection.refuse(request.id, error)
