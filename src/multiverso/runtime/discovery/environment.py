"""Which job does this process belong to? Read from the environment alone.

Our own launcher says it outright. Open MPI, MPICH, torchrun and Slurm each leave other traces, from which a
key is made that is equal in all workers of one job and different in every other job, restart and user.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from multiverso.errors import StartupError
from multiverso.hosts.roster import Roster
from multiverso.runtime.discovery import slurm_text
from multiverso.runtime.job.processes import ancestors
from multiverso.wire.requests import OnLost
from multiverso.wire.trust import SECRET_VARIABLE

Starter = Literal["multiverso", "torchrun", "openmpi", "mpich", "slurm", "single"]
PORT_VARIABLE = "MULTIVERSO_PORT"

# Slurm numbers the steps that are not launched by srun from the top: interactive, batch, extern, pending.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Hydra's per-host proxy (the kernel cuts names to 15 characters), Intel's, and gforker, which has none.
_MPICH_STARTERS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy", "mpiexec.gforker")


@dataclass(frozen=True)
class JobInfo:
    """A worker and its job, as the environment describes them.

    Attributes:
        worker_id: this worker's number, from 0 to `workers_num` - 1.
        workers_num: how many workers the job starts with.
        local_id: this worker's number on this host.
        local_num: how many workers the job has on this host.
        started_by: who started the job; "single" is a plain `python train.py`.
        key: equal in all workers of the job on this host, different elsewhere. `socket_name` makes the node's
            socket name from it. None when `address` is known, and for a job of one plain process.
        address: the node's abstract socket name, without the leading NUL, when a launcher already runs one.
        on_lost: what the launcher wants when a worker dies, or None: the caller of `init` decides.
        launched: whether our launcher started this process, so that it must not outlive the node.
        secret: what only this job's processes know, if their environment has one.
        host: this host's number, in a job on several hosts, where the environment says it.
        hosts: how many there are; 0 where it says only that there are several.
        store: where those hosts can leave each other word.
        roster: which they are, where the environment says that; without an address and credentials.
        ports: where the first one is to listen for the others; empty for any port that they all know or learn.
        attempt: what distinguishes this start of them from others, on all hosts alike.
    """

    worker_id: int
    workers_num: int
    local_id: int
    local_num: int
    started_by: Starter
    key: str | None = None
    address: str | None = None
    on_lost: OnLost | None = None
    launched: bool = False
    secret: str | None = field(default=None, repr=False)
    host: int = 0
    hosts: int = 1
    store: tuple[str, int] | None = None
    roster: Roster | None = None
    ports: tuple[int, ...] = ()
    attempt: str = ""


def discover(environ: Mapping[str, str] | None = None) -> JobInfo:
    """Finds this worker's place in its job.

    The innermost launcher wins: ours, then torchrun (often itself started by srun or mpirun, one a host),
    then MPI, then Slurm. Nothing is opened or contacted.

    Args:
        environ: the environment to read; this process's by default.

    Raises:
        StartupError: the environment contradicts itself.
    """
    environ = os.environ if environ is None else environ
    if "MULTIVERSO_NODE" in environ:
        job = _ours(environ)
    elif "TORCHELASTIC_RUN_ID" in environ:
        job = _torchrun(environ)
    elif "OMPI_COMM_WORLD_SIZE" in environ:
        job = _openmpi(environ)
    elif _under_mpich(environ):
        job = _mpich(environ)
    elif _in_slurm_step(environ):
        job = _slurm(environ)
    else:
        return JobInfo(0, 1, 0, 1, "single")
    _check(job)
    if PORT_VARIABLE in environ:
        job = replace(job, ports=(_number(environ, PORT_VARIABLE),))
    return replace(job, secret=environ.get(SECRET_VARIABLE) or None)


def socket_name(key: str, secret: str) -> str:
    """Names the abstract socket of the job's node, without the leading NUL.

    Containers that share a network share abstract names, and users share a machine: the pid namespace and the
    user go into the name beside the job's key. The secret makes it a name that no other user can take first.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # no /proc, for any of the job's workers
        namespace = 0
    digest = hashlib.sha256(f"{os.getuid()}\0{namespace}\0{key}\0{secret}".encode()).hexdigest()
    return f"multiverso-{digest[:32]}"


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _ours(environ: Mapping[str, str]) -> JobInfo:
    worker_id = _number(environ, "MULTIVERSO_WORKER_ID")
    workers_num = _number(environ, "MULTIVERSO_WORKERS_NUM")
    address = environ["MULTIVERSO_NODE"]
    if not address:
        raise StartupError("MULTIVERSO_NODE is empty; unset it, or start the worker with `multiverso run`.")
    wish = environ.get("MULTIVERSO_ON_LOST", "stop")
    if wish not in ("stop", "continue"):
        raise StartupError(f"MULTIVERSO_ON_LOST is {wish!r}; it must be 'stop' or 'continue'.")
    on_lost: OnLost = "continue" if wish == "continue" else "stop"
    launched = environ.get("MULTIVERSO_LAUNCHED") == "1"
    place = (worker_id, workers_num) * 2
    return JobInfo(*place, "multiverso", address=address, on_lost=on_lost, launched=launched)


