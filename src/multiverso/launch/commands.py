"""Each worker's command: its program, who it is, and its share of the host."""

from collections.abc import Mapping, Sequence

from multiverso.launch.job import OnFailure
from multiverso.launch.place import Place
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.resources import available_cores, bound_environ, split_cores, thread_environ


def worker_commands(
    programs: Sequence[Sequence[str]],
    *,
    address: str,
    environ: Mapping[str, str],
    on_failure: OnFailure = "stop",
    devices: Sequence[str] = (),
    bind: bool = False,
    descriptors: Sequence[tuple[int, ...]] = (),
    place: Place | None = None,
) -> list[WorkerCommand]:
    """Makes each worker's command: who it is, and its share of the host, are in its environment.

    Args:
        programs: each worker's program and arguments.
        address: the node's abstract socket name.
        environ: what to start from.
        on_failure: the default of `init`: what to do when a worker is lost.
        devices: values of CUDA_VISIBLE_DEVICES to deal out in turn; empty to leave it alone.
        bind: whether each worker gets cores of its own.
        descriptors: each worker's file descriptors to inherit.
        place: which workers of the job these are; all of them by default.
    """
    place = place or Place.alone(len(programs))
    cores = available_cores()
    shares = split_cores(cores, place.on_machine) if bind else [None] * place.on_machine
    commands = []
    for index, worker_id in enumerate(place.workers):
        share = shares[place.first_on_machine + index]
        own = {
            **environ,
            **(bound_environ(len(share)) if share else thread_environ(environ, len(cores), place.on_machine)),
            "PYTHONUNBUFFERED": "1",
            "MULTIVERSO_NODE": address,
            "MULTIVERSO_WORKER_ID": str(worker_id),
            "MULTIVERSO_WORKERS_NUM": str(place.workers_num),
            "MULTIVERSO_ON_LOST": on_failure,
            "MULTIVERSO_LAUNCHED": "1",
        }
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[(place.first_on_machine + index) % len(devices)]
        inherited = descriptors[index] if descriptors else ()
        commands.append(WorkerCommand(tuple(programs[index]), own, share, inherited, host=place.name))
    return commands
