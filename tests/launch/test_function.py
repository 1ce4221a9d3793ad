"""`multiverso.run(function)`: results, exceptions, deaths, from where it is called."""

import atexit
import importlib
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_support import SECONDS, environ, script, wait_until_gone

import multiverso as mv
from multiverso.errors import StartupError, WaitTimeoutError, WorkerFailedError, WorkerLostError
from multiverso.launch.job import Job
from multiverso.launch.output import Output
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.sinks import text_sink
from multiverso.runtime.session.current import current

pytestmark = pytest.mark.usefixtures("forked_runs")


def worker() -> int:
    return int(os.environ["MULTIVERSO_WORKER_ID"])


class OddError(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class OwnError(ValueError):
    """Defined where only this process finds it."""


def test_results_come_in_worker_order() -> None:
    def function(base: int, *, step: int) -> tuple[int, int]:
        return worker(), base + step * worker()

    assert mv.run(function, workers=3, args=(10,), kwargs={"step": 2}) == [(0, 10), (1, 12), (2, 14)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_workers_are_a_job(hosts: int) -> None:
    def function() -> tuple[int, float, int]:
        mv.init()
        table = mv.ArrayTableHandler(1000)
        mv.barrier()
        table.add(np.full(1000, mv.worker_id() + 1.0))
        mv.barrier()
        total = table.get()
        assert (total == total[0]).all()
        return mv.workers_num(), float(total[0]), len(set(current().control.places))

    assert mv.run(function, workers=3, hosts=hosts) == [(3, 6.0, 0 if hosts == 1 else hosts)] * 3


def test_shutdown_is_made_up_for_and_harmless_when_made() -> None:
    def function(leaves_itself: bool) -> int:
        mv.init()
        if leaves_itself or worker() == 0:
            mv.shutdown()
        else:
            while 0 in mv.live_workers():  # outlives worker 0, which must not count as lost
                time.sleep(0.001)
        return worker()

    assert mv.run(function, workers=2, args=(True,)) == [0, 1]
    assert mv.run(function, workers=2, args=(False,)) == [0, 1]


def test_an_exception_arrives_with_its_type_and_traceback() -> None:
    def fail_here() -> None:
        if worker() == 1:
            raise OwnError("the reason")
        time.sleep(1000)

    with pytest.raises(OwnError, match="the reason") as caught:
        mv.run(fail_here, workers=2)
    (note,) = caught.value.__notes__
    assert "In multiverso worker 1 (pid " in note
    assert "fail_here" in note


def test_the_cause_is_raised_not_its_consequences() -> None:
    def function() -> None:
        mv.init()
        mv.barrier()
        if worker() == 2:
            raise KeyError("cause")
        mv.barrier()

    with pytest.raises(KeyError, match="cause"):
        mv.run(function, workers=4)


def test_what_it_raised_is_known_when_it_is_killed_on_its_way_out() -> None:
    def function() -> None:
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        mv.run(function, workers=1)


def test_a_worker_that_the_others_lost_may_end_by_itself() -> None:
    programs = ["raise SystemExit(3)", "import time; time.sleep(0.5); raise SystemExit(7)"]
    environ = {**os.environ, "OF_THIS_TEST": "1"}
    job = Job(
        [WorkerCommand((sys.executable, "-c", text), environ) for text in programs],
        marker="OF_THIS_TEST=1",
        output=Output(text_sink(sys.stdout, sys.stderr)),
        grace_seconds=SECONDS,
        lost_workers=lambda: [1],
    )
    result = job.run()
    assert result.culprit is not None
    assert (result.culprit.worker_id, result.exit_code) == (1, 7)


@pytest.mark.parametrize("error", [OddError(1, 2), SystemExit(3), KeyboardInterrupt()])
def test_what_cannot_be_raised_here_is_told(error: BaseException) -> None:
    def function(odd: bool, kind: str) -> None:
        raise OddError(1, 2) if odd else {"SystemExit": SystemExit(3)}.get(kind, KeyboardInterrupt())

    with pytest.raises(WorkerFailedError, match=r"Worker 0 \(pid \d+\) failed") as caught:
        mv.run(function, workers=1, args=(isinstance(error, OddError), type(error).__name__))
    assert type(error).__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"), [((1, threading.Lock()), {}, r"args\[1\]"), ((), {"b": iter}, "b=")]
)
def test_an_argument_that_cannot_be_sent_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], named: str) -> None:
    kwargs = {name: (number for number in value([1])) for name, value in kwargs.items()}
    with pytest.raises(StartupError, match=f"{named} cannot be sent to workers.*: cannot pickle"):
        mv.run(print, workers=1, args=args, kwargs=kwargs)


