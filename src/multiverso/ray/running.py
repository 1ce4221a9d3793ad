"""`multiverso.ray.run(function)`: a function in the workers of one job, anywhere on a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multiverso.errors import NodeLostError, StartupError, WorkerLostError
from multiverso.hosts.exchange import VARIABLES, Exchange
from multiverso.launch.function import check_call
from multiverso.launch.job import OnFailure
from multiverso.launch.outcomes import Failed, conclude, read_answer, write_call
from multiverso.launch.restarting import Replacements
from multiverso.launch.results import WorkerExit
from multiverso.ray.nodes import START_SECONDS, Nodes, asked, hosts_of
from multiverso.ray.progress import Progress
from multiverso.ray.workers import Worker
from multiverso.runtime.restarts import RESTARTS_VARIABLE

_LOOK_SECONDS = 0.5
_MOST_WORDS = 600  # characters of what Ray says
# From the first failure on: Ray tells of a killed process after one to four seconds, of a silent host after a minute.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class _Wish:
    """What was asked for."""

    workers: int
    call: bytes
    resources: dict[str, float]
    strategy: str
    on_failure: OnFailure
    environ: Mapping[str, str]
    encrypted: bool
    replace: int
    until: float
    progress: Progress | None


def run(
    function: Callable[..., Any],
    workers: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    on_failure: OnFailure = "stop",
    env: Mapping[str, str] | None = None,
    *,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    resources_per_worker: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    wire: str | None = None,
    every: float | str | None = None,
    between: str | None = None,
    encrypted: bool = True,
    max_restarts: int = 0,
    replace: int = 0,
    progress: bool | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in each of several workers of one job on a Ray cluster.

    What `multiverso.run` is on one host: the same function, results and exceptions. Ray places the workers and tells of
    their ends; each host that gets one has a node in an actor beside them, and what the workers share stays in the
    hosts' memory and goes from node to node. Blocks until all workers have ended. Connects to the cluster that
    ``RAY_ADDRESS`` or ``ray.init`` names, and starts a local one where there is none.

    Args:
        function: what to call; it may ask `multiverso.worker_id()` who it is.
        workers: how many workers, from 1. Those on one host have neighbouring numbers.
        args: positional arguments, the same for all.
        kwargs: keyword arguments, the same for all.
        timeout_seconds: the longest that the whole call may take; None for no limit.
        on_failure: "stop" ends the others when a worker fails, and raises. "continue" lets them go on without those
            who failed, and without a host that is lost, unless it is the first one.
        env: environment variables to set in the workers.
        cpus_per_worker: processors that Ray sets aside for each.
        gpus_per_worker: GPUs for each; Ray sets CUDA_VISIBLE_DEVICES.
        resources_per_worker: other resources of Ray's, by name.
        strategy: how Ray spreads the workers over hosts: "PACK" (as few hosts as can be), "SPREAD", "STRICT_PACK",
            "STRICT_SPREAD".
        wire: what travels between hosts, as in `init`.
        every: how often, as in `init`.
        between: what is made of it, as in `init`.
        encrypted: whether hosts encrypt what they send each other.
        max_restarts: how often all workers are started again, where Ray then has room, when a worker or a host has died
            (not when the function raises). `multiverso.checkpoint` goes on then from what it has saved, where all hosts
            see that; `multiverso.restarts` says how often that was.
        replace: with on_failure="continue": how many workers that fail, in all, are started again in their places
            on their hosts, and call the function anew, while the others go on (`multiverso.incarnation`).
        progress: whether to write a line of progress now and then to standard error; by default on a terminal.

    Returns:
        Each worker's result, in worker order.

    Raises:
        Exception: what a worker raised, of the same type, with the worker's traceback as a note.
        WorkerFailedError: a worker raised something that cannot be sent here.
        WorkerLostError: a worker died, or its host.
        WaitTimeoutError: the time is over; all workers were ended.
        StartupError: the options make no sense, or the cluster has not the resources.
    """
    check_call("multiverso.ray.run", function, workers, timeout_seconds, on_failure, replace)
    if max_restarts < 0:
        raise StartupError(f"multiverso.ray.run: max_restarts is {max_restarts}; it must be 0 or more.")
    resources = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources_per_worker or {})}
    if min(resources.values()) < 0 or not any(resources.values()):
        raise StartupError(f"multiverso.ray.run: a worker needs some of Ray's resources; got {resources}.")
    asks = {"wire": wire, "every": every, "between": between}
    exchange = {name: str(value) for name, value in asks.items() if value is not None}
    Exchange.of(**exchange)
    call = io.BytesIO()
    write_call(call, function, tuple(args), dict(kwargs or {}))
    if not ray.is_initialized():
        ray.init()
    wish = _Wish(
        workers,
        call.getvalue(),
        {name: float(amount) for name, amount in resources.items() if amount},
        strategy,
        on_failure,
        {**{VARIABLES[name]: text for name, text in exchange.items()}, **(env or {})},
        encrypted,
        replace,
        float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds,
        Progress() if (sys.stderr.isatty() if progress is None else progress) else None,
    )
    late = (
        f"multiverso.ray.run took longer than timeout_seconds={timeout_seconds:g}" if timeout_seconds else ""
    )
    for restarts in range(max_restarts + 1):
        try:
            outcomes = _once(wish, restarts)
            in_time = time.monotonic() < wish.until
            return conclude(outcomes, on_failure, None if in_time else late)
        except (WorkerLostError, NodeLostError) as error:
            if restarts == max_restarts:
                raise
            what = str(error).splitlines()[0]
            print(
                f"multiverso: {what} Restart {restarts + 1} of {max_restarts}.", file=sys.stderr, flush=True
            )
    raise AssertionError


