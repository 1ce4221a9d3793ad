"""`docs/how-to/slurm.md` with Slurm: a controller and a slurmd on each of two machines, and munge between them."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, machines, missing, wait_until

if reason := missing("slurmctld", "slurmd", "srun", "sbatch", "munged"):
    pytest.exit(f"make engines: {reason} (Debian: apt-get install slurm-wlm munge iproute2)", 2)

pytestmark = pytest.mark.timeout(300)
# A requeued job may begin when its credentials of before have expired: after two minutes, if not told otherwise.
CONFIGURATION = """
ClusterName=multiverso
SlurmctldHost=node1
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiParams=ports=31000-31999
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node[1-2] CPUs=8
PartitionName=main Nodes=ALL Default=YES State=UP
"""
PROGRAM = """
import os, signal, sys, time
import multiverso as mv

what = sys.argv[1]
mv.init()
me = mv.worker_id()
table = mv.ArrayTableHandler(1000)
if what == "adds":
    table.add([me + 1.0] * 1000)
    mv.barrier()
    sys.stdout.write(f"worker {me} on {os.environ['SLURMD_NODENAME']} reads {table.get()[0]:g}\\n")
elif what == "dies":
    mv.barrier()
    if me == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    mv.barrier()
else:
    with mv.checkpoint("saved", every=5, resume=True) as checkpoint:
        own = checkpoint.restore() or {"step": 0}
        step = own["step"]
        open(f"begun-{me}-{step}", "w").close()
        while step < 20 or not os.path.exists("requeued"):
            table.add([1.0] * 1000)
            table.get()
            step += 1
            checkpoint.step({"step": step})
            time.sleep(0.02)
    mv.barrier()
    open(f"ended-{me}", "w").close()
mv.shutdown()
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes 2 --ntasks-per-node 2 --requeue --open-mode append --output said
srun --kill-on-bad-exit=1 --resv-ports=1 {python} program.py saves
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    (made / "program.py").write_text(PROGRAM)
    (made / "job.sh").write_text(SCRIPT.format(python=sys.executable))
    return made


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slurm.conf").write_text(CONFIGURATION)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    with machines(folder / "all", {}) as made:
        for machine in made:
            machine.environ["SLURM_CONF"] = str(folder / "slurm.conf")
            own = ("--log-file=/run/munge/log", "--seed-file=/run/munge/seed", "--pid-file=/run/munge/pid")
            machine.run("mkdir", "-p", "/run/slurm/state", "/run/slurm/spool", "/run/munge").check_returncode()
            machine.run("munged", "--force", f"--key-file={folder / 'munge.key'}", *own).check_returncode()
        made[0].run("slurmctld").check_returncode()
        for machine in made:
            machine.run("slurmd").check_returncode()
        wait_until(lambda: made[0].run("sinfo", "-h", "-o", "%D %t").stdout == "2 idle\n", "Slurm is there")
        yield made


def srun(nodes: list[Machine], folder: Path, *words: object) -> tuple[int, str, str]:
    step = ("srun", "--nodes", 2, "--ntasks-per-node", 2, "--time", 3, *words)
    done = nodes[0].run(*step, folder=folder)
    return done.returncode, done.stdout, done.stderr


def test_srun_on_two_nodes(nodes: list[Machine], folder: Path) -> None:
    code, out, err = srun(nodes, folder, sys.executable, "program.py", "adds")
    assert code == 0, err
    wanted = [f"worker {i} on node{1 + i // 2} reads 10" for i in range(4)]
    assert sorted(out.splitlines()) == wanted
    code, out, err = srun(nodes, folder, "-m", "cyclic", "--resv-ports=1", sys.executable, "program.py", "adds")
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"worker {i} on node{1 + i % 2} reads 10" for i in range(4)]


def test_a_task_that_dies_is_named_in_the_others_waits_and_ends_the_step(nodes: list[Machine], folder: Path) -> None:
    code, _, err = srun(nodes, folder, sys.executable, "program.py", "dies")
    assert code != 0
    assert re.search(r"WorkerLostError: worker 3 \(pid \d+ on node2\) died", err), err
    code, _, err = srun(nodes, folder, "--kill-on-bad-exit=1", sys.executable, "program.py", "dies")
    assert code != 0
    nothing_left(nodes)


def test_a_job_that_is_cancelled_leaves_nothing_and_one_that_is_requeued_goes_on(
    nodes: list[Machine], folder: Path
) -> None:
    submitted = nodes[0].run("sbatch", "--parsable", "job.sh", folder=folder)
    job = submitted.stdout.strip()
    assert job, submitted
    wait_until((folder / "saved" / "manifest.json").exists, "a checkpoint is there", 120)
    nodes[0].run("scontrol", "requeue", job).check_returncode()
    wait_until(lambda: "State=PENDING" in nodes[0].run("scontrol", "show", "job", job).stdout, "it is queued")
    nothing_left(nodes)
    (folder / "requeued").touch()
    wait_until(lambda: len(list(folder.glob("ended-*"))) == 4, "the job ends", 180)
    begun = {int(path.name.rpartition("-")[2]) for path in folder.glob("begun-*")}
    assert 0 in begun
    assert max(begun) >= 5, begun

    (folder / "requeued").unlink()
    job = nodes[0].run("sbatch", "--parsable", "job.sh", folder=folder).stdout.strip()
    number = len(list(folder.glob("begun-*")))
    wait_until(lambda: len(list(folder.glob("begun-*"))) > number, "it goes on once more", 120)
    nodes[0].run("scancel", job).check_returncode()
    nothing_left(nodes)


def nothing_left(nodes: list[Machine]) -> None:
    for machine in nodes:
        wait_until(lambda m=machine: not m.processes("program.py"), f"nothing is left on {machine.name}")  # type: ignore[misc]
        wait_until(lambda m=machine: not m.processes("node_process"), f"no node is left on {machine.name}")  # type: ignore[misc]
