"""`multiverso run --hosts`: launchers, nodes and workers in processes of their own, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from networks import Network

from multiverso.hosts.roster import ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.launch import hosts as launching
from multiverso.launch.options import RunOptions
from multiverso.launch.results import JobResult, WorkerExit
from warm import Warm

SECONDS = 100.0
LOGGING = """
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(3)
for step in range(1, 4 + mv.worker_id()):
    table.add([1, 1, 1])
    mv.log(step=step, loss=0.5)
mv.barrier()
mv.shutdown()
"""
FAILING = """
import signal
import multiverso as mv
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # each has to tell what it sees before it is ended
mv.init()
try:
    mv.barrier()
except mv.errors.WorkerLostError:  # of one that has left it, and ended since
    pass
raise ValueError("the reason")
"""
UNEQUAL = """
import multiverso as mv
mv.init(sync=True)
table = mv.ArrayTableHandler(8)
for _ in range(3 + mv.worker_id() // 2):
    table.get()
mv.shutdown()
"""
ADDING = """
import sys
import numpy as np
import multiverso as mv

mv.init()
me, n = mv.worker_id(), mv.workers_num()
table = mv.ArrayTableHandler(50_000, np.full(50_000, 5.0))
rows = mv.MatrixTableHandler(n, 3, name="rows")
for _ in range(10):
    table.add(np.full(50_000, me + 1))
    rows.add(np.ones((1, 3)), row_ids=[me])
mv.barrier()
value = table.get()
print("sum", me, n, value.min(), value.max(), rows.get().sum(), mv.live_workers(), flush=True)
print("to stderr", file=sys.stderr)
mv.barrier()
mv.shutdown()
"""
DYING = """
import os, signal, sys
import multiverso as mv

mv.init()
me, how = mv.worker_id(), sys.argv[1]
if me == 0 and how in ("worker", "code"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it has to tell what it sees before it is ended
try:
    mv.barrier()  # one that is slow to leave it may hear there already that another has died since
    if me == 1 and how == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == ("leader", "code")[me]:
        sys.exit(7)
    if me == 1 and how == "node":
        os.kill(os.getppid(), signal.SIGKILL)
    if me == 0 and how == "coordinator":
        os.kill(os.getppid(), signal.SIGKILL)
    mv.barrier()
except mv.errors.WorkerLostError as error:
    print("lost", error.worker_ids, error, flush=True)
    raise
"""


interpreter: list[Warm] = []


@pytest.fixture(scope="module", autouse=True)
def _launcher(warm: Warm) -> None:
    interpreter.append(warm)


def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher, its imports behind it; what it starts are fresh interpreters."""
    command = ["-m", "multiverso", "run", *map(str, arguments)]
    return interpreter[-1].run(*command, cwd=Path.cwd(), env={**os.environ, **environ}, timeout=SECONDS)


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("hosts", "workers"), [(2, 4), (3, 3)])
def test_a_rehearsal_adds_up_exactly(tmp_path: Path, hosts: int, workers: int) -> None:
    done = run("--hosts", hosts, "-n", workers, "--log-dir", tmp_path / "logs", program(tmp_path, ADDING))
    assert done.returncode == 0, done.stderr
    total = float(5 + 10 * workers * (workers + 1) // 2)
    live = list(range(workers))
    wanted = [f"[{i}] sum {i} {workers} {total} {total} {30.0 * workers} {live}" for i in live]
    assert sorted(done.stdout.splitlines()) == wanted
    assert sum(line.endswith("to stderr") for line in done.stderr.splitlines()) == workers
    assert [f"sum {i} " in (tmp_path / "logs" / f"worker-{i}.log").read_text() for i in live] == [True] * workers


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("worker", 137, "worker 1 (pid {} on host-1) was killed by SIGKILL"),
        ("code", 7, "worker 1 (pid {} on host-1) failed with exit code 7"),
        ("leader", 7, "worker 0 (pid {} on host-0) failed with exit code 7"),
        ("node", 137, "host-1 (pid {}) was killed by SIGKILL"),
        ("coordinator", 137, "host-0 (pid {}) was killed by SIGKILL"),
    ],
)
def test_whoever_is_killed_ends_the_job_with_its_name(tmp_path: Path, how: str, code: int, said: str) -> None:
    done = run("--hosts", 2, "-n", 2, "--grace", 30, program(tmp_path, DYING), how)
    assert done.returncode == code, (done.stdout, done.stderr)
    before, after = said.split("{}")
    assert any(line.startswith(f"multiverso: {before}") and after in line for line in done.stderr.splitlines())
    if how == "leader":
        assert "leads the job" not in done.stderr  # all know already who died
    if how in ("worker", "code"):
        assert "[0] lost (1,) worker 1 (pid " in done.stdout
        assert "on host-1) died" in done.stdout


