"""The workers of one start on a Ray cluster: started, waited for, and replaced, by themselves or with their host.

A line of progress is written now and then, from what the job's first node knows of all workers.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from multiverso.errors import StartupError, WorkerLostError
from multiverso.launch.job import OnFailure
from multiverso.launch.outcomes import Failed, read_answer
from multiverso.launch.restart_policy import Replacements
from multiverso.launch.results import WorkerExit
from multiverso.ray.nodes import START_SECONDS, Nodes, asked
from multiverso.ray.placement import Placement
from multiverso.ray.workers import Worker
from multiverso.saying import say

_EVERY_SECONDS = 10.0
_MOST_VALUES = 4


class Progress:
    """Owner: the thread that waits for the workers."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()
        self._last = ""

    def show(self, status: dict[str, Any]) -> None:
        """Writes a line to standard error if something has changed, every ten seconds at most."""
        now = time.monotonic()
        if now - self._said_at < _EVERY_SECONDS:
            return
        line = line_of(status)
        if line != self._last:
            say(line)
        self._said_at, self._last = now, line


def line_of(status: dict[str, Any]) -> str:
    """Returns a job's progress in a line: who works, who waits, what was done, what workers have logged."""
    workers = status["workers"]
    states = [worker["state"] for worker in workers]
    hosts = {worker["host"] for worker in workers if worker["state"] == "alive"}
    parts = [f"{states.count('alive')} of {status['workers_num'] or len(workers)} workers"]
    if len(hosts) > 1:
        parts[0] += f" on {len(hosts)} hosts"
    for state, words in (("left", "done"), ("lost", "lost")):
        if state in states:
            parts.append(f"{states.count(state)} {words}")
    waiting = [worker["id"] for worker in workers if worker["waiting_seconds"] > 1]
    if waiting:
        parts.append(f"{len(waiting)} waiting")
    pushes = sum(line["adds"] + line["exchanges"] for table in status["tables"] for line in table["workers"].values())
    parts.append(f"{pushes:g} pushes")
    logged = [worker["logged"] for worker in workers if worker["logged"]]
    if logged:
        latest = max(logged, key=lambda note: note["step"])
        values = list(latest["values"].items())[-_MOST_VALUES:]
        parts.append(f"step {latest['step']}: " + " ".join(f"{name} {value:.4g}" for name, value in values))
    return ", ".join(parts)


_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 2.0
_MOST_WORDS = 600  # characters of what Ray says
# From the first failure on: Ray tells of a killed process after one to four seconds, of a silent host after a minute.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class JobSpec:
    """The arguments of a job.

    Attributes:
        call: what each does, as `multiverso.launch.outcomes.write_call` writes it.
        resources: what Ray sets aside for each.
        on_failure: whether the others continue without one that fails.
        environ: what they find in their environment.
        replace: how many workers that fail, and how many hosts that are lost, are started again.
        until: when all of it has to be over.
        progress: shows how it fares, if that is wanted.
    """

    call: bytes
    resources: dict[str, float]
    on_failure: OnFailure
    environ: Mapping[str, str]
    replace: int
    until: float
    progress: Progress | None


@dataclass
class _HostState:
    """One host.

    Attributes:
        number: its own.
        name: what errors call it.
        began: when its node did, the last time.
        lost: it does not return, or not yet.
        due: when its node is started again.
        coming: the answer of its node that takes a lost one's place.
        entering: the first host's node still shows it as lost.
    """

    number: int
    name: str
    began: float = field(default_factory=time.monotonic)
    lost: bool = False
    due: float | None = None
    coming: Any = None
    entering: bool = False


@dataclass
class _WorkerState:
    """One worker. What Ray was asked for is a reference of the answer, and None when nothing is waited for.

    Attributes:
        number: its own.
        host: where it is.
        actor: its process.
        pid: that process's number; ``new_pid``: the answer, where it was started again.
        began: when the function was called in it, the last time.
        call: the function's answer.
        question: whether another may take its place.
        outcome: what the function has returned, or how it failed.
        due: when it is started again.
        unseen: the first host's node still shows the dead one in whose place it is.
        over: it has failed, and is not started again.
        silent_since: when the node that calls it lost did so first.
    """

    number: int
    host: _HostState
    actor: Any = None
    pid: int = 0
    new_pid: Any = None
    began: float = 0.0
    call: Any = None
    question: Any = None
    outcome: Any = None
    due: float | None = None
    unseen: bool = False
    over: bool = False
    silent_since: float | None = None

    def __str__(self) -> str:
        return f"Worker {self.number} (pid {self.pid})"

    def exit(self, code: int, signal: str | None, by_us: bool) -> WorkerExit:
        """Returns how its process has ended."""
        return WorkerExit(self.number, self.pid, code, signal, by_us, time.monotonic() - self.began)

    def kill(self) -> None:
        """Ends its process, if that is there."""
        with contextlib.suppress(Exception):
            ray.kill(self.actor)

    @property
    def is_unfinished(self) -> bool:
        """Whether it has failed, and may be started again."""
        return isinstance(self.outcome, Failed) and not self.over


