"""What `multiverso run` shows of its workers: whole lines, colours, log files, JSON, readers that are slow or gone."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import (
    SECONDS,
    WAIT,
    OnTerminal,
    Running,
    command,
    environ,
    multiverso,
    script,
    wait_until_gone,
    wait_until_written,
)


def test_lines_are_whole_prefixed_and_complete(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        """
import os
worker = os.environ["MULTIVERSO_WORKER_ID"].encode()
for i in range(500):
    for part in (b"<%s %d " % (worker, i), worker * 3000, b">\\n"):
        os.write(1, part)
os.write(1, b"no newline at the end")
os.write(2, b"to stderr\\n")
""",
    )
    done = multiverso("run", "-n", 4, job)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for worker in range(4):
        own = [line.removeprefix(f"[{worker}] ") for line in lines if line.startswith(f"[{worker}] ")]
        expected = [f"<{worker} {i} {str(worker) * 3000}>" for i in range(500)]
        assert own == [*expected, "no newline at the end"]
    assert len(lines) == 4 * 501
    told = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert sorted(told) == [f"[{worker}] to stderr" for worker in range(4)]


def test_bytes_pass_through_as_they_are(tmp_path: Path) -> None:
    job = script(tmp_path, r"import os; os.write(1, b'\xff\x00\x80 \r\nprogress 1\rprogress 2\n\n\xfe')")
    done = subprocess.run(command("run", job), capture_output=True, timeout=SECONDS, check=True)
    assert done.stdout == b"[0] \xff\x00\x80 \r\n[0] progress 2\n[0] \n[0] \xfe\n"


def test_a_terminal_shows_what_a_worker_has_begun(tmp_path: Path) -> None:
    """A progress bar moves, a question is asked, and lines of others scroll above them."""
    job = script(
        tmp_path,
        WAIT
        + """
arrived = pathlib.Path(sys.argv[1])
if worker == 0:
    for percent in (10, 20):
        os.write(2, b"\\r %d percent" % percent)
    input("go on? ")
    arrived.touch()
while not arrived.exists():
    time.sleep(0.01)