def _once(wish: _Wish, restarts: int) -> list[Any]:
    """Starts all workers, and returns what each returned or how it failed."""
    with _group(wish) as group, contextlib.ExitStack() as stack:
        placed = placement_group_table(group)["bundles_to_node_id"]
        bundles = sorted(placed, key=lambda bundle: (list(placed.values()).index(placed[bundle]), bundle))
        nodes = Nodes(
            hosts_of([placed[bundle] for bundle in bundles]),
            on_lost=wish.on_failure,
            encrypted=wish.encrypted,
            replaces=wish.replace > 0,
        )
        stack.callback(nodes.close)
        job = _Job(wish, nodes, Replacements(wish.replace))
        stack.callback(job.end)
        job.start(
            group, bundles, {**wish.environ, **({RESTARTS_VARIABLE: str(restarts)} if restarts else {})}
        )
        return job.finish()


@contextlib.contextmanager
def _group(wish: _Wish) -> Iterator[PlacementGroup]:
    """Resources for all workers at once: a job never waits for its last worker with the others there."""
    group = placement_group([wish.resources] * wish.workers, strategy=wish.strategy)
    try:
        if not group.wait(min(START_SECONDS, max(1.0, wish.until - time.monotonic()))):
            raise StartupError(
                f"multiverso.ray.run: the cluster does not have {wish.workers} times {wish.resources}, placed by "
                f"{wish.strategy}; all of it is {ray.cluster_resources()}, free {ray.available_resources()}."
            )
        yield group
    finally:
        remove_placement_group(group)


