"""A job whose nodes are in this process: its workers' commands, and what the job and its nodes exchange."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from multiverso.launch.job import Job, OnFailure
from multiverso.launch.output import Output
from multiverso.launch.place import Place
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.resources import available_cores, bound_environ, split_cores, thread_environ
from multiverso.launch.restart_policy import Replacements
from multiverso.launch.results import WorkerExit
from multiverso.runtime.node.node import Node


class Watcher:
    """Called by a launcher as its workers come and go; does nothing by default."""

    def started(self, worker_id: int, pid: int) -> None:
        """A worker's process has begun."""

    def ended(self, end: WorkerExit) -> None:
        """A worker's process has ended, and none comes in its place."""

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        """A worker's process has ended, and another one is about to take its place."""

    def warn(self, text: str) -> None:
        """A worker could not be started again."""


@dataclass(frozen=True)
class Part:
    """The workers of one node.

    Attributes:
        node: theirs.
        place: which workers of the job these are.
        programs: each worker's program and arguments.
        descriptors: each worker's file descriptors to inherit.
    """

    node: Node
    place: Place
    programs: Sequence[Sequence[str]]
    descriptors: Sequence[tuple[int, ...]] = ()


def job_on(
    parts: Sequence[Part],
    replacements: Replacements,
    watcher: Watcher,
    *,
    environ: Mapping[str, str],
    marker: str,
    output: Output,
    on_failure: OnFailure,
    devices: Sequence[str] = (),
    bind: bool = False,
    grace_seconds: float = 1.0,
    keep_stdin: bool = False,
) -> Job:
    """Returns the job of some nodes' workers, which has not begun.

    Args:
        parts: the nodes and their workers, in worker order.
        replacements: how many workers that fail are started again.
        watcher: is notified of what happens to them.
        environ: what to make their environment from; it has the secret that their nodes ask for.
        marker: see `Job`, as for what follows.
        output: reads their pipes.
        on_failure: "stop" or "continue".
        devices: values of CUDA_VISIBLE_DEVICES to deal out in turn; empty to leave it alone.
        bind: whether each gets cores of its own.
        grace_seconds: from the first request to end until SIGKILL.
        keep_stdin: let the first worker read our standard input.
    """
    node_of = {worker_id: part.node for part in parts for worker_id in part.place.workers}

    def ended(end: WorkerExit) -> None:
        node_of[end.worker_id].absent(end.worker_id)
        watcher.ended(end)

    def again(end: WorkerExit) -> float | None:
        if not node_of[end.worker_id].may_be_replaced(end.worker_id):
            return None
        seconds = replacements.after(end)
        if seconds is not None:
            watcher.replacing(end, replacements, seconds)
        return seconds

    return Job(
        [
            command
            for part in parts
            for command in _commands(part, {**environ, "MULTIVERSO_ON_LOST": on_failure}, devices, bind)
        ],
        marker=marker,
        output=output,
        on_failure=on_failure,
        grace_seconds=grace_seconds,
        keep_stdin=keep_stdin,
        on_start=watcher.started,
        on_exit=ended,
        again=again,
        on_trouble=watcher.warn,
        lost_workers=parts[0].node.lost_workers,
        first=parts[0].place.workers.start,
    )


def _commands(part: Part, environ: Mapping[str, str], devices: Sequence[str], bind: bool) -> Iterator[WorkerCommand]:
    """Makes each worker's command: who it is, and its share of the host, are in its environment."""
    place = part.place
    cores = available_cores()
    shares = split_cores(cores, place.on_machine) if bind else [None] * place.on_machine
    for index, worker_id in enumerate(place.workers):
        share = shares[place.first_on_machine + index]
        own = {
            **environ,
            **(bound_environ(len(share)) if share else thread_environ(environ, len(cores), place.on_machine)),
            "PYTHONUNBUFFERED": "1",
            "MULTIVERSO_NODE": part.node.address,
            "MULTIVERSO_WORKER_ID": str(worker_id),
            "MULTIVERSO_WORKERS_NUM": str(place.workers_num),
            "MULTIVERSO_LAUNCHED": "1",
        }
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[(place.first_on_machine + index) % len(devices)]
        inherited = part.descriptors[index] if part.descriptors else ()
        yield WorkerCommand(tuple(part.programs[index]), own, share, inherited, host=place.name)
