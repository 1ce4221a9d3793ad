"""How a job of `multiverso run` ends: signals, deadlines, workers that do not end, a launcher that dies."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from launch_support import SECONDS, WAIT, OnTerminal, Running, command, multiverso, script, wait_until_gone

from multiverso.launch.job import Job
from multiverso.launch.processes import Guard, WorkerCommand


def test_stop_ends_workers_that_ignore_sigterm_and_what_they_started(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        WAIT
        + """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
stripped = subprocess.Popen(["env", "-i", "sleep", "1000"])
print(child.pid, daemon.pid, stripped.pid, flush=True)
if worker == 0:
    sys.stdin.readline()
    sys.exit(5)
rest()
""",
    )
    running = subprocess.Popen(
        command("run", "-n", 2, job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with running:
        assert running.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in running.stdout.readline().split()[1:]]
        assert len(pids) == 6
        out, err = running.communicate("go\n", timeout=SECONDS)
    assert running.returncode == 5, out + err
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_workers_and_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    job = script(
        tmp_path,
        WAIT
        + """
def handle(number, frame):
    os.write(1, b"got %s\\n" % signal.Signals(number).name.encode())  # a print may be what it interrupts
    sys.exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), handle)
up()
rest()
""",
    )
    running = Running(command("run", "-n", 2, "--grace", SECONDS, job))
    running.lines(2)
    running.send(number)
    code, out, err = running.end()
    assert code == 128 + number, err
    assert sorted(out.splitlines()) == [f"[0] got {number.name}", f"[1] got {number.name}"]


def test_ctrl_c_on_a_terminal_ends_even_what_ignores_it(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        WAIT
        + """
import subprocess
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
up()
rest()
""",
    )
    running = OnTerminal(command("run", "-n", 2, job))
    seen = running.read_until(b"\r\n", number=2)
    assert running.ctrl_c() == 128 + signal.SIGINT
    assert wait_until_gone([int(pid) for pid in re.findall(rb"up (\d+)", seen)]) == []


def test_sigint_works_where_a_shell_had_it_ignored(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "up()\nrest()")
    run = command("run", "-n", 2, "--grace", SECONDS, "--log-dir", tmp_path, job)
    running = Running(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *run])
    running.lines(2)
    running.send(signal.SIGINT)
    code, _, err = running.end()
    assert code == 128 + signal.SIGINT
    assert re.fullmatch(r"multiverso: ended by a signal after .* s\.\n", err), "nobody asks where each was"
    for worker in range(2):
        assert "KeyboardInterrupt" in (tmp_path / f"worker-{worker}.log").read_text()


def test_sigusr1_reaches_those_that_handle_it_and_ends_nobody(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        WAIT
        + """
arrived = pathlib.Path(sys.argv[1])
if worker == 0:
    signal.signal(signal.SIGUSR1, lambda *_: arrived.touch())
up()
while not arrived.exists():
    time.sleep(0.02)
""",
    )
    running = Running(command("run", "-n", 2, job, tmp_path / "arrived"))
    running.lines(2)
    running.send(signal.SIGUSR1)
    code, _, err = running.end()
    assert code == 0, err
    assert (tmp_path / "arrived").exists()


def test_killing_the_launcher_leaves_no_process(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        WAIT
        + """
import subprocess
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
a = subprocess.Popen(["sh", "-c", "sleep 1000; true"])
b = subprocess.Popen(["sleep", "1000"], start_new_session=True)
c = subprocess.Popen(["env", "-i", "sleep", "1000"])
print(os.getpid(), a.pid, b.pid, c.pid, flush=True)
rest()
""",
    )
    running = Running(command("run", "-n", 3, job))
    pids = [int(pid) for line in running.lines(3) for pid in line.split()[1:]]
    running.send(signal.SIGKILL)
    code, _, _ = running.end()
    assert code == -signal.SIGKILL
    assert len(pids) == 12
    assert wait_until_gone(pids) == []


def test_timeout(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 2, "--timeout", 0.3, script(tmp_path, WAIT + "rest()"))
    assert done.returncode == 124
    assert "took longer than 0.3 s" in done.stderr


IGNORING = (
    WAIT
    + """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
up()
rest()
"""
)


def test_asked_twice_it_does_not_wait_for_the_grace_to_pass(tmp_path: Path) -> None:
    running = Running(command("run", "-n", 2, "--grace", 1000, script(tmp_path, IGNORING)))
    running.lines(2)
    while running.process.poll() is None:
        running.send(signal.SIGINT)
        try:
            running.process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            pass
    assert running.end()[0] == 128 + signal.SIGINT


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    running = Running(["nohup", *command("run", script(tmp_path, WAIT + "up()\nrest()"))])
    running.lines(1)
    running.send(signal.SIGHUP)  # would be handled first, and be the exit code
    running.send(signal.SIGINT)
    assert running.end()[0] == 128 + signal.SIGINT


def test_a_launchers_forked_child_is_not_taken_for_it() -> None:
    with Guard(f"FORKED_BY={os.getpid()}") as guard:
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert guard._process.returncode == 0  # it has swept, and was not killed for not ending
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_of_several_that_were_killed_it_says_which_was_first(tmp_path: Path) -> None:
    """All but the one whose end was seen first were said to have been ended by the launcher."""
    pids: dict[int, int] = {}
    command = ("sleep", "1000"), {**os.environ, "OF_THIS_TEST": str(tmp_path)}
    job = Job(
        [WorkerCommand(*command, files=(tmp_path / "out", tmp_path / "err"))] * 4,
        marker=f"OF_THIS_TEST={tmp_path}",
        on_start=pids.__setitem__,
        lost_workers=lambda: [2, 0],
    )
    with job:
        for worker in (2, 0):
            os.kill(pids[worker], signal.SIGKILL)
        assert wait_until_gone([pids[2], pids[0]]) == []
        job.finish()
    result = job.result()
    first, then = (f"worker {worker} (pid {pids[worker]}) was killed by SIGKILL" for worker in (2, 0))
    assert f"{result}" == f"{first} first, then {then}"
    assert [(end.worker_id, end.signal) for end in result.exits if end.ended_by_us] == [(1, "SIGTERM"), (3, "SIGTERM")]