def _torchrun(environ: Mapping[str, str]) -> JobInfo:
    # The run id may be "none", and MASTER_PORT the fixed 29500. The agent's folder for error files is new in
    # every run and attempt, so it tells apart what those two cannot.
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    attempt = os.path.dirname(os.path.dirname(error_file))
    parts = [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = _place(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    job = JobInfo(*place, "torchrun", key=_key("torchrun", *parts, attempt, restarts))
    hosts = _number(environ, "GROUP_WORLD_SIZE", 1)
    if hosts == 1:
        return job
    host = _number(environ, "GROUP_RANK")
    return replace(
        job,
        key=_key(job.key or "", f"host {host}"),
        host=host,
        hosts=hosts,
        store=(environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")),
        attempt=_key(environ.get("TORCHELASTIC_RUN_ID", ""), restarts),
    )


def _openmpi(environ: Mapping[str, str]) -> JobInfo:
    # PMIX_NAMESPACE holds mpirun's pid; the server's address beside it makes a reused pid harmless.
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not namespace:
        raise StartupError(
            "Open MPI started this worker, but neither PMIX_NAMESPACE nor OMPI_MCA_ess_base_jobid says which "
            "job it is; pass the environment on unchanged, or start with `multiverso run -n N`."
        )
    place = _place(environ, *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
    key = _key("openmpi", namespace, environ.get("PMIX_SERVER_URI2", ""))
    return JobInfo(*place, "openmpi", key=key, hosts=_one_or_several(place[1], place[3]))


def _under_mpich(environ: Mapping[str, str]) -> bool:
    # srun sets PMI_RANK too (--mpi=pmi2); then Slurm's own variables say more. MPICH's Hydra in an allocation
    # starts its proxies as a step of one task a host, so Slurm's variables are about those.
    by_hydra = "HYDI_CONTROL_FD" in environ or "PMI_HOSTNAME" in environ
    return "PMI_RANK" in environ and "PMI_SIZE" in environ and (by_hydra or not _in_slurm_step(environ))


def _mpich(environ: Mapping[str, str]) -> JobInfo:
    worker_id = _number(environ, "PMI_RANK")
    workers_num = _number(environ, "PMI_SIZE")
    # only Hydra starts ranks on several hosts, and it says how many are on this one
    local_num = _number(environ, "MPI_LOCALNRANKS", workers_num)
    place = worker_id, workers_num, _number(environ, "MPI_LOCALRANKID", worker_id), local_num
    # MPICH gives its ranks no job id. All ranks of a host hang below one proxy; where a container hides it,
    # the proxy's control socket, inherited by every rank, has one inode.
    for process in ancestors(os.getppid()):
        if process.name in _MPICH_STARTERS:
            identity = f"proxy {process.pid} {process.start_ticks}"
            break
    else:
        descriptor = _number(environ, "HYDI_CONTROL_FD", -1)
        number = _inode(descriptor) if descriptor >= 0 else None
        if number is None:
            raise StartupError(
                f"PMI_RANK={worker_id} and PMI_SIZE={workers_num} say that MPICH started this worker, but no "
                "MPICH process is above it and its control socket is closed, so its job cannot be distinguished from "
                "another. Unset both if they are left over; otherwise start with `multiverso run -n N`."
            )
        identity = f"socket {number}"
    return JobInfo(*place, "mpich", key=_key("mpich", identity), hosts=_one_or_several(workers_num, local_num))


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    # An sbatch or salloc shell has SLURM_PROCID=0 too: only a step that srun launched is a job of workers.
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SLURM_FIRST_SPECIAL_STEP:
        return False
    return "SLURM_STEP_NUM_TASKS" in environ and "SLURM_PROCID" in environ


def _slurm(environ: Mapping[str, str]) -> JobInfo:
    workers_num = _number(environ, "SLURM_STEP_NUM_TASKS")
    worker_id = _number(environ, "SLURM_PROCID")
    hosts = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    if not job_id:
        raise StartupError("SLURM_STEP_ID is set but SLURM_JOB_ID is not; leave Slurm's environment as it is.")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    attempt = _key("slurm", job_id, environ["SLURM_STEP_ID"], restarts)
    place = worker_id, workers_num, _number(environ, "SLURM_LOCALID", worker_id), workers_num
    job = JobInfo(*place, "slurm", key=attempt, attempt=attempt)
    return job if hosts == 1 else _slurm_hosts(environ, job, hosts)


def _slurm_hosts(environ: Mapping[str, str], job: JobInfo, hosts: int) -> JobInfo:
    names = slurm_text.expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""))
    counts = slurm_text.expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    host = _number(environ, "SLURM_NODEID")
    fits = len(names) == len(counts) == hosts and 0 <= host < hosts and sum(counts) == job.workers_num
    if not fits or len(set(names)) < hosts or min(counts) < 1:
        raise StartupError(
            f"Slurm's variables do not fit together: {hosts} nodes, this one number {host} of {names}, with "
            f"{counts} of {job.workers_num} tasks; leave its environment as it is."
        )
    distribution = environ.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0].lower()
    roster = Roster(host, tuple(names), tuple(counts), (names[0], 0), order=slurm_text.deal(counts, distribution))
    local = roster.local
    if not 0 <= job.local_id < len(local) or local[job.local_id] != job.worker_id:
        raise StartupError(
            f"task {job.worker_id} is number {job.local_id} on {names[host]}, which is not how Slurm deals out tasks "
            f"by {distribution!r}; start the step with srun --distribution=block (or cyclic, or plane=N)."
        )
    return replace(
        job,
        local_num=len(local),
        key=_key(job.attempt, f"host {host}"),
        host=host,
        hosts=hosts,
        roster=roster,
        ports=slurm_text.ports_of(environ),
    )


def _one_or_several(workers_num: int, local_num: int) -> int:
    return 1 if local_num >= workers_num else 0


def _key(*parts: str) -> str:
    return "|".join(parts)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise StartupError(f"{name} is not set, but other variables of its launcher are; set it too.")
        return default
    try:
        return int(text)
    except ValueError:
        raise StartupError(f"{name} is {text!r}; it must be an integer.") from None


def _place(environ: Mapping[str, str], *names: str) -> tuple[int, int, int, int]:
    """Returns a worker's number, how many there are, and both on its host."""
    worker_id, workers_num, local_id, local_num = (_number(environ, name) for name in names)
    return worker_id, workers_num, local_id, local_num


def _check(job: JobInfo) -> None:
    if job.workers_num < 1 or not 0 <= job.worker_id < job.workers_num:
        raise StartupError(
            f"{job.started_by} says that this is worker {job.worker_id} of {job.workers_num}; the number "
            "must be from 0 to the number of workers minus 1."
        )
    if job.workers_num > job.local_num and job.hosts == 1:
        raise StartupError(
            f"The job that {job.started_by} started has {job.workers_num} workers, of which only {job.local_num} are "
            "on this host, but nothing says where the others are; leave the launcher's environment as it is."
        )
