"""The first and the last moments of `multiverso run`: Ctrl-C there, and who is to blame for the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch_support import SECONDS, Running, command, environ, multiverso, script

from multiverso.launch.processes import Guard

# What the program is about to do when Ctrl-C comes: an event of sys.addaudithook, and a word in its arguments.
MOMENTS = {
    "its first import": ("import", "multiverso.cli"),
    "numpy": ("import", "numpy"),
    "the command line": ("import", "click"),
    "its options": ("import", "multiverso.launch.local"),
    "the node's socket": ("socket.bind", ""),
    "the guard": ("subprocess.Popen", "_guard.py"),
    "a worker": ("subprocess.Popen", "_shim.py"),
}
INTERRUPTS = """
import os, signal, sys
event, word = sys.argv[1:3]
done = False
def hook(name, arguments):
    global done
    if not done and name == event and word in str(arguments):
        done = True
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
sys.argv = ["multiverso", *sys.argv[3:]]
import multiverso_program
sys.exit(multiverso_program.multiverso())
"""


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_it_begins(tmp_path: Path, moment: str, ignored: bool) -> None:
    """Also where a shell has let it be ignored: what `multiverso run` does with a signal does not depend on when."""
    job = script(tmp_path, "while True: pass")
    run = [sys.executable, "-c", INTERRUPTS, *MOMENTS[moment], "run", "-n", "2", str(job)]
    shell = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"] if ignored else []
    done = subprocess.run([*shell, *run], capture_output=True, text=True, timeout=SECONDS, env=environ(), check=False)
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


def test_the_program_of_the_package_is_the_one_that_is_tested() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert 'multiverso = "multiverso_program:multiverso"' in text
    assert 'platoon-launcher = "multiverso_program:platoon_launcher"' in text


LEAVES = """
import os, sys
import multiverso as mv
mv.init()
mv.barrier()
if mv.worker_id() == 1:
    os._exit(0)
mv.barrier()
"""


def test_who_left_without_a_word_is_named_and_not_only_who_failed_of_it(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 2, script(tmp_path, LEAVES))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("multiverso: worker 1 (pid "), last
    assert "ended with exit code 0 and without multiverso.shutdown(), while others needed it; then worker 0 " in last
    assert "WorkerLostError" in last
    events = multiverso("run", "--json", "-n", 2, script(tmp_path, LEAVES)).stdout.splitlines()
    summary = json.loads(events[-1])
    assert summary["failed_worker"] == 0
    assert summary["left_without_shutdown"] == 1


AGAIN = """
import os, sys, time
import multiverso as mv
me, folder = os.environ["MULTIVERSO_WORKER_ID"], sys.argv[1]
mv.init()
mv.barrier()
mv.shutdown()
if me == "1":
    os._exit(0)
try:
    mv.init()
except mv.errors.WorkerLostError as error:
    print("told:", error)
open(f"{folder}/told-{me}", "x").close()
end = time.monotonic() + 60
while not all(os.path.exists(f"{folder}/told-{number}") for number in (0, 2)):  # one that ends is named, too
    assert time.monotonic() < end
    time.sleep(0.01)
"""


def test_a_process_that_has_ended_is_not_waited_for_in_the_next_run(tmp_path: Path) -> None:
    done = multiverso("run", "-n", 3, script(tmp_path, AGAIN), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.partition(" ")[2].startswith("told: worker 1 ") for line in done.stdout.splitlines()] == [True] * 2


FORKS = """
import os, sys, time
import multiverso as mv
from multiverso.runtime.job.control import Control
if os.environ["MULTIVERSO_WORKER_ID"] == "1":
    def die(*_, **__):
        import ctypes
        if ctypes.CDLL(None).fork() == 0:  # a child that knows nothing of us, and keeps the socket
            while os.getppid() != 1 and os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            while os.path.exists(sys.argv[1]):
                time.sleep(0.01)
            os._exit(0)
        os.kill(os.getpid(), 9)
    Control.activate = die
try:
    mv.init()
except mv.errors.WorkerLostError as error:
    os.remove(sys.argv[1])
    print("told:", error)
"""


def test_a_death_before_all_are_ready_is_seen_though_a_child_holds_the_socket(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    running = Running(command("run", "-n", 2, "--on-failure", "stop", script(tmp_path, FORKS), tmp_path / "there"))
    code, out, err = running.end()
    assert code == 128 + signal.SIGKILL, err
    assert "[0] told: worker 1 " in out or "was killed by SIGKILL" in err


def test_a_process_in_the_middle_of_an_exec_is_not_left_behind() -> None:
    """It has no environment for that moment, by which the guard knows it."""
    again = 'exec /bin/sh -c "$0" "$0"'
    for turn in range(40):
        marker = f"MULTIVERSO_TEST_GUARD={os.getpid()}-{turn}"
        with Guard(marker):
            left = subprocess.Popen(
                ["/bin/sh", "-c", again, again], env=dict([marker.split("=")]), start_new_session=True
            )
        try:
            assert left.wait(10) == -signal.SIGKILL
        finally:
            left.kill()