def test_events_are_those_of_one_job(tmp_path: Path) -> None:
    done = run("--hosts", 2, "-n", 3, "--json", "--summary", program(tmp_path, ADDING))
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert {event["worker"] for event in events if event["event"] == "line"} == {0, 1, 2}
    assert {event["host"] for event in events if event["event"] == "exit"} == {"host-0", "host-1"}
    (status,) = (event["status"] for event in events if event["event"] == "status")
    assert {type(one["adds"]) for table in status["tables"] for one in table["workers"].values()} == {int}
    assert [link["state"] for link in status["links"]] in (["ended"], ["connected"])
    (summary,) = (event for event in events if event["event"] == "summary")
    assert summary is events[-1]
    assert (summary["reason"], summary["exit_code"], summary["failed_worker"]) == ("finished", 0, None)
    assert [(one["worker"], one["code"]) for one in summary["workers"]] == [(0, 0), (1, 0), (2, 0)]
    assert [(one["host"], one["code"]) for one in summary["hosts"]] == [("host-0", 0), ("host-1", 0)]
    done = run("--hosts", 2, "-n", 2, "--grace", 30, "--json", program(tmp_path, DYING), "code")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, summary["exit_code"], summary["failed_worker"]) == (7, 7, 1)
    assert next(one for one in summary["workers"] if one["worker"] == 1)["host"] == "host-1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hosts", 3, "-n", 2), "2 worker(s) cannot be spread over 3 hosts"),
        (("--hosts", 0, "-n", 2), "the number of hosts must be from 1"),
        (("--hosts", 2, "-n", 2, "--wire", "int9"), "a wire format is one of"),
        (("-n", 2, "--every", "3"), "--every: useful between hosts only"),
        (("--hosts", 2, "-n", 2, "--port", 99_999), "99999 is not in the range"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: tuple[object, ...], said: str) -> None:
    done = run(*arguments, program(tmp_path, ADDING))
    assert done.returncode == 2
    assert said in done.stderr


def test_unequal_rounds_on_different_hosts_are_told_at_the_end(tmp_path: Path) -> None:
    done = run("--hosts", 2, "-n", 3, program(tmp_path, UNEQUAL))
    assert done.returncode == 0
    said = "table 1: workers ended after different numbers of rounds (workers 0, 1 after 3, worker 2 after 4)"
    assert done.stderr.count(said) == 1, done.stderr


def test_a_summary_has_what_all_hosts_workers_have_done(tmp_path: Path) -> None:
    done = run("--hosts", 2, "-n", 2, "--summary", program(tmp_path, LOGGING))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d) +(\d) .*step (\d): loss=0.5$", done.stderr, re.MULTILINE) == [
        ("0", "3", "3"),
        ("1", "4", "4"),
    ]
    assert "multiverso: 2 workers on host-0, host-1" in done.stderr.splitlines()
    assert re.search(r"^multiverso: 2 workers ran for ", done.stderr, re.MULTILINE)


@pytest.fixture
def by_ssh(tmp_path: Path, port: int) -> list[object]:
    """Options that reach two hosts by a command in ssh's place, which runs on this machine what it is given."""
    ssh = tmp_path / "reach"  # only what is called ssh is given options of its
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    ssh.chmod(0o755)
    return ["--hosts", "127.0.0.1,localhost", "--ssh", ssh, "--port", port, "--insecure-fabric"]


@pytest.mark.parametrize(
    ("options", "values"), [((), "35.0 35.0 60.0"), (("--wire", "int8", "--between", "mean"), "20.0 20.0 30.0")]
)
def test_hosts_by_name_add_up_exactly(
    tmp_path: Path, by_ssh: list[object], options: tuple[str, ...], values: str
) -> None:
    done = run(*by_ssh, *options, "-n", 2, program(tmp_path, ADDING))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{i}] sum {i} 2 {values} [0, 1]" for i in (0, 1)]