@dataclass
class _Job:
    """The workers of one start. Owner: the thread that runs it."""

    wish: _Wish
    nodes: Nodes
    replacements: Replacements
    actors: dict[int, Any] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    pending: dict[Any, int] = field(default_factory=dict)
    outcomes: dict[int, Any] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)  # each worker, the last time
    _asked: Any = None
    _call: Any = None
    _group: PlacementGroup | None = None
    _bundles: Sequence[int] = ()
    _environ: Mapping[str, str] = field(default_factory=dict)
    _due: dict[int, float] = field(default_factory=dict)  # when workers that have failed are started again
    _new: dict[int, Any] = field(
        default_factory=dict
    )  # of those: what tells their new process, not heard yet
    _silent: dict[Any, float] = field(default_factory=dict)

    def start(self, group: PlacementGroup, bundles: Sequence[int], environ: Mapping[str, str]) -> None:
        """Starts the workers and calls the function in them."""
        self._group, self._bundles, self._environ = group, bundles, environ
        for worker_id in range(len(bundles)):
            self._place(worker_id)
        pids = asked(
            "a worker cannot begin",
            lambda: ray.get([a.pid.remote() for a in self.actors.values()], timeout=START_SECONDS),
        )
        self.pids = dict(enumerate(pids))
        self._call = ray.put(self.wish.call)
        for worker_id in self.actors:
            self._begin(worker_id)

    def _place(self, worker_id: int) -> None:
        """Starts a worker's process where Ray has set aside room for it."""
        resources = dict(self.wish.resources)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[worker_id]
            ),
        }
        self.actors[worker_id] = ray.remote(Worker).options(**options).remote(worker_id)

    def _begin(self, worker_id: int) -> None:
        """Calls the function in it."""
        environ = {**self._environ, **self.nodes.environ(worker_id)}
        self.began[worker_id] = time.monotonic()
        self.pending[self.actors[worker_id].call.remote(environ, self._call)] = worker_id

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker_id in [worker_id for worker_id, at in self._due.items() if at <= now]:
            del self._due[worker_id]
            self._place(worker_id)
            self._new[worker_id] = self.actors[worker_id].pid.remote()
            self._begin(worker_id)
        for worker_id, answer in list(self._new.items()):
            if ray.wait([answer], timeout=0)[0]:
                del self._new[worker_id]
                with contextlib.suppress(ray.exceptions.RayError):
                    self.pids[worker_id] = ray.get(answer)

    def finish(self) -> list[Any]:
        """Waits for all workers, or until one's failure ends the job, or the time is over."""
        ends = self.wish.until
        while (self.pending or self._due) and time.monotonic() < ends:
            self._start_due()
            if not self.pending:
                time.sleep(_LOOK_SECONDS)
                continue
            done, _ = ray.wait(list(self.pending), timeout=_LOOK_SECONDS)
            for reference in done:
                outcome = self._outcome_of(reference, self.pending.pop(reference))
                if isinstance(outcome, Failed) and self.wish.on_failure == "stop":
                    ends = min(ends, time.monotonic() + _GRACE_SECONDS)
            self._look()
        for worker_id in self.pending.values():
            where = self.nodes.host_of(worker_id).name
            self._fail(
                worker_id, f"{self._who(worker_id)} on {where} had not ended and was ended.", by_us=True
            )
        return [self.outcomes[worker_id] for worker_id in sorted(self.outcomes)]

    def end(self) -> None:
        """Ends all workers."""
        for actor in self.actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor)

    def _outcome_of(self, reference: Any, worker_id: int) -> Any:
        end = WorkerExit(
            worker_id, self.pids[worker_id], 0, None, False, time.monotonic() - self.began[worker_id]
        )
        try:
            outcome = read_answer(io.BytesIO(ray.get(reference)), end)
            self.outcomes[worker_id] = outcome
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:_MOST_WORDS]
            where = self.nodes.host_of(worker_id).name
            self._fail(worker_id, f"{self._who(worker_id)} on {where} died. Ray says: {why}", by_us=False)
        if isinstance(self.outcomes[worker_id], Failed):
            # the process stays, and with it what tells the others that it lives
            with contextlib.suppress(Exception):
                ray.kill(self.actors[worker_id])
            seconds = self.replacements.after(self.outcomes[worker_id].end)
            if seconds is None:
                self.nodes.absent(worker_id)
            else:
                print(
                    f"multiverso: {self._who(worker_id)} failed; it is started again "
                    f"({self.replacements.done} of at most {self.replacements.most} replacements).",
                    file=sys.stderr,
                    flush=True,
                )
                self._due[worker_id] = time.monotonic() + seconds
        return self.outcomes[worker_id]

    def _fail(self, worker_id: int, text: str, by_us: bool) -> None:
        signal = None if by_us else "SIGKILL"  # so that it is told before those who only noticed
        end = WorkerExit(
            worker_id, self.pids[worker_id], 1, signal, by_us, time.monotonic() - self.began[worker_id]
        )
        self.outcomes[worker_id] = Failed(WorkerLostError(text, [worker_id]), end)

    def _who(self, worker_id: int) -> str:
        return f"Worker {worker_id} (pid {self.pids[worker_id]})"

    def _look(self) -> None:
        """Asks the first node how the job fares: workers on a lost host do not answer, and Ray notices late."""
        if self._asked is None:
            self._asked = self.nodes.ask_status()
        if not ray.wait([self._asked], timeout=0)[0]:
            return
        answer, self._asked = self._asked, None
        with contextlib.suppress(ray.exceptions.RayError):
            status = ray.get(answer)
            if self.wish.progress is not None:
                self.wish.progress.show(status)
            if self.wish.on_failure == "continue":
                for reference, worker_id in list(self.pending.items()):
                    if worker_id in status["lost"] and self._is_silent(reference):
                        del self.pending[reference]
                        where = self.nodes.host_of(worker_id).name
                        self._fail(
                            worker_id,
                            f"{self._who(worker_id)} is lost: {where} does not answer.",
                            by_us=False,
                        )

    def _is_silent(self, reference: Any) -> bool:
        """Whether a worker that its node calls lost stays without a word, for the time that its last one may take."""
        since = self._silent.setdefault(reference, time.monotonic())
        begins = (
            self.pending[reference] in self._new
        )  # in a dead one's place: it may take as long as any to start
        return time.monotonic() - since > (START_SECONDS if begins else _GRACE_SECONDS)
