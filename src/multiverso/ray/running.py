"""`multiverso.ray.run(function)`: a function in the workers of one job, anywhere on a Ray cluster."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from multiverso.errors import NodeLostError, StartupError, WorkerLostError
from multiverso.hosts.options import in_environment
from multiverso.launch.function import check_call
from multiverso.launch.job import OnFailure
from multiverso.launch.outcomes import conclude, write_call
from multiverso.ray.job import Job, JobSpec, Progress
from multiverso.ray.nodes import Nodes
from multiverso.ray.placement import placement
from multiverso.runtime.discovery.restarts import RESTARTS_VARIABLE
from multiverso.saying import say


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
    host_grace: float = 30.0,
    progress: bool | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in each of several workers of one job on a Ray cluster.

    It takes the same function as `multiverso.run`, and has the same results and exceptions. Ray places the workers and
    reports their ends; each of their hosts has a node in an actor. Tables stay in the hosts' memory, and their changes
    go from node to node. Blocks until all workers have ended. Connects to the cluster that
    ``RAY_ADDRESS`` or ``ray.init`` names, and starts a local one where there is none.

    Args:
        function: what to call; it may ask `multiverso.worker_id()` who it is.
        workers: how many workers, from 1. Those on one host have neighbouring numbers.
        args: positional arguments, the same for all.
        kwargs: keyword arguments, the same for all.
        timeout_seconds: the longest that the whole call may take; None for no limit.
        on_failure: "stop" ends the others when a worker fails, and raises. "continue" lets them continue without those
            who failed, and without a host that is lost, unless it is the first one.
        env: environment variables to set in the workers.
        cpus_per_worker: processors that Ray reserves for each.
        gpus_per_worker: GPUs for each; Ray sets CUDA_VISIBLE_DEVICES.
        resources_per_worker: other resources of Ray's, by name.
        strategy: how Ray spreads the workers over hosts: "PACK" (as few hosts as can be), "SPREAD", "STRICT_PACK",
            "STRICT_SPREAD".
        wire: what travels between hosts, as in `init`.
        every: how often, as in `init`: a bare number is seconds.
        between: how the hosts' changes are combined, as in `init`.
        encrypted: whether connections between hosts are encrypted.
        max_restarts: how often all workers are started again, where Ray then has room, when a worker or a host has died
            (not when the function raises). `multiverso.checkpoint` continues then from what it has saved, where all
            hosts see that; `multiverso.restarts` says how often that was.
        replace: with on_failure="continue": how many workers that fail, in all, are started again in their places on
            their hosts, and call the function again, while the others continue (`multiverso.incarnation`). So often is
            also a host that is lost replaced by another one, or by itself, wherever Ray has room for all its workers;
            not the first one, which leads the job.
        host_grace: how many seconds without a word of a host until it counts as lost. One whose processes are dead is
            lost after five.
        progress: whether to write a line of progress now and then to standard error; by default on a terminal.

    Returns:
        Each worker's result, in worker order.

    Raises:
        Exception: what a worker raised, of the same type, with the worker's traceback as a note.
        WorkerFailedError: a worker raised something that cannot be sent here.
        WorkerLostError: a worker died, or its host.
        WaitTimeoutError: the time is over; all workers were ended.
        StartupError: the options make no sense, or the cluster does not have the resources.
    """
    check_call("multiverso.ray.run", function, args, workers, timeout_seconds, on_failure, replace, env)
    if max_restarts < 0:
        raise StartupError(f"multiverso.ray.run: max_restarts is {max_restarts}; it must be 0 or more.")
    if not host_grace > 0:
        raise StartupError(f"multiverso.ray.run: host_grace is {host_grace}; it must be more than 0 seconds.")
    resources = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources_per_worker or {})}
    if min(resources.values()) < 0 or not any(resources.values()):
        raise StartupError(f"multiverso.ray.run: a worker needs some of Ray's resources; got {resources}.")
    exchange = in_environment(wire, every, between)
    call = io.BytesIO()
    write_call(call, function, tuple(args), dict(kwargs or {}))
    if not ray.is_initialized():
        ray.init()
    until = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    shown = Progress() if (sys.stderr.isatty() if progress is None else progress) else None
    needed = {name: float(amount) for name, amount in resources.items() if amount}
    spec = JobSpec(call.getvalue(), needed, on_failure, {**exchange, **(env or {})}, replace, until, shown)
    late = f"multiverso.ray.run took longer than timeout_seconds={timeout_seconds:g}" if timeout_seconds else ""
    for restarts in range(max_restarts + 1):
        try:
            with contextlib.ExitStack() as stack:
                seconds = max(1.0, until - time.monotonic())
                found = stack.enter_context(placement(workers, needed, strategy, replace > 0, seconds))
                nodes = Nodes(
                    found.hosts, on_lost=on_failure, encrypted=encrypted, replaces=replace > 0, grace=host_grace
                )
                stack.callback(nodes.close)
                job = Job(spec, nodes, found)
                stack.callback(job.end)
                job.start({RESTARTS_VARIABLE: str(restarts)} if restarts else {})
                outcomes = job.finish()
            return conclude(outcomes, on_failure, None if time.monotonic() < until else late)
        except (WorkerLostError, NodeLostError) as error:
            if restarts == max_restarts:
                raise
            what = str(error).splitlines()[0]
            say(f"{what} Restart {restarts + 1} of {max_restarts}.")
    raise AssertionError