def test_a_failure_on_a_host_by_name_ends_all_with_its_code(tmp_path: Path, by_ssh: list[object]) -> None:
    done = run(*by_ssh, "-n", 2, "--grace", 30, program(tmp_path, DYING), "code")
    assert done.returncode == 7, done.stderr
    assert "on localhost) died" in done.stdout


def test_what_a_program_ends_with_where_its_configuration_is_wrong_is_the_jobs_code(tmp_path: Path) -> None:
    """78 is EX_CONFIG for many; it was taken for a launcher's refusal, whose code is 2."""
    done = run("--hosts", 2, "-n", 2, program(tmp_path, "raise SystemExit(78)"))
    assert done.returncode == 78, done.stderr


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, by_ssh: list[object]) -> None:
    (tmp_path / "reach").write_text('#!/bin/sh\n[ "$1" = localhost ] && exit 255\nexec sleep 60\n')
    done = run(*by_ssh, "-n", 2, program(tmp_path, ADDING))
    assert done.returncode == 255
    assert "multiverso: localhost could not be reached by" in done.stderr


@pytest.mark.parametrize("hosts", ["a,a", "a,-oProxyCommand=x", "a,b;c", ",", ""])
def test_what_is_no_list_of_hosts_is_refused(tmp_path: Path, hosts: str) -> None:
    done = run("--hosts", hosts, "-n", 2, program(tmp_path, ADDING))
    assert done.returncode == 2
    assert done.stderr.startswith("multiverso: --hosts")


def test_addresses_of_ipv6_are_hosts_too() -> None:
    options = RunOptions("train.py", workers=2, hosts="me@[fd00::2],node-b", ssh="sh", encrypted=False)
    plan = launching.plan_of(options)
    roster, commands = plan.roster, launching.host_commands(options, plan, os.environ)
    assert roster.names == ("me@fd00::2", "node-b")  # which ssh takes
    assert roster.addresses == ("fd00::2", "node-b")
    assert "me@fd00::2" in commands[0].arguments


@pytest.mark.parametrize(("ssh", "told"), [("ssh -p 22", True), ("sh", False)])
def test_ssh_is_told_for_how_long_a_host_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str, told: bool
) -> None:
    """A host whose power is pulled ended no connection: it was waited for when all others were done."""
    (tmp_path / "ssh").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = RunOptions("train.py", workers=2, hosts="node-a,node-b", ssh=ssh, encrypted=False, host_grace=60.0)
    commands = launching.host_commands(options, launching.plan_of(options), os.environ)
    words = " ".join(commands[1].arguments)
    assert ("-o ServerAliveInterval=21 -o ServerAliveCountMax=3 node-b" in words) == told


