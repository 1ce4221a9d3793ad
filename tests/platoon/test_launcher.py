"""The launcher: files, arguments, logs, exit codes, and what it says when something fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

WORKER = """
    import os, sys
    from platoon import Worker
    worker = Worker(control_port=5567)
    print(worker.local_rank, worker.local_size, os.environ["PLATOON_DEVICE"], sys.argv[1:], flush=True)
    print("on stderr", file=sys.stderr)
"""


def test_without_a_controller_file(experiment: Any) -> None:
    result = experiment.write(plain_worker=WORKER).launch(
        "plain", "-D", "cpu", "cpu", "cpu", '-w=--rate "0.1 or so" -n 3'
    )
    assert result.code == 0, result
    for rank, text in enumerate(result.outputs()):
        assert text == f"{rank} 3 cpu ['--rate', '0.1 or so', '-n', '3']\n"
    assert "success: 3 workers" in result.out
    assert set(result.logs) == {
        f"{name}.{kind}"
        for name in ("controller", "worker0_cpu", "worker1_cpu", "worker2_cpu")
        for kind in ("out", "err")
    }
    assert all("on stderr" in result.logs[f"worker{i}_cpu.err"] for i in range(3))
    folder = re.search(r"logs in (PLATOON_LOGS/plain/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\S*)", result.out)
    assert folder is not None
    assert (experiment.folder / folder[1]).is_dir()


def test_with_a_controller_file_and_json(experiment: Any) -> None:
    experiment.write(
        own_worker="""
        from platoon import Worker
        worker = Worker()
        print([worker.send_req("turn") for _ in range(3)])
        """,
        own_controller="""
        import sys
        from platoon.channel import Controller

        class Turns(Controller):
            def handle_control(self, req, worker_id, req_info):
                assert worker_id in self._workers
                self.turns += 1
                return self.turns

        parser = Controller.default_parser()
        parser.add_argument("--turns", type=int)
        args = parser.parse_args()
        controller = Turns(**Controller.default_arguments(args))
        controller.turns = args.turns
        sys.exit(controller.serve())
        """,
    )
    result = experiment.launch_program("own", "--json", "-D", "cpu", "-c=--turns 150")
    assert result.code == 0, result
    assert result.outputs() == ["[151, 152, 153]\n"]
    events = [json.loads(line) for line in result.out.splitlines()]
    assert [event["event"] for event in events if event["event"] != "requests"] == [
        *("launched", "started", "came", "ended", "finished", "success")
    ]
    assert max(event["count"] for event in events if event["event"] == "requests") == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing", "-D", "cpu"], "no missing_worker.py"),
        (["there_worker.py", "-D", "cpu"], "no there_worker.py_worker.py in"),
        (["there_worker.py", "-D", "cpu"], "; NAME is there"),
        (["there", "-D", "tpu0"], "'tpu0' is not a device"),
        (["there"], "-D cpu cpu"),
        (["there", "-D", "cpu", "cuda9"], "cuda9 was asked for, but only 0 GPUs can be seen here"),
        (["there", "-D", "cpu", "-H", "one", "one"], "each host once"),
        (["there", "-D", "cpu", "-H", "elsewhere"], "elsewhere is not this one"),
        (["there", "-D", "cpu", "-c=--unknown"], "unrecognized arguments: --unknown"),
        (["-D", "cpu"], "required: NAME"),
    ],
)
def test_wrong_arguments(experiment: Any, arguments: list[str], message: str) -> None:
    experiment.write(there_worker="print('started')")
    result = experiment.launch(*arguments, CUDA_VISIBLE_DEVICES="")
    assert result.code == 2, result
    assert message in result.err
    assert "unrecognized" in message or not result.logs


def test_logs_that_cannot_be_written(experiment: Any) -> None:
    (experiment.folder / "PLATOON_LOGS").write_text("a file where the folder should be")
    result = experiment.write(there_worker="pass").launch("there", "-D", "cpu")
    assert result.code == 3, result


FAILURES = {
    "exit": ("import sys; print('the last words', file=sys.stderr); sys.exit(7)", "exit code 7"),
    "error": ("raise ValueError('the last words')", "exit code 1"),
    "kill": (
        "import os, sys; print('the last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
        "signal SIGKILL",
    ),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_worker_that_fails_ends_the_job_and_is_shown(experiment: Any, how: str, wait_until: Any) -> None:
    does, said = FAILURES[how]
    experiment.write(
        failing_worker=f"""
        import subprocess, sys
        from platoon import Worker
        worker = Worker()
        if worker.local_rank == 1:
            subprocess.Popen(["sleep", "1000"])
            {does}
        worker.recv_mb() if worker.init_mb_sock() else worker.recv_mb()
        """,
        failing_controller="""
        import sys
        from platoon.channel import Controller
        args = Controller.default_parser().parse_args()
        controller = Controller(**{**Controller.default_arguments(args), "data_port": 0})
        sys.exit(controller.serve())
        """,
    )
    result = experiment.launch("failing", "-D", "cpu", "cpu")
    assert result.code == 1, result
    assert re.search(rf"worker 1 \(process \d+\) on cpu ended with {said}", result.err), result
    assert "worker1_cpu.err" in result.err
    assert "the last words" in result.err
    wait_until(lambda: not left_running(experiment.folder))


@pytest.mark.parametrize("where", ["in a forked process", "in handle_control"])
def test_nobody_sends_minibatches_to_workers_that_have_all_died(experiment: Any, where: str, wait_until: Any) -> None:
    experiment.write(
        dies_controller=f"""
        import sys
        from multiprocessing import get_context
        import numpy as np
        from platoon.channel import Controller

        class Sends(Controller):
            def send(self):
                self.init_data()
                while True:
                    self.send_mb([np.zeros(3)])

            def handle_control(self, req, worker_id, req_info):
                self.send()

        controller = Sends(**Controller.default_arguments(Controller.default_parser().parse_args()))
        if {where == "in a forked process"}:
            get_context("fork").Process(target=controller.send).start()
        sys.exit(controller.serve())
        """,
        dies_worker=f"""
        import os, signal
        from platoon import Worker
        if {where == "in handle_control"}:
            signal.alarm(1)
            Worker().send_req("next")
        raise ImportError("the last words")
        """,
    )
    began = time.monotonic()
    result = experiment.launch("dies", "-D", "cpu", "cpu")
    seconds = time.monotonic() - began
    assert result.code == 1, result
    assert re.search(r"worker \d \(process \d+\) on cpu ended with", result.err), result
    assert "still runs" not in result.out, result
    assert seconds < 10, f"{seconds} s\n{result}"
    if where == "in a forked process":
        assert "the controller has closed: no worker will take this minibatch" in result.logs["controller.err"]
    wait_until(lambda: not left_running(experiment.folder))


def test_a_controller_that_does_not_end_after_a_failure_is_ended(experiment: Any, wait_until: Any) -> None:
    experiment.write(
        stays_controller="""
        import signal
        from multiprocessing import get_context
        from platoon.channel import Controller

        controller = Controller(**Controller.default_arguments(Controller.default_parser().parse_args()))
        get_context("fork").Process(target=signal.pause).start()  # joined at the end
        controller.serve()
        """,
        stays_worker="raise ImportError('the last words')",
    )
    result = experiment.launch("stays", "-D", "cpu")
    assert result.code == 1, result
    assert re.search(r"still runs \d+ s after the failure: ending it", result.out), result
    assert "the last words" in result.err
    wait_until(lambda: not left_running(experiment.folder))


def test_sigterm_ends_everything(experiment: Any, wait_until: Any) -> None:
    experiment.write(
        long_worker="""
        from platoon import Worker
        worker = Worker()
        open(f"here-{worker.local_rank}", "w").close()
        worker.lock()
        worker.send_req("platoon-size") and __import__("signal").pause()
        """
    )
    launcher = experiment.start_fresh("-m", "platoon.launcher", "long", "-D", "cpu", "cpu")
    wait_until(lambda: len(list(experiment.folder.glob("here-*"))) == 2)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # `timeout` and some terminals send several
        os.kill(launcher.pid, number)
        threading.Event().wait(0.02)
    assert "interrupted" in experiment.finish(launcher, None)
    # of those that came while it was not run the system delivers the lowest number first
    assert launcher.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    wait_until(lambda: not left_running(experiment.folder))


def test_an_interrupted_launcher_ends_though_nobody_reads_what_it_says(experiment: Any, wait_until: Any) -> None:
    experiment.write(
        long_worker="""
        import signal
        from platoon import Worker
        worker = Worker()
        open(f"here-{worker.local_rank}", "w").close()
        signal.pause()
        """
    )
    nobody_reads, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    command = [sys.executable, "-m", "platoon.launcher", "long", "-D", "cpu"]
    launcher = subprocess.Popen(
        command,
        cwd=experiment.folder,
        env=experiment.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=full,
        start_new_session=True,
    )
    os.close(full)
    try:
        wait_until(lambda: (experiment.folder / "here-0").exists())
        launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: len(left_running(experiment.folder)) == 1)  # it alone, with something to say
        wait_until(lambda: launcher.send_signal(signal.SIGTERM) or launcher.poll() is not None)
        assert launcher.wait() == -signal.SIGTERM
    finally:
        launcher.kill()
        launcher.wait()
        os.close(nobody_reads)


@pytest.mark.parametrize("victim", ["launcher", "controller"])
def test_when_the_launcher_or_the_controller_is_killed_nothing_is_left(
    experiment: Any, wait_until: Any, victim: str
) -> None:
    """Not even what a worker has started in a session of its own."""
    experiment.write(
        long_worker="""
        import signal, subprocess
        from platoon import Worker
        worker = Worker()
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open(f"here-{worker.local_rank}", "w").close()
        signal.pause()
        """
    )
    launcher = experiment.start_fresh("-m", "platoon.launcher", "long", "-D", "cpu", "cpu")
    wait_until(lambda: len(list(experiment.folder.glob("here-*"))) == 2)
    assert len(left_running(experiment.folder)) >= 6
    if victim == "launcher":
        launcher.kill()
    else:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        controller = [pid for pid in children if "controller" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(controller[0]), signal.SIGKILL)
        assert "signal SIGKILL" in experiment.finish(launcher, 1)
    wait_until(lambda: not left_running(experiment.folder))


def test_the_signals_of_a_program_that_calls_the_launcher_stay_its_own(experiment: Any) -> None:
    experiment.write(
        quick_worker="from platoon import Worker; Worker()",
        caller="""
        import signal, sys
        from platoon.launcher import main
        handlers = [signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)]
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        assert main(["quick", "-D", "cpu"]) == 0
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        """,
    )
    experiment.finish(experiment.start("caller.py"))


def test_two_jobs_at_once_do_not_collide(experiment: Any) -> None:
    experiment.write(
        pair_worker="""
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import ASGD
        worker = Worker(control_port=5567)
        mine = [np.zeros(1000)]
        worker.init_shared_params(mine, ASGD())
        mine[0] += 1
        worker.sync_params()
        worker.all_reduce(np.ones(1))
        print(worker.shared_params[0].sum())
        """
    )
    jobs = [experiment.start("-m", "platoon.launcher", "pair", "-D", "cpu", "cpu") for _ in range(2)]
    for job in jobs:
        experiment.finish(job)
    outputs = [file.read_text() for file in (experiment.folder / "PLATOON_LOGS").glob("*/*/worker*.out")]
    assert outputs == ["2000.0\n"] * 4


def left_running(folder: Path) -> list[str]:
    """Command lines of the processes that have a test's folder as their working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


