"""Discovery on environments recorded from the real launchers (Slurm 22.05 and the others' PyPI packages)."""

import os
import socket
import subprocess
import sys
from unittest.mock import patch

import pytest

from multiverso.errors import StartupError
from multiverso.runtime.discovery import environment
from multiverso.runtime.discovery.environment import JobInfo, discover, socket_name
from multiverso.runtime.discovery.meetings import meeting
from multiverso.runtime.job.processes import Ancestor, ancestors

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_vmklo9o2/none_6nauqpdp/attempt_0/1/error.json",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-4453@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI2": "prterun-vm-4453@0.0;tcp4://127.0.0.1:46885",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "vm",
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3",
}
SLURM_PMI2 = SLURM | {"PMI_FD": "10", "PMI_JOBID": "71.0", "PMI_RANK": "2", "PMI_SIZE": "3"}
# MPICH's mpiexec in an sbatch script: the step is that of its proxies, one task a host.
HYDRA_IN_SLURM = {
    "PMI_FD": "6",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OURS = {
    "MULTIVERSO_NODE": "multiverso-abc",
    "MULTIVERSO_WORKER_ID": "2",
    "MULTIVERSO_WORKERS_NUM": "4",
    "MULTIVERSO_ON_LOST": "continue",
    "MULTIVERSO_LAUNCHED": "1",
}
ABOVE = (Ancestor(51, 9000, "bash"), Ancestor(50, 8000, "hydra_pmi_proxy"), Ancestor(49, 7000, "mpiexec"))


def place(environ: dict[str, str], above: tuple[Ancestor, ...] = ABOVE, inode: int | None = 77) -> JobInfo:
    with patch.multiple(environment, ancestors=lambda _: iter(above), _inode=lambda _: inode):
        return discover(environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("single", 0, 1)),
        (TORCHRUN, ("torchrun", 1, 2)),
        (OPENMPI, ("openmpi", 1, 4)),
        (MPICH, ("mpich", 1, 2)),
        (SLURM, ("slurm", 2, 3)),
        (OURS, ("multiverso", 2, 4)),
        # The innermost launcher wins.
        (SLURM | TORCHRUN, ("torchrun", 1, 2)),
        (OPENMPI | TORCHRUN, ("torchrun", 1, 2)),
        (SLURM | MPICH, ("mpich", 1, 2)),
        (HYDRA_IN_SLURM, ("mpich", 1, 2)),
        (SLURM_PMI2, ("slurm", 2, 3)),
        (OPENMPI | OURS, ("multiverso", 2, 4)),
        # Shells of a batch system are no workers.
        ({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("single", 0, 1)),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, ("single", 0, 1)),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, ("single", 0, 1)),
        (SLURM | {"SLURM_STEP_ID": "batch"}, ("single", 0, 1)),
        # Left-over variables of a framework alone start no job.
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("single", 0, 1)),
    ],
)
def test_finds_the_place(environ: dict[str, str], expected: tuple[str, int, int]) -> None:
    job = place(environ)
    assert (job.started_by, job.worker_id, job.workers_num) == expected


def test_our_launcher_says_everything() -> None:
    job = place(OURS)
    assert job == JobInfo(2, 4, 2, 4, "multiverso", address="multiverso-abc", on_lost="continue", launched=True)
    assert place({}).key is None
    assert place({}).on_lost is None


@pytest.mark.parametrize(
    ("environ", "other_worker"),
    [
        (
            TORCHRUN,
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_vmklo9o2/none_6nauqpdp/attempt_0/0/error.json",
            },
        ),
        (OPENMPI, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_RANK": "0"}),
        (MPICH, {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}),
        (SLURM, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}),
    ],
)
def test_workers_of_one_job_have_one_key(environ: dict[str, str], other_worker: dict[str, str]) -> None:
    mine, other = place(environ), place(environ | other_worker)
    assert mine.key
    assert mine.key == other.key
    assert mine.worker_id != other.worker_id


@pytest.mark.parametrize(
    ("environ", "change"),
    [
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "night"}),
        (TORCHRUN, {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_0/1/error.json"}),
        (OPENMPI, {"PMIX_NAMESPACE": "prterun-vm-4454@1"}),
        (OPENMPI, {"PMIX_SERVER_URI2": "prterun-vm-4453@0.0;tcp4://127.0.0.1:46886"}),
        (SLURM, {"SLURM_JOB_ID": "72"}),
        (SLURM, {"SLURM_STEP_ID": "1"}),
        (SLURM, {"SLURM_RESTART_COUNT": "1"}),
    ],
)
def test_another_job_has_another_key(environ: dict[str, str], change: dict[str, str]) -> None:
    assert place(environ).key != place(environ | change).key


def test_mpich_jobs_differ_by_their_proxy_or_its_socket() -> None:
    reused_pid = (Ancestor(50, 8001, "hydra_pmi_proxy"),)
    assert place(MPICH).key != place(MPICH, reused_pid).key
    hidden = place(MPICH, (), inode=77)
    assert hidden.key == place(MPICH, (), inode=77).key
    assert hidden.key != place(MPICH, (), inode=78).key
    # A wrapper that closes the descriptor does not part a worker from the others.
    assert place(MPICH, inode=None).key == place(MPICH).key
    with pytest.raises(StartupError, match="PMI_RANK=1"):
        place(MPICH, (), inode=None)