def test_who_left_with_exit_code_0_while_others_needed_it_is_what_is_looked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The host of the one that left has nothing to say, and the other one says it of the first."""
    ends = tuple(WorkerExit(host, 7, code, None, False, 1.0) for host, code in ((0, 143), (1, 0)))
    result = JobResult("failed", 143, ends[0], None, ends, 1.0)
    names = ("host-0", "host-1")
    launching.tell_end(RunOptions("train.py", workers=2, hosts="2"), result, names, lambda _: "")
    assert "a worker ended with exit code 0 and without multiverso.shutdown()" in capfd.readouterr().err
    # a summary may have come after it
    launching.tell_end(
        RunOptions("train.py", workers=2, hosts="2"), result, names, lambda _: "multiverso: 2 workers", True
    )
    assert capfd.readouterr().err == "", "one of them has said which worker failed"


@pytest.mark.parametrize(("reason", "said"), [("signal", 1), ("timeout", 1), ("finished", 0)])
def test_a_job_that_is_ended_before_any_host_was_started_says_why(
    reason: Any, said: int, capfd: pytest.CaptureFixture[str]
) -> None:
    result = JobResult(reason, 130, None, None, (), 0.1)
    launching.tell_end(RunOptions("train.py", hosts="2", timeout_seconds=1.0), result, (), lambda _: "")
    assert len(capfd.readouterr().err.splitlines()) == said


def test_what_cannot_be_said_on_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of several hosts ended with a traceback, and with 1 in place of the code of what had failed."""
    end = WorkerExit(0, 7, 3, None, False, 1.0)
    result = JobResult("failed", 3, end, None, (end,), 1.0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        launching.tell_end(RunOptions("train.py", workers=1, hosts="1"), result, ("host-0",), lambda _: "")
        monkeypatch.undo()


def test_what_several_nodes_say_is_shown_once_with_who_else_said_it(capfd: pytest.CaptureFixture[str]) -> None:
    """A job of 64 hosts whose first one was killed ended with 63 equal lines about the connection to it."""
    shown = launching._Shown([f"host-{host}" for host in range(4)])
    over = b"multiverso: node: the connection to host-0, which leads the job, is over: it ended\n"
    for host in (2, 1, 3):
        shown(host, "stderr", b"[%d] one of a worker\n%s" % (host, over), b"")
    shown(3, "stderr", b"[3] one of a worker\nmultiverso: node: out of memory\n", b"")
    shown(2, "stderr", over, b"")  # its own, once more
    written = capfd.readouterr().err.splitlines()
    workers = [f"[{host}] one of a worker" for host in (2, 1, 3, 3)]
    last = over.decode().strip()
    assert written == [workers[0], last, *workers[1:], "multiverso: node: out of memory", last]
    assert shown.folded() == ["the same from 2 others (host-1, host-3): " + last.removeprefix("multiverso: node: ")]


def test_workers_of_several_hosts_that_fail_of_one_cause_show_one_traceback(tmp_path: Path) -> None:
    """Each host's launcher had left out its own workers' repetitions only, and each said which of them had failed."""
    done = run("--hosts", 3, "-n", 5, "--grace", 30, program(tmp_path, FAILING))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert re.search(
        r"^\[\d\] the same from 4 others \(workers (\d, ){3}\d\): ValueError: the reason$", done.stderr, re.M
    )
    assert len(re.findall(r"^multiverso: worker \d .* failed with exit code 1[.;]", done.stderr, re.M)) == 1


def test_launchers_whose_workers_failed_of_one_cause_are_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    shown = launching._Shown(("a", "b", "c"))
    words = "worker %d (pid 1%d on %s) failed with exit code 1%s. Its last line: ValueError: x"
    ended, goes_on = "; the others were ended", "; the others continue"
    said = [(0, 4, "a", ended), (1, 7, "b", ended), (2, 9, "c", goes_on), (1, 6, "b", goes_on), (2, 8, "c", "")]
    lines = [words % (worker, worker, name, end) for _, worker, name, end in said]
    # where two had failed by themselves before the others were ended
    lines[1] = lines[1].replace(" code 1;", " code 1 first, then worker 6 (pid 16 on b) failed with exit code 1;")
    for (host, *_), line in zip(said, lines, strict=True):
        shown(host, "stderr", f"multiverso: {line}\n".encode(), b"")
    written = capfd.readouterr().err.splitlines()
    assert written == [f"multiverso: {lines[at]}" for at in (0, 2, 3)]  # who is missing in a job that goes on is news
    assert shown.folded() == [f"the same from 2 others (b, c): {lines[0]}"]


def test_a_host_that_waits_for_a_first_one_that_does_not_answer_is_ended_by_ctrl_c() -> None:
    """Once its node was being made it took no signal, until the first host answered or the launcher killed it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        credentials = new_credentials(encrypted=False).to_text()
        roster = Roster(1, ("a", "b"), (1, 1), silent.getsockname(), credentials, rehearsal=True)
        environ = {**os.environ, ROSTER_VARIABLE: roster.as_text()}
        command = [sys.executable, "-m", "multiverso", "run", "-n", "2", "true"]
        with subprocess.Popen(command, env=environ) as process:
            silent.settimeout(SECONDS)
            with silent.accept()[0] as connection:
                assert connection.recv(4) == b"MVHS"
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == -signal.SIGINT  # it would try for a minute


def test_two_agents_of_torchrun_are_two_hosts_of_one_job(tmp_path: Path, network: Network, port: int) -> None:
    torchrun = [Path(sys.executable).parent / "torchrun", "--nnodes", 2, "--nproc-per-node", 1]
    place = ["--master-addr", network.addresses[0], "--master-port", port]
    agents = [
        subprocess.Popen(
            list(map(str, [*inside, *torchrun, "--node-rank", rank, *place, program(tmp_path, ADDING)])),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, inside in enumerate(network.inside)
    ]
    try:
        said = [agent.communicate(timeout=SECONDS) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert [out.splitlines() for out, _ in said] == [[f"sum {i} 2 35.0 35.0 60.0 [0, 1]"] for i in range(2)]
