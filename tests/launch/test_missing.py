"""What a system may lack: a sentence says so, and what to do, or it works without. Taken away for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import MULTIVERSO, SECONDS, environ, script

import multiverso as mv
from multiverso.errors import StartupError
from multiverso.runtime.joining import join

FORBIDS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from without_support import forbid
forbid(*sys.argv[2].split(","))
os.execv(sys.argv[3], sys.argv[3:])
"""
JOB = """
import numpy as np
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(3)
table.add(np.ones(3))
mv.barrier()
print("sum", table.get().sum())
mv.shutdown()
"""
SLURM = {
    f"SLURM_{name}": value
    for name, value in {
        "JOB_ID": f"no-proc-{os.getpid()}",
        "STEP_ID": "0",
        "PROCID": "0",
        "NTASKS": "2",
        "STEP_NUM_TASKS": "2",
        "LOCALID": "0",
        "NNODES": "1",
        "STEP_NUM_NODES": "1",
        "STEP_TASKS_PER_NODE": "2",
    }.items()
}


def without_calls(calls: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    here = str(Path(__file__).parents[1] / "core")
    return run(sys.executable, "-c", FORBIDS, here, calls, *command, **variables)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environ(**variables), check=False
    )


def test_no_memfd(tmp_path: Path) -> None:
    job = str(script(tmp_path, JOB))
    done = without_calls("memfd_create", *MULTIVERSO, "run", "-n", "2", job)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "gives no anonymous shared memory (memfd_create: Function not implemented)" in done.stderr
    alone = without_calls("memfd_create", sys.executable, job)
    assert "StartupError: this system gives no anonymous shared memory" in alone.stderr


def test_no_pidfd(tmp_path: Path) -> None:
    """The launcher cannot do without; a job of another launcher, or of one process, can."""
    job = str(script(tmp_path, JOB))
    done = without_calls("pidfd_open", *MULTIVERSO, "run", "-n", "2", job)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no pidfd_open (Function not implemented)" in done.stderr
    assert "mpirun" in done.stderr
    assert without_calls("pidfd_open", sys.executable, job).stdout == "sum 3.0\n"


BARE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")  # without /proc


def can_be_bare() -> bool:
    """Whether this machine has what that takes, and lets us."""
    programs = all(map(shutil.which, ("unshare", "mount")))
    return programs and subprocess.run([*BARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or not can_be_bare(), reason="only root can take /proc away from a process (unshare --mount)"
)
def test_no_proc(tmp_path: Path) -> None:
    job = str(script(tmp_path, JOB))
    done = run(*BARE, *MULTIVERSO, "run", "-n", "2", job)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no /proc here" in done.stderr
    assert run(*BARE, sys.executable, job).stdout == "sum 3.0\n"
    both = f"SLURM_PROCID=1 SLURM_LOCALID=1 {sys.executable} {job} & {sys.executable} {job}; wait"
    done = run(*BARE, "sh", "-c", both, **SLURM)
    assert done.stdout == "sum 6.0\n" * 2, done.stderr


def test_platoons_launcher_where_another_platoon_was_installed_over_it(tmp_path: Path) -> None:
    (tmp_path / "platoon").mkdir()
    (tmp_path / "platoon" / "__init__.py").touch()
    text = "import sys, multiverso_program\nsys.exit(multiverso_program.platoon_launcher())"
    done = run(sys.executable, "-c", text, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert f"the package platoon in {tmp_path / 'platoon'} is not the one of multiverso" in done.stderr
    assert "Traceback" not in done.stderr


MANY: dict[str, dict[str, str]] = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "x",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "65",
        "LOCAL_WORLD_SIZE": "65",
    },
    "openmpi": {
        "PMIX_NAMESPACE": "x",
        **{f"OMPI_COMM_WORLD_{name}": number for name, number in (("SIZE", "65"), ("RANK", "0"))},
        **{f"OMPI_COMM_WORLD_LOCAL_{name}": number for name, number in (("SIZE", "65"), ("RANK", "0"))},
    },
    "slurm": {**SLURM, "SLURM_NTASKS": "65", "SLURM_STEP_NUM_TASKS": "65", "SLURM_STEP_TASKS_PER_NODE": "65"},
}


@pytest.mark.parametrize("launcher", MANY)
def test_more_workers_than_a_host_runs_are_refused_in_words(launcher: str) -> None:
    with pytest.raises(StartupError, match=f"1 to 64 workers .*; {launcher} has started 65 here, of 65: start fewer"):
        join(MANY[launcher])


def test_more_workers_than_a_host_runs_are_not_started(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="it must be from 1 to 64"):
        mv.run(print, workers=65)
    done = run(*MULTIVERSO, "run", "-n", "65", str(script(tmp_path, JOB)))
    assert done.returncode == 2
    assert "-n 65: the number of workers must be from 1 to 64" in done.stderr