class Job:
    """The workers of one start. Owner: the thread that runs it.

    A worker that has failed asks its node whether something is left to do for another one. If the node is not there to
    answer, or the first host's node has lost it, the host is lost with all its workers: its node begins again where Ray
    has room for the host, takes the tables' values, and then its workers are started.
    """

    def __init__(self, spec: JobSpec, nodes: Nodes, placement: Placement) -> None:
        self._spec, self._nodes, self._placement = spec, nodes, placement
        self._replacements = Replacements(spec.replace)
        self._hosts_again = Replacements(spec.replace)
        self._environ: Mapping[str, str] = {}
        self._hosts = [_HostState(number, host.name) for number, host in enumerate(nodes.hosts)]
        self._workers = [
            _WorkerState(number, self._hosts[nodes.number_of(number)]) for number in range(len(placement.places))
        ]
        self._ends = spec.until
        self._call: Any = None
        self._status: Any = None

    def start(self, environ: Mapping[str, str]) -> None:
        """Starts the workers and calls the function in them.

        Args:
            environ: what they find in their environment beside what was asked for.
        """
        self._environ = {**self._spec.environ, **environ}
        for worker in self._workers:
            self._place(worker)
        answers = [worker.actor.pid.remote() for worker in self._workers]
        pids = asked("a worker cannot begin", lambda: ray.get(answers, timeout=START_SECONDS))
        self._call = ray.put(self._spec.call)
        for worker, pid in zip(self._workers, pids, strict=True):
            worker.pid = pid
            self._begin(worker)

    def _place(self, worker: _WorkerState) -> None:
        """Starts a worker's process where Ray has set aside room for it."""
        resources = dict(self._spec.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": self._placement.places[worker.number],
        }
        worker.actor = ray.remote(Worker).options(**options).remote(worker.number)

    def _begin(self, worker: _WorkerState) -> None:
        """Calls the function in it."""
        environ = {**self._environ, **self._nodes.environ(worker.number)}
        worker.began, worker.silent_since = time.monotonic(), None
        worker.call = worker.actor.call.remote(environ, self._call)

    def _begin_again(self, worker: _WorkerState) -> None:
        self._place(worker)
        worker.new_pid = worker.actor.pid.remote()
        worker.unseen = True
        self._status = None  # what was asked before that may not know of the death yet
        self._begin(worker)

    def finish(self) -> list[Any]:
        """Waits for all workers, or until one's failure ends the job, or the time is over."""
        while time.monotonic() < self._ends and any(
            worker.call is not None or worker.question is not None or worker.due is not None for worker in self._workers
        ):
            self._start_due()
            waited: dict[Any, Callable[[Any], None]] = {}
            for worker in self._workers:
                waited |= {worker.call: partial(self._ended, worker), worker.question: partial(self._answered, worker)}
            for host in self._hosts:
                waited[host.coming] = partial(self._came, host)
            waited.pop(None, None)
            if not waited:
                time.sleep(_LOOK_SECONDS)
                continue
            for reference in ray.wait(list(waited), timeout=_LOOK_SECONDS)[0]:  # one at most
                waited[reference](reference)
            self._look()
        for worker in self._workers:
            if worker.call is not None:
                self._fail(worker, f"{worker} on {worker.host.name} had not ended and was ended.", by_us=True)
        return [worker.outcome for worker in self._workers]

    def end(self) -> None:
        """Ends all workers."""
        for worker in self._workers:
            worker.kill()

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.due is not None and worker.due <= now:
                worker.due = None
                self._begin_again(worker)
            if worker.new_pid is not None and ray.wait([worker.new_pid], timeout=0)[0]:
                answer, worker.new_pid = worker.new_pid, None
                with contextlib.suppress(ray.exceptions.RayError):
                    worker.pid = ray.get(answer)
        for host in self._hosts:
            if host.due is not None and host.due <= now:
                host.due, host.began = None, now
                host.coming = self._nodes.begin_again(host.number)

    # -- a worker has ended ----------------------------------------------------------------------------------

    def _ended(self, worker: _WorkerState, reference: Any) -> None:
        worker.call = None
        try:
            answer = io.BytesIO(ray.get(reference))
            worker.outcome = read_answer(answer, worker.exit(0, None, by_us=False))
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:_MOST_WORDS]
            self._fail(worker, f"{worker} on {worker.host.name} died. Ray says: {why}", by_us=False)
        if not isinstance(worker.outcome, Failed):
            return
        worker.kill()  # the process stays, and with it what tells the others that it lives
        if self._spec.replace:
            worker.question = self._nodes.ask_replaced(worker.number)
        else:
            self._nodes.absent(worker.number)
        if self._spec.on_failure == "stop":
            self._ends = min(self._ends, time.monotonic() + _GRACE_SECONDS)

    def _answered(self, worker: _WorkerState, reference: Any) -> None:
        """A worker's node has said whether another may take its place, or is not there any more."""
        worker.question = None
        try:
            may_be = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:  # it may be again
            worker.question = self._nodes.ask_replaced(worker.number)
            time.sleep(_LOOK_SECONDS)
            return
        except ray.exceptions.RayError:
            may_be = None
        if may_be is None:
            self._lose(worker.host, "its node has ended")
            return
        seconds = self._replacements.after(worker.outcome.end) if may_be else None
        if seconds is None:
            worker.over = True
            self._nodes.absent(worker.number)
            return
        worker.due = time.monotonic() + seconds
        say(f"{worker} failed; it is started again ({self._replacements}).")

    def _fail(self, worker: _WorkerState, text: str, by_us: bool) -> None:
        signal = None if by_us else "SIGKILL"  # so that it is told before those who only noticed
        worker.call = None
        worker.outcome = Failed(WorkerLostError(text, [worker.number]), worker.exit(1, signal, by_us))

    # -- a host is lost --------------------------------------------------------------------------------------

    def _lose(self, host: _HostState, why: str) -> None:
        """A host's workers are no longer waited for; another host takes its place, if it may."""
        if host.lost:
            return
        host.lost, host.entering = True, False
        for worker in self._on(host):
            worker.kill()
            worker.due = worker.new_pid = worker.question = None
            if worker.call is not None:
                self._fail(worker, f"{worker} is lost with its host: {host.name}: {why}.", by_us=False)
        if self._hosts[0].lost:
            return  # the job is over
        if any(worker.is_unfinished for worker in self._on(host)):
            self._replace(host, why)

    def _on(self, host: _HostState) -> list[_WorkerState]:
        return [worker for worker in self._workers if worker.host is host]

    def _replace(self, host: _HostState, why: str) -> None:
        """Another host takes a lost one's place, unless there have been as many as there may be."""
        end = WorkerExit(host.number, 0, 1, "SIGKILL", False, time.monotonic() - host.began)
        seconds = self._hosts_again.after(end)
        if seconds is not None:
            host.due = time.monotonic() + seconds
            say(f"{host.name} is lost ({why}); it is started again where Ray has room for it ({self._hosts_again}).")
        elif self._hosts_again.most:
            say(f"{host.name} is lost ({why}), and is not replaced: it was replaced as often as it may be.")

    def _came(self, host: _HostState, reference: Any) -> None:
        """A node takes a lost one's place, or cannot."""
        host.coming = None
        try:
            address = asked("a lost host's place cannot be taken", lambda: ray.get(reference))
        except StartupError as error:
            if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                say(f"{host.name} is not replaced: {error}")
            elif self._nodes.never_ran(host.number):  # Ray had not noticed yet that its place is gone
                host.due = time.monotonic() + _AGAIN_SECONDS
            else:
                self._replace(host, "its node died while it began")
            return
        self._nodes.begun(host.number, str(address))
        host.lost, host.entering = False, True
        self._status = None  # what was asked before that knows nothing of it
        for worker in self._on(host):
            if worker.is_unfinished:
                self._begin_again(worker)
            else:
                self._nodes.absent(worker.number)

    def _look(self) -> None:
        """Asks the first node how the job fares: workers on a lost host do not answer, and Ray notices late."""
        if self._status is None:
            self._status = self._nodes.ask_status()
        if not ray.wait([self._status], timeout=0)[0]:
            return
        answer, self._status = self._status, None
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(answer)
            if self._spec.progress is not None:
                self._spec.progress.show(status)
            if self._spec.on_failure == "continue":
                self._note(status)

    def _note(self, status: Mapping[str, Any]) -> None:
        """Takes note of who is lost."""
        for host in self._hosts:
            lost = host.name in status["lost_hosts"]
            host.entering = host.entering and lost
            if lost and not host.entering:
                self._lose(host, "it does not answer")
        for worker in self._workers:
            lost = worker.number in status["lost"]
            worker.unseen = worker.unseen and lost
            if worker.call is None or not lost or worker.unseen:
                continue
            # its last answer may still be on its way
            worker.silent_since = worker.silent_since or time.monotonic()
            if time.monotonic() - worker.silent_since > _GRACE_SECONDS:
                self._fail(worker, f"{worker} on {worker.host.name} is lost, and does not answer.", by_us=False)
