"""`multiverso run` with real processes: output, exit codes, signals, what is left behind."""

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
    OnTerminal,
    Running,
    command,
    environ,
    multiverso,
    script,
    wait_until_gone,
    wait_until_written,
)

from multiverso.launch import visible_gpus

WAIT = """
import os, pathlib, signal, sys, time
def up():
    print("up", os.getpid(), flush=True)
def rest():
    while True:
        time.sleep(0.02)  # a signal that comes just before a sleep does not end it, and is handled after it
worker = int(os.environ["MULTIVERSO_WORKER_ID"])
"""


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


def test_arguments_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    job = script(tmp_path, "import sys; print(sys.argv[1:])")
    done = multiverso("run", "-n", 1, job, "-n", "7", "--lr", "0.1", "--help", "--", "-x")
    assert done.stdout == "[0] ['-n', '7', '--lr', '0.1', '--help', '--', '-x']\n"


def test_a_module_a_program_and_a_folder_run(tmp_path: Path) -> None:
    assert multiverso("run", "-m", "json.tool", "--help").stdout.startswith("[0] usage:")
    done = multiverso("run", "-n", 2, "echo", "x")
    assert sorted(done.stdout.splitlines()) == ["[0] x", "[1] x"]
    script(tmp_path, "print('main of a folder')", "__main__.py")
    assert multiverso("run", tmp_path).stdout == "[0] main of a folder\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", 2, "no_such_script.py"], "no file no_such_script.py"),
        (["no-such-program"], "no-such-program is not found"),
        (["-n", 0, "true"], "-n 0: the number of workers must be from 1 to 64"),
        (["-n", 65, "true"], "-n 65: the number of workers must be from 1 to 64"),
        (["--timeout", 0, "true"], "--timeout 0"),
        (["--grace", -1, "true"], "--grace -1"),
        (["--gpus", "0,x", "true"], "--gpus '0,x'"),
        (["--log-dir", "/proc/nowhere", "true"], "--log-dir /proc/nowhere"),
    ],
)
def test_what_cannot_be_started_is_said_in_one_sentence(arguments: list[object], words: str) -> None:
    done = multiverso("run", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_file_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    done = multiverso("run", script(tmp_path, "#!/no/such/interpreter\n", "tool"))
    assert done.returncode == 2
    assert "is not executable" in done.stderr
    (tmp_path / "tool").chmod(0o755)
    done = multiverso("run", tmp_path / "tool")
    assert done.returncode == 127
    assert "cannot run" in done.stderr


def test_the_failed_workers_exit_code_and_its_traceback_once(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "if worker == 2: raise ValueError('the reason')\nrest()")
    done = multiverso("run", "-n", 4, job)
    assert done.returncode == 1
    said = r"^multiverso: worker 2 \(pid \d+\) failed with exit code 1; the others were ended\. "
    assert re.search(said + "Its last line: ValueError: the reason$", done.stderr, re.M)
    assert done.stderr.count("Traceback") == 1
    assert "[2] ValueError: the reason\n" in done.stderr


def test_a_killed_workers_signal(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "if worker == 1: os.kill(os.getpid(), signal.SIGKILL)\nrest()")
    done = multiverso("run", "-n", 2, job)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"worker 1 \(pid \d+\) was killed by SIGKILL", done.stderr)


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
        command("run", "-n", 2, job),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with running:
        assert running.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in running.stdout.readline().split()[1:]]
        assert len(pids) == 6
        out, err = running.communicate("go\n", timeout=SECONDS)
    assert running.returncode == 5, out + err
    assert wait_until_gone(pids) == []


def test_continue_lets_the_others_go_on(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "sys.exit(4) if worker == 0 else print('finished')")
    done = multiverso("run", "-n", 3, "--on-failure", "continue", job)
    assert done.returncode == 0
    assert done.stdout.count("finished") == 2
    assert "failed with exit code 4; the others go on" in done.stderr


def test_continue_without_any_success_has_the_first_failures_code(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "sys.exit(7)")
    assert multiverso("run", "-n", 2, "--on-failure", "continue", job).returncode == 7


def test_workers_that_never_meet_are_pointed_out(tmp_path: Path) -> None:
    job = script(tmp_path, "import sys; print(sys.argv[1:])")
    done = multiverso("run", job, "--lr", 1, "-n", 2)
    assert done.stdout == "[0] ['--lr', '1', '-n', '2']\n"
    assert f"'-n 2' stands after {job}" in done.stderr
    assert f"multiverso run -n 2 {job}" in done.stderr
    done = multiverso("run", "-np", 2, job, "-n", 7)
    assert sorted(done.stdout.splitlines()) == ["[0] ['-n', '7']", "[1] ['-n', '7']"]
    assert done.stderr == (
        "multiverso: none of the 2 workers called multiverso.init(): they were 2 independent programs, and "
        "shared nothing.\n"
    )
    job.write_text("import multiverso as mv; mv.init(); print('met'); mv.shutdown()")
    done = multiverso("run", "-n2", job)
    assert (done.stdout.count("met"), done.stderr) == (2, "")


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
SOME = (
    "pathlib.Path(str(worker)).write_text(str(os.getpid())); print(('y' * 100 + chr(10)) * 500, flush=True)\n"
)


def ended_but_not_read(folder: Path, options: list[str]) -> Running:
    """A job whose workers are gone, while nobody has read a line of it: it waits."""
    running = Running(
        command("run", "-n", 2, *options, "-m", "job"), PYTHONPATH=str(folder), HERE=str(folder)
    )
    pids = [folder / str(worker) for worker in range(2)]
    wait_until_written(pids)
    assert not wait_until_gone([int(pid.read_text()) for pid in pids])
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(timeout=4)
    return running