@pytest.mark.parametrize(
    ("environ", "local_num"),
    [
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, 1),
        (HYDRA_IN_SLURM | {"SLURM_STEP_NUM_NODES": "2", "MPI_LOCALNRANKS": "1"}, 1),
    ],
)
def test_mpi_says_that_there_are_other_hosts_and_not_which(environ: dict[str, str], local_num: int) -> None:
    job = place(environ)
    assert (job.hosts, job.local_num, job.roster) == (0, local_num, None)


def test_workers_that_are_nowhere_are_a_contradiction() -> None:
    with pytest.raises(StartupError, match="has 8 workers, of which only 2 are on this host"):
        place(TORCHRUN | {"WORLD_SIZE": "8"})


SLURM_HOSTS = SLURM | {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "gpu[09-10],login",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("change", "local"),
    [
        ({}, [3, 4]),
        ({"SLURM_DISTRIBUTION": "block:cyclic", "SLURM_STEP_RESV_PORTS": "12001-12002,12007"}, [3, 4]),
        ({"SLURM_DISTRIBUTION": "cyclic"}, [1, 4]),
        ({"SLURM_DISTRIBUTION": "plane=2", "SLURM_PROCID": "3"}, [2, 3]),
    ],
)
def test_slurm_says_which_task_is_where(change: dict[str, str], local: list[int]) -> None:
    job = place(SLURM_HOSTS | change)
    assert job.roster is not None
    assert (job.host, job.hosts, job.local_num, list(job.roster.local)) == (1, 3, 2, local)
    assert job.roster.names == ("gpu09", "gpu10", "login")
    assert sorted(worker for host in range(3) for worker in job.roster.workers_of(host)) == list(range(7))
    assert job.ports == ((12001, 12002, 12007) if "SLURM_STEP_RESV_PORTS" in change else ())
    other = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert place(SLURM_HOSTS | change | other).attempt == job.attempt
    assert place(SLURM_HOSTS | change | other).key != job.key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "7"}, "do not fit together"),
        ({"SLURM_NODEID": "3"}, "do not fit together"),
        ({"SLURM_STEP_NODELIST": "gpu[09"}, "not a list of nodes"),
        ({"SLURM_STEP_NODELIST": "gpu[a-c]"}, "not numbers"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x)"}, "must be such as"),
        ({"SLURM_DISTRIBUTION": "arbitrary", "SLURM_PROCID": "6"}, "distribution=block"),
    ],
)
def test_slurms_contradictions_are_named(change: dict[str, str], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        place(SLURM_HOSTS | change)


def test_torchruns_hosts_find_each_other_at_its_store() -> None:
    two = TORCHRUN | {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    first, second = (place(two | {"GROUP_RANK": rank}) for rank in "01")
    assert (first.host, second.host, first.hosts, first.store) == (0, 1, 2, ("node1", 29400))
    assert first.key != second.key  # two agents on one machine are two hosts
    assert first.attempt == second.attempt


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (OURS | {"MULTIVERSO_WORKER_ID": "4"}, "worker 4 of 4"),
        (OURS | {"MULTIVERSO_WORKER_ID": "-1"}, "worker -1 of 4"),
        (OURS | {"MULTIVERSO_WORKERS_NUM": "many"}, "MULTIVERSO_WORKERS_NUM is 'many'"),
        (OURS | {"MULTIVERSO_ON_LOST": "retry"}, "MULTIVERSO_ON_LOST is 'retry'"),
        (OURS | {"MULTIVERSO_NODE": ""}, "MULTIVERSO_NODE is empty"),
        ({"MULTIVERSO_NODE": "x", "MULTIVERSO_WORKER_ID": "0"}, "MULTIVERSO_WORKERS_NUM is not set"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK is not set"),
        ({k: v for k, v in OPENMPI.items() if not k.startswith("PMIX")}, "PMIX_NAMESPACE"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_JOB_ID"}, "SLURM_JOB_ID is not"),
    ],
)
def test_contradictions_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        place(environ)


def test_socket_name_is_stable_short_and_printable() -> None:
    name = socket_name("torchrun|none|localhost|29500||0", "secret")
    assert name == socket_name("torchrun|none|localhost|29500||0", "secret")
    assert name != socket_name("torchrun|none|localhost|29500||1", "secret")
    assert name != socket_name("torchrun|none|localhost|29500||0", "another")
    assert name.startswith("multiverso-")
    assert name.isprintable()
    assert len(name) < 100


def test_ancestors_of_a_real_process() -> None:
    above = list(ancestors(os.getppid()))
    assert above[0].pid == os.getppid()
    assert all(process.start_ticks >= 0 and process.name for process in above)
    code = (
        "import os;from multiverso.runtime.job import processes as p;print(*(a.pid for a in p.ancestors(os.getppid())))"
    )
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [int(pid) for pid in child.stdout.split()][:2] == [os.getpid(), os.getppid()]


def test_an_init_after_shutdown_waits_for_the_port_of_the_job_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = socket.create_server(("0.0.0.0", 0))
    port = before.getsockname()[1]
    with pytest.raises(StartupError, match="MULTIVERSO_PORT"):
        meeting.open_port(port)  # the first job: somebody else has it
    monkeypatch.setattr(meeting.time, "sleep", lambda _: before.close())
    with meeting.open_port(port, number=1) as listening:
        assert listening.getsockname()[1] == port