PLACES = {
    "holding the lock": "worker.lock(); die()",
    "in sync_params": "wait_for_the_lock(worker.sync_params)",
    "in lock": "wait_for_the_lock(worker.lock)",
    "in all_reduce": "threading.Timer(0.2, die).start(); worker.all_reduce(np.ones(3))",
    "in send_req": "threading.Timer(0.2, die).start(); worker.send_req('never')",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_killed_anywhere_ends_the_job(experiment: Any, place: str) -> None:
    """Worker 1 is killed by SIGKILL while the others wait for it, or it for them; nobody hangs."""
    experiment.write(
        killed_controller="""
        import sys
        from platoon.channel import Controller

        class Silent(Controller):
            def handle_control(self, req, worker_id, req_info):
                return req

            def _reply(self, address, answer):
                if answer != {"ok": "never"}:
                    super()._reply(address, answer)

        sys.exit(Silent(**Controller.default_arguments(Controller.default_parser().parse_args())).serve())
        """,
        killed_worker=f"""
        import os, signal, sys, threading
        import numpy as np
        from platoon import Worker
        from platoon.param_sync import ASGD

        def die():
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        def wait_for_the_lock(call):
            worker.all_reduce(np.ones(1))  # worker 0 has it now
            threading.Timer(0.2, die).start()
            call()

        worker = Worker()
        worker.init_shared_params([np.zeros(100_000)], ASGD())
        worker.all_reduce(np.ones(1))
        if worker.local_rank == 1:
            {PLACES[place]}
            raise AssertionError("not reached")
        if worker.local_rank == 0 and {"wait_for" in PLACES[place]}:
            worker.lock()
        if {"wait_for" in PLACES[place]}:
            worker.all_reduce(np.ones(1))
        while True:
            worker.all_reduce(np.ones(3)) if {place == "in send_req"} else worker.sync_params()
        """,
    )
    result = experiment.launch("killed", "-D", "cpu", "cpu", "cpu")
    assert result.code == 1, result
    assert re.search(r"worker 1 \(process \d+\) on cpu ended with signal SIGKILL", result.err), result
    assert re.search(r"log: PLATOON_LOGS/killed/\S+/worker1_cpu.err", result.err)
    assert "the last words" in result.err
    assert not left_running(experiment.folder)
