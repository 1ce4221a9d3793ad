"""`docs/how-to/ssh.md` with OpenSSH: two machines with an sshd each, whose host keys no other file knows."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, machines, missing, wait_until

if reason := missing("sshd", "ssh", "ssh-keygen"):
    pytest.exit(f"make engines: {reason} (Debian: apt-get install openssh-server openssh-client iproute2)", 2)

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
import os, signal, sys, time
import multiverso as mv

what = sys.argv[1]
mv.init()
me = mv.worker_id()
table = mv.ArrayTableHandler(1000)
mv.barrier()
if me == 3 and mv.incarnation() == 0:
    if what == "code":
        sys.exit(7)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
if what == "adds":
    table.add([me + 1.0] * 1000)
    mv.barrier()
    print(f"worker {me} reads {table.get()[0]:g} in {os.getcwd()}, {sys.argv[2:]}, {sys.stdin.read()!r}")
    sys.exit()
print("begun", flush=True)
if what == "replaced":
    back = mv.Counter("back")
    if mv.incarnation():
        back.fetch_add()
    while back.value < 2:
        time.sleep(0.05)
elif what == "alone":
    while len(mv.live_workers()) == 4:
        time.sleep(0.05)
else:
    while True:
        mv.barrier()
        time.sleep(0.05)
mv.barrier()
print(f"worker {me}, life {mv.incarnation()}, ended", flush=True)
"""
SSHD = """
HostKey {folder}/host-{name}
AuthorizedKeysFile {folder}/own.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile /run/sshd.pid
"""
SSH = """
Host gpu1
    HostName node1
Host *
    IdentityFile {folder}/own
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("it's a folder")
    (made / "the program.py").write_text(PROGRAM)
    return made


@pytest.fixture(scope="module")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    keys = tmp_path_factory.mktemp("keys")
    for name in ("own", "host-node1", "host-node2"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    with machines(tmp_path_factory.mktemp("machines") / "all", {"ssh/ssh_config": SSH.format(folder=keys)}) as made:
        known = ""
        for machine in made:
            (keys / f"sshd-{machine.name}").write_text(SSHD.format(folder=keys, name=machine.name))
            known += f"{machine.name} {(keys / f'host-{machine.name}.pub').read_text()}"
            machine.run("mkdir", "/run/sshd").check_returncode()
            machine.run(shutil.which("sshd"), "-f", keys / f"sshd-{machine.name}").check_returncode()
        (keys / "known_hosts").write_text(known)
        yield made


def run(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "multiverso", "run", "--hosts", "node1,node2", "-n", 4, *arguments]


def begin(nodes: list[Machine], folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Starts a job on node1, and waits until its workers train."""
    log = folder / "said"
    with log.open("w") as said:
        job = nodes[0].start(*run(*arguments), folder=folder, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
    wait_until(lambda: log.read_text().count("begun") == 4 or job.poll() is not None, "the workers begin", 120)
    assert job.poll() is None, log.read_text()
    return job


def ended(nodes: list[Machine], folder: Path, job: subprocess.Popen[str]) -> str:
    """Waits until nothing of a job is left on the machines; returns what it said."""
    job.wait(60)
    for machine in nodes:
        wait_until(lambda m=machine: not m.processes("the program.py"), f"nothing is left on {machine.name}")  # type: ignore[misc]
    return (folder / "said").read_text()


def test_the_page_from_the_doctor_to_a_job(nodes: list[Machine], folder: Path) -> None:
    doctor = [sys.executable, "-m", "multiverso", "doctor", "--hosts"]
    done = nodes[0].run(*doctor, "gpu1,node2", folder=folder)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "These hosts can run a job together."), done
    program = ("the program.py", "adds", "two words", "$HOME 'x\"")
    done = nodes[0].run(*run(*program), folder=folder)
    words = f"reads 10 in {folder}, {list(program[2:])}, ''"
    assert sorted(done.stdout.splitlines()) == [f"[{i}] worker {i} {words}" for i in range(4)], done
    done = nodes[0].run(*(word if word != "node1,node2" else "gpu1,node2" for word in run(*program)), folder=folder)
    assert done.returncode == 0, done.stderr