def test_what_a_signals_handler_raises_while_a_call_is_written_is_not_taken_for_an_argument() -> None:
    class Once:
        raised = False

        def __reduce__(self) -> Any:
            if not Once.raised:
                Once.raised = True
                raise TimeoutError("an alarm")
            return int, ()

    with pytest.raises(TimeoutError, match="an alarm"):
        mv.run(print, workers=1, args=(Once(),))


def test_without_ray_its_module_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "multiverso.ray", raising=False)
    with pytest.raises(ImportError, match=r"pip install \"multiverso\[ray\]\""):
        importlib.import_module("multiverso.ray")


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(TypeError, match="value, of type lock, cannot be sent back"):
        mv.run(threading.Lock, workers=1)


def test_a_killed_worker_is_named_with_its_signal() -> None:
    def function() -> None:
        if worker() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(WorkerLostError, match=r"Worker 1 \(pid \d+\) was killed by SIGKILL") as caught:
        mv.run(function, workers=3)
    assert caught.value.worker_ids == (1,)


def test_a_killed_worker_is_named_though_the_others_complain_first() -> None:
    def function() -> None:
        mv.init()
        mv.barrier()
        if worker() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mv.barrier()

    with pytest.raises(WorkerLostError, match=r"Worker 1 \(pid \d+\) was killed by SIGKILL"):
        mv.run(function, workers=3)


def test_a_worker_that_leaves_without_a_result_is_lost() -> None:
    with pytest.raises(WorkerLostError, match="ended with exit code 4 before the function returned"):
        mv.run(os._exit, workers=1, args=(4,))
    with pytest.raises(WorkerLostError, match="ended with exit code 0 before the function returned"):
        mv.run(os._exit, workers=2, args=(0,))


def test_continue_gives_the_survivors_results() -> None:
    def function() -> int:
        if worker() == 0:
            raise OwnError("gone")
        return worker()

    results = mv.run(function, workers=3, on_failure="continue")
    assert isinstance(results[0], OwnError)
    assert results[1:] == [1, 2]
    with pytest.raises(OwnError):
        mv.run(function, workers=1, on_failure="continue")


def test_continue_goes_on_without_a_worker_that_never_came() -> None:
    def function() -> float:
        if worker() == 1:
            os._exit(1)
        mv.init()
        table = mv.ArrayTableHandler(3)
        table.add([1.0, 1.0, 1.0])
        mv.barrier()
        return float(table.get()[0])

    first, lost, third = mv.run(function, workers=3, on_failure="continue")
    assert (first, third) == (2.0, 2.0)
    assert isinstance(lost, WorkerLostError)


def test_timeout_names_who_had_not_finished() -> None:
    def function() -> None:
        if worker() == 1:
            time.sleep(1000)

    said = "workers [0, 1]"
    for seconds in (3, 10, 30, 100):  # the first that is enough for worker 0, on a machine that may be busy
        if "workers [0, 1]" in said:
            with pytest.raises(WaitTimeoutError, match=rf"timeout_seconds={seconds}; .* had not fin") as caught:
                mv.run(function, workers=2, timeout_seconds=float(seconds))
            said = str(caught.value)
    assert "workers [1] had not finished" in said


def test_large_arguments_and_results() -> None:
    array = np.arange(3_000_000, dtype=np.float64)
    results = mv.run(lambda x: x * (worker() + 1), workers=2, args=(array,))
    assert all(np.array_equal(result, array * (i + 1)) for i, result in enumerate(results))


def test_callables_of_every_kind() -> None:
    assert mv.run(os.getppid, workers=2) == [os.getpid()] * 2
    assert mv.run(partial(pow, 2), workers=1, args=(5,)) == [32]
    assert mv.run("a-b".split, workers=1, args=("-",)) == [["a", "b"]]