@pytest.mark.parametrize(
    ("options", "then", "code", "reason"),
    [
        (["--on-failure", "continue"], "sys.exit(5)", 5, "finished"),
        (["--timeout", "20"], "rest()", 124, "timeout"),
    ],
)
def test_a_slow_reader_gets_everything(
    tmp_path: Path, options: list[str], then: str, code: int, reason: str
) -> None:
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
        running.process.wait(timeout=2)
    running.send(signal.SIGINT)
    assert running.process.wait(timeout=SECONDS) == 0  # the job had succeeded
    running.end()


def test_timeout(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 2, "--timeout", 0.3, script(tmp_path, WAIT + "rest()"))
    assert done.returncode == 124
    assert "took longer than 0.3 s" in done.stderr


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


def shown(text: str, *names: str) -> list[tuple[str, ...]]:
    rows = (json.loads(line.split("] ", 1)[1]) for line in sorted(text.splitlines()))
    return [tuple(row.get(name, "") for name in names) for row in rows]


SHOW = "import json, os; print(json.dumps({**os.environ, 'cores': sorted(os.sched_getaffinity(0))}))"


def test_each_worker_sees_its_gpu(tmp_path: Path) -> None:
    job = script(tmp_path, SHOW)
    name = "CUDA_VISIBLE_DEVICES"
    beyond = len(visible_gpus({}))  # 0 where there is no GPU
    done = multiverso("run", "-n", 2, "--gpus", f"{beyond},{beyond}", job, CUDA_VISIBLE_DEVICES=None)
    assert done.returncode == 2
    assert f"there is no device {beyond} among the {beyond} that were found here" in done.stderr
    done = multiverso("run", "-n", 2, "--gpus", "0,0", job, CUDA_VISIBLE_DEVICES="7")
    assert shown(done.stdout, name) == [("7",), ("7",)]
    done = multiverso("run", "-n", 2, "--gpus", "auto", job, CUDA_VISIBLE_DEVICES="5,GPU-12ab")
    assert shown(done.stdout, name) == [("5",), ("GPU-12ab",)]
    done = multiverso("run", "-n", 2, "--gpus", "1,0", job, CUDA_VISIBLE_DEVICES="5,6")
    assert shown(done.stdout, name) == [("6",), ("5",)]
    done = multiverso("run", "-n", 3, "--gpus", "auto", job, CUDA_VISIBLE_DEVICES="5,6")
    assert shown(done.stdout, name) == [("5",), ("6",), ("5",)]
    assert "3 workers share 2 GPU(s)" in done.stderr
    done = multiverso("run", "-n", 2, "--gpus", "0,2", job, CUDA_VISIBLE_DEVICES="5,6")
    assert done.returncode == 2
    assert "no device 2 among the 2" in done.stderr
    done = multiverso("run", "-n", 2, "--gpus", "auto", job, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "CUDA_VISIBLE_DEVICES is ''" in done.stderr


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has GPUs")
def test_no_gpu_is_a_clear_error() -> None:
    done = multiverso("run", "--gpus", "auto", "/bin/true", CUDA_VISIBLE_DEVICES=None, PATH="/nowhere")
    assert done.returncode == 2
    assert "no NVIDIA device was found" in done.stderr


def test_bind_parts_the_cores(tmp_path: Path) -> None:
    job = script(tmp_path, SHOW)
    mine = os.sched_getaffinity(0)
    workers = max(2, min(4, len(mine)))
    bound = multiverso("run", "-n", workers, "--bind", job, OMP_NUM_THREADS=None)
    rows = shown(bound.stdout, "cores", "OMP_NUM_THREADS")
    assert set().union(*(cores for cores, _ in rows)) <= mine
    assert all(int(threads) == len(cores) >= 1 for cores, threads in rows)
    if len(mine) >= workers:
        assert sum(len(cores) for cores, _ in rows) == len(mine)


def test_threads_are_limited_unless_the_user_did(tmp_path: Path) -> None:
    job = script(tmp_path, SHOW)
    fair = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert (
        shown(multiverso("run", "-n", 2, job, OMP_NUM_THREADS=None).stdout, "OMP_NUM_THREADS")
        == [(fair,)] * 2
    )
    assert (
        shown(multiverso("run", "-n", 2, job, OMP_NUM_THREADS="3").stdout, "OMP_NUM_THREADS") == [("3",)] * 2
    )


def test_the_first_worker_reads_standard_input(tmp_path: Path) -> None:
    job = script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(
        command("run", "-n", 2, job),
        input="typed",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 'typed'", "[1] ''"]


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from multiverso.cli import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    pass
print(sorted({"numba", "torch", "zmq", "cloudpickle"} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert "doctor" in done.stdout
    assert done.stderr == "[]\n"


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


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    job = script(tmp_path, "for i in range(100): print(i)")
    done = multiverso("run", "-n", 1, "--log-dir", tmp_path, job)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"[0] {i}" for i in range(100)]
    assert "worker-0.log: No space left on device" in done.stderr


def test_a_line_without_an_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    job = script(tmp_path, "import os\nfor _ in range(3): os.write(1, b'z' * 1_000_000)")
    lines = multiverso("run", job).stdout.splitlines()
    assert len(lines) > 1
    assert "".join(line.removeprefix("[0] ") for line in lines) == "z" * 3_000_000
