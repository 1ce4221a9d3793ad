"""`multiverso run` with real processes: what it starts, what each worker gets, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import SECONDS, WAIT, command, multiverso, script

from multiverso.launch import visible_gpus


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


def test_four_workers_that_fail_of_one_cause_show_one_traceback(tmp_path: Path) -> None:
    job = script(tmp_path, "def deep(n):\n    if n:\n        deep(n - 1)\n    raise ValueError('the reason')\ndeep(5)")
    done = multiverso("run", "-n", 4, "--on-failure", "continue", job)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert re.search(
        r"^\[\d\] the same from 3 others \(workers \d, \d, \d\): ValueError: the reason$", done.stderr, re.M
    )
    whole = re.search(r"(?:^\[(\d)\] .*\n)+", done.stderr[done.stderr.index("Traceback") - 4 :], re.M)
    assert whole is not None
    shown = [line for line in whole[0].splitlines() if "File" in line]
    assert len(shown) == 7  # in one piece, of one worker


def test_a_killed_workers_signal(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "if worker == 1: os.kill(os.getpid(), signal.SIGKILL)\nrest()")
    done = multiverso("run", "-n", 2, job)
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"worker 1 \(pid \d+\) was killed by SIGKILL", done.stderr)


def test_continue_lets_the_others_go_on(tmp_path: Path) -> None:
    job = script(tmp_path, WAIT + "sys.exit(4) if worker == 0 else print('finished')")
    done = multiverso("run", "-n", 3, "--on-failure", "continue", job)
    assert done.returncode == 0
    assert done.stdout.count("finished") == 2
    assert "failed with exit code 4; the others continue" in done.stderr


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
    assert shown(multiverso("run", "-n", 2, job, OMP_NUM_THREADS=None).stdout, "OMP_NUM_THREADS") == [(fair,)] * 2
    assert shown(multiverso("run", "-n", 2, job, OMP_NUM_THREADS="3").stdout, "OMP_NUM_THREADS") == [("3",)] * 2


def test_the_first_worker_reads_standard_input(tmp_path: Path) -> None:
    job = script(tmp_path, "import sys; print(repr(sys.stdin.read()))")
    done = subprocess.run(
        command("run", "-n", 2, job), input="typed", capture_output=True, text=True, timeout=SECONDS, check=True
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
print(sorted({"numba", "torch", "cloudpickle"} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert "doctor" in done.stdout
    assert done.stderr == "[]\n"
