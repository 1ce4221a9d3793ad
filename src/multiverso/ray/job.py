"""The workers of one start on a Ray cluster: started, waited for, and replaced, by themselves or with their host."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from multiverso.errors import StartupError, WorkerLostError
from multiverso.launch.job import OnFailure
from multiverso.launch.outcomes import Failed, read_answer
from multiverso.launch.restarting import Replacements
from multiverso.launch.results import WorkerExit
from multiverso.ray.nodes import START_SECONDS, Nodes, asked
from multiverso.ray.progress import Progress
from multiverso.ray.rooms import Rooms
from multiverso.ray.workers import Worker

_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 2.0
_MOST_WORDS = 600  # characters of what Ray says
# From the first failure on: Ray tells of a killed process after one to four seconds, of a silent host after a minute.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Wish:
    """What was asked for.

    Attributes:
        workers: how many.
        call: what each does, as `multiverso.launch.outcomes.write_call` writes it.
        resources: what Ray sets aside for each.
        strategy: how Ray spreads them over hosts.
        on_failure: whether the others go on without one that fails.
        environ: what they find in their environment.
        encrypted: whether hosts encrypt what they send each other.
        replace: how many workers that fail, and how many hosts that are lost, are started again.
        host_grace: seconds without a word of a host until it counts as lost.
        until: when all of it has to be over.
        progress: shows how it fares, if that is wanted.
    """

    workers: int
    call: bytes
    resources: dict[str, float]
    strategy: str
    on_failure: OnFailure
    environ: Mapping[str, str]
    encrypted: bool
    replace: int
    host_grace: float
    until: float
    progress: Progress | None


class Job:
    """The workers of one start. Owner: the thread that runs it.

    A worker that has failed asks its node whether something is left to do for another one. If the node is not there to
    answer, or the first host's node has lost it, the host is lost with all its workers: its node begins anew where Ray
    has room for the host, takes the tables' values, and then its workers are started.
    """

    def __init__(self, wish: Wish, nodes: Nodes, rooms: Rooms) -> None:
        self._wish, self._nodes, self._rooms = wish, nodes, rooms
        self._replacements = Replacements(wish.replace)
        self._hosts_again = Replacements(wish.replace)
        self._environ: Mapping[str, str] = {}
        self._actors: dict[int, Any] = {}
        self._pids: dict[int, int] = {}
        self._outcomes: dict[int, Any] = {}
        self._began: dict[int, float] = {}  # each worker, the last time
        self._hosts_began = dict.fromkeys(range(len(nodes.hosts)), time.monotonic())
        self._call: Any = None
        # what Ray was asked for, by its reference of the answer
        self._pending: dict[Any, int] = {}  # the function's call in each worker
        self._questions: dict[Any, WorkerExit] = {}  # whether another may take its place
        self._coming: dict[Any, int] = {}  # nodes of hosts that take lost ones' places
        self._pid_of: dict[int, Any] = {}  # of workers that are started again
        self._status: Any = None
        # when what has failed is started again
        self._due: dict[int, float] = {}
        self._hosts_due: dict[int, float] = {}
        # what the first host's node does not know yet
        self._unseen: set[int] = set()  # workers in dead ones' places that it still shows as these
        self._entering: set[int] = set()  # hosts that it still shows as lost
        self._lost: set[int] = set()  # hosts that do not come again, or not yet
        self._over: set[int] = set()  # workers that have failed, and are not started again
        self._silent: dict[Any, float] = {}

    def start(self, environ: Mapping[str, str]) -> None:
        """Starts the workers and calls the function in them.

        Args:
            environ: what they find in their environment beside what was asked for.
        """
        self._environ = {**self._wish.environ, **environ}
        for worker_id in range(self._wish.workers):
            self._place(worker_id)
        pids = asked(
            "a worker cannot begin",
            lambda: ray.get([a.pid.remote() for a in self._actors.values()], timeout=START_SECONDS),
        )
        self._pids = dict(enumerate(pids))
        self._call = ray.put(self._wish.call)
        for worker_id in self._actors:
            self._begin(worker_id)

    def _place(self, worker_id: int) -> None:
        """Starts a worker's process where Ray has set aside room for it."""
        resources = dict(self._wish.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": self._rooms.places[worker_id],
        }
        self._actors[worker_id] = ray.remote(Worker).options(**options).remote(worker_id)

    def _begin(self, worker_id: int) -> None:
        """Calls the function in it."""
        environ = {**self._environ, **self._nodes.environ(worker_id)}
        self._began[worker_id] = time.monotonic()
        self._pending[self._actors[worker_id].call.remote(environ, self._call)] = worker_id

    def _begin_again(self, worker_id: int) -> None:
        self._place(worker_id)
        self._pid_of[worker_id] = self._actors[worker_id].pid.remote()
        self._unseen.add(worker_id)
        self._status = None  # what was asked before that may not know of the death yet
        self._begin(worker_id)

    def finish(self) -> list[Any]:
        """Waits for all workers, or until one's failure ends the job, or the time is over."""
        ends = self._wish.until
        while (self._pending or self._questions or self._due) and time.monotonic() < ends:
            self._start_due()
            waited = [*self._pending, *self._questions, *self._coming]
            if not waited:
                time.sleep(_LOOK_SECONDS)
                continue
            for reference in ray.wait(waited, timeout=_LOOK_SECONDS)[0]:
                if reference in self._questions:
                    self._answered(reference)
                elif reference in self._coming:
                    self._came(reference)
                elif reference in self._pending:  # and not given up with its host
                    outcome = self._ended(reference, self._pending.pop(reference))
                    if isinstance(outcome, Failed) and self._wish.on_failure == "stop":
                        ends = min(ends, time.monotonic() + _GRACE_SECONDS)
            self._look()
        for worker_id in self._pending.values():
            where = self._nodes.host_of(worker_id).name
            self._fail(worker_id, f"{self._who(worker_id)} on {where} had not ended and was ended.", by_us=True)
        return [self._outcomes[worker_id] for worker_id in sorted(self._outcomes)]

    def end(self) -> None:
        """Ends all workers."""
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker_id in [worker_id for worker_id, at in self._due.items() if at <= now]:
            del self._due[worker_id]
            self._begin_again(worker_id)
        for host in [host for host, at in self._hosts_due.items() if at <= now]:
            del self._hosts_due[host]
            self._hosts_began[host] = now
            self._coming[self._nodes.begin_again(host)] = host
        for worker_id, answer in list(self._pid_of.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._pid_of[worker_id]
                with contextlib.suppress(ray.exceptions.RayError):
                    self._pids[worker_id] = ray.get(answer)

    # -- a worker has ended ----------------------------------------------------------------------------------

    def _ended(self, reference: Any, worker_id: int) -> Any:
        end = WorkerExit(worker_id, self._pids[worker_id], 0, None, False, time.monotonic() - self._began[worker_id])
        try:
            self._outcomes[worker_id] = read_answer(io.BytesIO(ray.get(reference)), end)
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:_MOST_WORDS]
            where = self._nodes.host_of(worker_id).name
            self._fail(worker_id, f"{self._who(worker_id)} on {where} died. Ray says: {why}", by_us=False)
        outcome = self._outcomes[worker_id]
        if isinstance(outcome, Failed):
            # the process stays, and with it what tells the others that it lives
            with contextlib.suppress(Exception):
                ray.kill(self._actors[worker_id])
            if self._wish.replace:
                self._questions[self._nodes.ask_replaced(worker_id)] = outcome.end
            else:
                self._nodes.absent(worker_id)
        return outcome

    def _answered(self, reference: Any) -> None:
        """A worker's node has said whether another may take its place, or is not there any more."""
        end = self._questions.pop(reference)
        worker_id = end.worker_id
        try:
            may_be = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:  # it may be again
            self._questions[self._nodes.ask_replaced(worker_id)] = end
            time.sleep(_LOOK_SECONDS)
            return
        except ray.exceptions.RayError:
            may_be = None
        if may_be is None:
            self._lose(self._nodes.number_of(worker_id), "its node has ended")
            return
        seconds = self._replacements.after(end) if may_be else None
        if seconds is None:
            self._over.add(worker_id)
            self._nodes.absent(worker_id)
            return
        self._due[worker_id] = time.monotonic() + seconds
        _say(
            f"{self._who(worker_id)} failed; it is started again "
            f"({self._replacements.done} of at most {self._replacements.most} replacements)."
        )

    def _fail(self, worker_id: int, text: str, by_us: bool) -> None:
        signal = None if by_us else "SIGKILL"  # so that it is told before those who only noticed
        end = WorkerExit(worker_id, self._pids[worker_id], 1, signal, by_us, time.monotonic() - self._began[worker_id])
        self._outcomes[worker_id] = Failed(WorkerLostError(text, [worker_id]), end)

    def _who(self, worker_id: int) -> str:
        return f"Worker {worker_id} (pid {self._pids[worker_id]})"

    # -- a host is lost --------------------------------------------------------------------------------------

    def _lose(self, host: int, why: str) -> None:
        """Nobody waits for a host's workers any more; another host takes its place, if it may."""
        if host in self._lost:
            return
        self._lost.add(host)
        self._entering.discard(host)
        workers, name = self._nodes.hosts[host].workers, self._nodes.hosts[host].name
        for worker_id in workers:
            with contextlib.suppress(Exception):
                ray.kill(self._actors[worker_id])
            self._due.pop(worker_id, None)
            self._pid_of.pop(worker_id, None)
        for reference, worker_id in list(self._pending.items()):
            if worker_id in workers:
                del self._pending[reference]
                self._fail(worker_id, f"{self._who(worker_id)} is lost with its host: {name}: {why}.", by_us=False)
        self._questions = {reference: end for reference, end in self._questions.items() if end.worker_id not in workers}
        if 0 in self._lost:
            return  # the job is over
        if any(map(self._is_unfinished, workers)):
            self._replace(host, why)

    def _replace(self, host: int, why: str) -> None:
        """Another host takes a lost one's place, unless there have been as many as there may be."""
        end = WorkerExit(host, 0, 1, "SIGKILL", False, time.monotonic() - self._hosts_began[host])
        name, seconds = self._nodes.hosts[host].name, self._hosts_again.after(end)
        if seconds is None:
            if self._hosts_again.most:
                _say(f"{name} is lost ({why}), and does not come again: it has done so as often as it may.")
            return
        self._hosts_due[host] = time.monotonic() + seconds
        _say(
            f"{name} is lost ({why}); it is started again where Ray has room for it "
            f"({self._hosts_again.done} of at most {self._hosts_again.most} replacements)."
        )

    def _came(self, reference: Any) -> None:
        """A node takes a lost one's place, or cannot."""
        host = self._coming.pop(reference)
        try:
            address = asked("a lost host's place cannot be taken", lambda: ray.get(reference))
        except StartupError as error:
            if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                _say(f"{self._nodes.hosts[host].name} does not come again: {error}")
            elif self._nodes.never_ran(host):  # Ray had not noticed yet that its place is gone
                self._hosts_due[host] = time.monotonic() + _AGAIN_SECONDS
            else:
                self._replace(host, "its node died while it began")
            return
        self._nodes.begun(host, str(address))
        self._lost.discard(host)
        self._entering.add(host)
        self._status = None  # what was asked before that knows nothing of it
        for worker_id in self._nodes.hosts[host].workers:
            if self._is_unfinished(worker_id):
                self._begin_again(worker_id)
            else:
                self._nodes.absent(worker_id)

    def _is_unfinished(self, worker_id: int) -> bool:
        return isinstance(self._outcomes.get(worker_id), Failed) and worker_id not in self._over

    def _look(self) -> None:
        """Asks the first node how the job fares: workers on a lost host do not answer, and Ray notices late."""
        if self._status is None:
            self._status = self._nodes.ask_status()
        if not ray.wait([self._status], timeout=0)[0]:
            return
        answer, self._status = self._status, None
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(answer)
            if self._wish.progress is not None:
                self._wish.progress.show(status)
            if self._wish.on_failure == "continue":
                self._note(status)

    def _note(self, status: Mapping[str, Any]) -> None:
        """Takes note of who is lost."""
        lost = [host for host, known in enumerate(self._nodes.hosts) if known.name in status["lost_hosts"]]
        self._entering &= set(lost)
        for host in lost:
            if host not in self._entering:
                self._lose(host, "it does not answer")
        self._unseen &= set(status["lost"])
        for reference, worker_id in list(self._pending.items()):
            shown = worker_id in status["lost"] and worker_id not in self._unseen
            if shown and self._is_silent(reference):
                del self._pending[reference]
                where = self._nodes.host_of(worker_id).name
                self._fail(worker_id, f"{self._who(worker_id)} on {where} is lost, and does not answer.", by_us=False)

    def _is_silent(self, reference: Any) -> bool:
        """Whether a worker that its node calls lost stays without a word, for the time that its last one may take."""
        since = self._silent.setdefault(reference, time.monotonic())
        return time.monotonic() - since > _GRACE_SECONDS


def _say(text: str) -> None:
    print(f"multiverso: {text}", file=sys.stderr, flush=True)