print("a line of", worker)
""",
    )
    running = OnTerminal(command("run", "-n", 2, job, tmp_path / "arrived"), TERM="xterm", NO_COLOR="1")
    running.read_until(b"[0]  20 percent")
    running.read_until(b"[0] go on?")
    os.write(running.terminal, b"yes\n")
    running.read_until(b"a line of 0\r\n")
    running.read_until(b"a line of 1\r\n")
    running.read_until(b"shared nothing")
    assert running.seen.count(b" 20 percent\r\n") >= 1, "it ends as a line"
    assert running.end() == 0


def test_colour_on_a_terminal_only(tmp_path: Path) -> None:
    job = script(tmp_path, "print('hello')")
    assert "\x1b" not in multiverso("run", job).stdout
    ours, theirs = pty.openpty()
    try:
        env = environ(NO_COLOR=None, TERM="xterm")
        subprocess.run(command("run", job), stdout=theirs, timeout=SECONDS, check=True, env=env)
        said = b""
        while not said.endswith(b"\n"):
            said += os.read(ours, 1000)
        assert re.fullmatch(rb"\x1b\[\d+m\[0\]\x1b\[0m hello\r\n", said)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_closed_reader_ends_the_job(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "while True: print('y' * 1000, flush=True)")
    line = " ".join([*command("run", "-n", 2, job), "| head -n 1; echo ${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.splitlines()[1] == str(128 + signal.SIGPIPE)


@pytest.mark.parametrize("options", [[], ["--json"], ["--on-failure", "continue"]])
@pytest.mark.parametrize(
    "then", ["while True: print('y' * 1000, flush=True)", "print('y' * 200_000, flush=True); rest()"]
)
def test_ctrl_c_works_while_nobody_reads_the_output(tmp_path: Path, options: list[str], then: str) -> None:
    job = script(tmp_path, WAIT + "up()\n" + then)
    running = Running(command("run", "-n", 2, *options, job))
    running.lines(1)
    running.send(signal.SIGINT)
    assert running.process.wait(timeout=SECONDS) == 128 + signal.SIGINT
    running.end()


# Less than a pipe holds, so that the workers end; and more than one pipe holds, with both workers' prefixes.
SOME = "pathlib.Path(str(worker)).write_text(str(os.getpid())); print(('y' * 100 + chr(10)) * 500, flush=True)\n"


def ended_but_not_read(folder: Path, options: list[str]) -> Running:
    """A job whose workers are gone, while nobody has read a line of it: it waits."""
    running = Running(command("run", "-n", 2, *options, "-m", "job"), PYTHONPATH=str(folder), HERE=str(folder))
    pids = [folder / str(worker) for worker in range(2)]
    wait_until_written(pids)
    assert not wait_until_gone([int(pid.read_text()) for pid in pids])
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(timeout=2.5)  # longer than the launcher waits for output that a grandchild holds open
    return running


@pytest.mark.parametrize(
    ("options", "then", "code", "reason"),
    [(["--on-failure", "continue"], "sys.exit(5)", 5, "finished"), (["--timeout", "15"], "rest()", 124, "timeout")],
)
def test_a_slow_reader_gets_everything(tmp_path: Path, options: list[str], then: str, code: int, reason: str) -> None:
    script(tmp_path, WAIT + "os.chdir(os.environ['HERE'])\n" + SOME + then)
    ended, out, _ = ended_but_not_read(tmp_path, ["--json", *options]).end()
    events = [json.loads(line) for line in out.splitlines()]
    assert sum(event["event"] == "line" for event in events) == 2 * 501
    assert (events[-1]["event"], events[-1]["reason"]) == ("summary", reason)
    assert ended == events[-1]["exit_code"] == code


def test_ctrl_c_ends_the_wait_for_a_slow_reader(tmp_path: Path) -> None:
    script(tmp_path, WAIT + "os.chdir(os.environ['HERE'])\n" + SOME)
    running = ended_but_not_read(tmp_path, [])
    running.send(signal.SIGUSR1)  # asks who waits for whom, and ends nothing
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(timeout=1)
    running.send(signal.SIGINT)
    assert running.process.wait(timeout=SECONDS) == 0  # the job had succeeded
    running.end()


def test_log_files_hold_each_workers_output(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "print('out', worker); print('err', worker, file=sys.stderr)")
    logs = tmp_path / "new" / "logs"
    done = multiverso("run", "-n", 2, "--log-dir", logs, job)
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    for worker in range(2):
        lines = (logs / f"worker-{worker}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {worker}", f"out {worker}"]


def test_json(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "os.write(1, b'a \\xff b\\nlast')\nif worker: sys.exit(9)\nrest()")
    done = multiverso("run", "-n", 2, "--json", job)
    assert done.returncode == 9
    events = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [event for event in events if event["event"] == "line" and event["worker"] == 1]
    assert [line["text"] for line in lines] == ["a \\xff b", "last"]
    assert {event["worker"] for event in events if event["event"] == "start"} == {0, 1}
    ends = {event["worker"]: event for event in events if event["event"] == "exit"}
    assert ends[1]["code"] == 9
    assert ends[0]["signal"] == "SIGTERM"
    assert ends[0]["ended_by_us"]
    summary = events[-1]
    assert summary["event"] == "summary"
    assert (summary["exit_code"], summary["failed_worker"], summary["reason"]) == (9, 1, "failed")
    assert done.stderr == ""


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    job = script(tmp_path, "for i in range(100): print(i)")
    done = multiverso("run", "-n", 1, "--log-dir", tmp_path, job)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"[0] {i}" for i in range(100)]
    assert "worker-0.log: No space left on device" in done.stderr


def test_a_full_disk_under_our_output_ends_neither_the_job_nor_its_reading(tmp_path: Path) -> None:
    """Nobody read the pipes any more, and a worker that wrote more than they hold waited for ever."""
    job = script(tmp_path, "for _ in range(3000): print('z' * 100)")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "multiverso", "run", "--timeout", "60", str(job)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        "multiverso: what the workers write is lost: No space left on device; the job continues\n",
    )


def test_a_line_without_an_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    job = script(tmp_path, "import os\nfor _ in range(3): os.write(1, b'z' * 1_000_000)")
    lines = multiverso("run", job).stdout.splitlines()
    assert len(lines) > 1
    assert "".join(line.removeprefix("[0] ") for line in lines) == "z" * 3_000_000