def test_the_callers_standard_input_is_left_alone() -> None:
    code = "import sys, multiverso as mv\nprint(mv.run(lambda: sys.stdin.read(), workers=2), sys.stdin.read())"
    done = subprocess.run(
        [sys.executable, "-c", code], input="typed", capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "['', ''] typed\n", done.stderr


def test_env_is_set_in_the_workers() -> None:
    assert mv.run(os.getenv, workers=2, args=("COLOUR_OF_X",), env={"COLOUR_OF_X": "red"}) == ["red"] * 2
    assert "COLOUR_OF_X" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": "2"}, "workers is '2'"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"workers": 10**6}, "workers is 1000000"),
        ({"on_failure": "retry"}, "on_failure is 'retry'"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"timeout_seconds": "10"}, "timeout_seconds is '10'"),
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 1.0}, "hosts is 1.0"),
        ({"workers": 2, "hosts": 3}, "hosts is 3; it must be from 1 to the 2 workers"),
    ],
)
def test_options_are_checked(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        mv.run(os.getpid, **arguments)


def test_numbers_of_numpy_are_numbers_and_an_environment_has_texts() -> None:
    assert mv.run(os.getpid, workers=np.int64(1), hosts=np.int64(1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"env has texts by their names.*got {'OMP_NUM_THREADS': 1}"):
        mv.run(os.getpid, 1, env={"OMP_NUM_THREADS": 1})  # type: ignore[dict-item]


def test_no_function_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="expected a function, got int"):
        mv.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got str. A script: multiverso run -n 2 train.py"):
        mv.run("train.py", 2)  # type: ignore[call-overload]


@pytest.mark.parametrize("args", [1, "ab", None])
def test_one_argument_is_no_tuple_of_arguments(args: Any) -> None:
    """The letters of a text were each an argument."""
    with pytest.raises(TypeError, match=r"args is a tuple of arguments, args=\(.*,\) for one; got"):
        mv.run(print, 1, args=args)


def test_output_appears_here_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    mv.run(lambda: print("hello from", worker()), workers=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]


def test_several_calls_from_threads_at_once() -> None:
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = mv.run(lambda: worker() + number, workers=2)

    threads = [threading.Thread(target=call, args=(number,)) for number in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {10: [10, 11], 20: [20, 21]}


def test_from_a_script_without_a_guard(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
import multiverso as mv
print("the script runs once")
factor = 3
class Box:
    def __init__(self, content): self.content = content
def work():
    mv.init()
    return Box(factor * mv.worker_id())
print([box.content for box in mv.run(work, workers=2) if isinstance(box, Box)])
""",
    )
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "the script runs once\n[0, 3]\n", done.stderr


def test_from_an_interactive_interpreter() -> None:
    typed = "import multiverso as mv\n" + "def f():\n    mv.init()\n    return mv.worker_id()\n\nmv.run(f, workers=2)\n"
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=typed, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_caller(tmp_path: Path, number: signal.Signals) -> None:
    path = script(
        tmp_path,
        """
import os, subprocess, time
import multiverso as mv
def work():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(os.getpid(), child.pid)
    time.sleep(1000)
mv.run(work, workers=2)
""",
    )
    caller = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ()
    )
    with caller:
        assert caller.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in caller.stdout.readline().split()[1:]]
        assert len(pids) == 4
        caller.send_signal(number)
        _, err = caller.communicate(timeout=SECONDS)
    assert wait_until_gone(pids) == []
    assert caller.returncode == -number
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err


def test_a_worker_may_call_run_itself() -> None:
    def function() -> list[int]:
        return mv.run(worker, workers=2)

    assert mv.run(function, workers=2) == [[0, 1], [0, 1]]


def test_where_the_package_is_on_the_search_path_only(tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    path = script(
        tmp_path,
        f"""
import sys
sys.path.append({str(tmp_path)!r})
import only_here
import multiverso as mv
print(mv.run(only_here.answer, workers=1))
""",
        "caller.py",
    )
    command = [sys.executable, "-I", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, cwd="/")
    assert done.stdout == "[42]\n", done.stderr


def test_an_interruption_while_the_output_is_closed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Output.close

    def interrupted(self: Output, *arguments: Any) -> None:
        close(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mv.run(worker, workers=1)


def test_a_workers_traceback_has_the_lines_of_a_notebooks_cell() -> None:
    cell = "def work():\n    return 1 / 0  # of the cell\n"
    name = "<ipython-input-7-cell>"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, name, "exec"), names)
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)  # as IPython does
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            mv.run(names["work"], workers=1)
    finally:
        del linecache.cache[name]
    assert "return 1 / 0  # of the cell" in "".join(caught.value.__notes__)