def test_hosts_that_cannot_be_reached_are_named_with_what_to_do(nodes: list[Machine], folder: Path) -> None:
    doctor = [sys.executable, "-m", "multiverso", "doctor", "--hosts"]
    done = nodes[0].run(*doctor, f"node1,{nodes[1].address},nobody", folder=folder)
    assert done.returncode == 1
    assert f"`ssh {nodes[1].address}` from here, and answer yes" in done.stdout
    assert "Is that its name?" in done.stdout
    done = nodes[0].run(*(word if word != "node1,node2" else "node1,nobody" for word in run("x.py")), folder=folder)
    assert done.returncode == 255
    assert "multiverso: nobody could not be reached by `ssh" in done.stderr


def test_who_has_failed_is_named_with_its_host(nodes: list[Machine], folder: Path) -> None:
    for how, code, words in (("code", 7, "failed with exit code 7"), ("killed", 137, "was killed by SIGKILL")):
        done = nodes[0].run(*run("the program.py", how), folder=folder)
        assert done.returncode == code, done.stderr
        assert re.search(rf"^multiverso: worker 3 \(pid \d+ on node2\) {words}; the others", done.stderr, re.M), done


def test_nothing_is_left_on_any_host_however_the_job_ends(nodes: list[Machine], folder: Path) -> None:
    job = begin(nodes, folder, "the program.py", "trains")
    assert nodes[1].processes("the program.py")
    nodes[0].run("pkill", "-INT", "-f", "multiverso run --hosts")
    assert "ended by a signal" in ended(nodes, folder, job)
    assert job.returncode == 128 + signal.SIGINT
    job = begin(nodes, folder, "the program.py", "trains")
    nodes[0].run("pkill", "-KILL", "-f", "multiverso run --hosts")
    ended(nodes, folder, job)
    job = begin(nodes, folder, "the program.py", "trains")
    nodes[1].run("pkill", "-KILL", "-f", "sshd: root@notty")
    assert "multiverso: node2 could not be reached" in ended(nodes, folder, job)
    assert job.returncode == 255


def test_a_host_whose_connection_ends_is_replaced(nodes: list[Machine], folder: Path) -> None:
    job = begin(nodes, folder, "--on-failure", "continue", "--replace", 1, "the program.py", "replaced")
    nodes[1].run("pkill", "-KILL", "-f", "sshd: root@notty")
    said = ended(nodes, folder, job)
    assert job.returncode == 0, said
    for worker, life in enumerate((0, 0, 1, 1)):
        assert f"[{worker}] worker {worker}, life {life}, ended" in said
    assert "node2 (pid " in said
    assert "was lost; it is started again (1 of at most 1 replacements)" in said


def test_platoons_launcher_starts_a_controller_on_each(nodes: list[Machine], folder: Path) -> None:
    (folder / "sum_worker.py").write_text(
        "from platoon import Worker\n"
        "worker = Worker()\n"
        "assert float(worker.all_reduce([worker.global_rank + 1.0])[0]) == 10.0\n"
    )
    launcher = (sys.executable, "-m", "platoon.launcher", "sum", "-D", "cpu", "cpu")
    done = nodes[0].run(*launcher, "-H", "gpu1", "node2", folder=folder)
    assert done.returncode == 0, done
    assert "success: 4 workers" in done.stdout


def test_a_host_that_falls_silent_keeps_nobody(nodes: list[Machine], folder: Path) -> None:
    """Its power is cut: no connection is ended, neither that of its node nor that of ssh."""
    job = begin(nodes, folder, "--on-failure", "continue", "--host-grace", 5, "the program.py", "alone")
    nodes[1].plug(False)
    nodes[1].end()
    job.wait(120)
    said = (folder / "said").read_text()
    assert job.returncode == 0, said
    assert "[0] worker 0, life 0, ended" in said
    assert "multiverso: node2 was lost; the others continue." in said
