"""`multiverso run --replace`: a worker that dies is started again in its place, and finds what the others have."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch_support import Running, command, multiverso, script

from multiverso.errors import StartupError
from multiverso.launch import processes
from multiverso.launch.job import Job
from multiverso.launch.processes import WorkerCommand
from multiverso.launch.restart_policy import Pauses, Replacements
from multiverso.launch.results import JobResult, WorkerExit
from multiverso.launch.standard_files import open_standard_files

JOB = """
import mmap, os, signal, sys, time
from pathlib import Path
import numpy as np
import multiverso as mv

notes = np.frombuffer(mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0), np.int64)
DONE, PID, SUM, ROW = range(4)
mv.init()
me, life = mv.worker_id(), mv.incarnation()
table = mv.ArrayTableHandler(1000, init_value=np.full(1000, 100.0 if life else 5.0))
rows = mv.MatrixTableHandler(4, 16, name="rows")
told = mv.Counter("lives of worker 1")

def wait_for(condition):
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)

checkpoint = mv.checkpoint(Path(sys.argv[1]).parent / "run", every=None)
own = checkpoint.restore()
if me == 1:
    print("life", life, "begins with", own, "at barrier", mv.current().barriers, flush=True)
mv.barrier()
epochs = [len([1 for _ in mv.batches(40, 4)])]
for _ in range(50 if life == 0 else 7):
    table.add(np.ones(1000))
if life == 0:
    if me == 0:
        checkpoint.save({"epoch": 1})
    mv.barrier()  # from here on the others hand over, too
    if me:
        checkpoint.step({"epoch": 1})
    checkpoint.close()
    mv.barrier()
if me == 1:
    told.fetch_add()
    notes[PID] = os.getpid()
    if life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if life == 1:
        while True:  # until worker 0 kills it
            rows.add(np.ones((1, 16)), row_ids=[1])
            notes[DONE] += 1
if me == 0:
    wait_for(lambda: told.value == 2 and notes[DONE] > 100)
    os.kill(int(notes[PID]), signal.SIGKILL)
if me != 1:
    wait_for(lambda: told.value == 3)
mv.barrier()
if me == 0:
    values, row = np.unique(table.get()), np.unique(rows.get([1]))
    assert len(values) == len(row) == 1
    notes[SUM], notes[ROW] = values[0], row[0]
mv.barrier()
print("worker", me, "life", life, "is done", flush=True)
mv.shutdown()
"""


def test_a_worker_that_dies_is_replaced_and_nothing_counts_twice(tmp_path: Path) -> None:
    """Killed by itself between two adds, then by another one at any moment: the third process of it ends the job."""
    notes = tmp_path / "notes"
    notes.write_bytes(bytes(64))
    job = script(tmp_path, JOB)
    done = multiverso("run", "-n", 3, "--on-failure", "continue", "--replace", 2, job, notes)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split("] ")[1] for line in done.stdout.splitlines()) == [
        "life 0 begins with None at barrier 3",
        "life 1 begins with {'epoch': 1} at barrier 5",
        "life 2 begins with {'epoch': 1} at barrier 5",
        "worker 0 life 0 is done",
        "worker 1 life 2 is done",
        "worker 2 life 0 is done",
    ]
    said = [line.partition("; ")[2].replace(" in 0.5 s", "") for line in done.stderr.splitlines()]
    # without a pause if the second life took 10 seconds
    assert said == [f"it is started again ({number} of at most 2 replacements)." for number in (1, 2)]
    counted, _, total, row = np.frombuffer(notes.read_bytes(), np.int64)[:4]
    assert total == 5 + 3 * 50 + 7 + 7, "initial values of replacements do not count, and their adds once"
    assert row in (counted, counted + 1), "an add that has returned is there; the one that it died in is, or is not"


def test_who_fails_again_and_again_is_given_up(tmp_path: Path) -> None:
    job = script(tmp_path, "import os, sys\nsys.exit(3 * int(os.environ['MULTIVERSO_WORKER_ID']))")
    done = multiverso("run", "-n", 2, "--on-failure", "continue", "--replace", 1, job)
    assert done.returncode == 0
    words = ["it is started again (1 of at most 1 replacements).", "the others continue."]
    said = [line for line in done.stderr.splitlines() if "exit code 3" in line]
    assert [line.partition("; ")[2] for line in said[:2]] == words
    refused = multiverso("run", "-n", 2, "--replace", 1, job)
    assert refused.returncode == 2
    assert "--on-failure continue" in refused.stderr


def test_who_fails_after_its_shutdown_is_not_replaced(tmp_path: Path) -> None:
    """Its part is done: a new process would wait until the others have left, and then do all of it again, alone."""
    text = "import multiverso as mv\nmv.init()\nmv.barrier()\nmv.shutdown()\nprint('done', flush=True)\n"
    job = script(tmp_path, text + "raise SystemExit(3)")
    done = multiverso("run", "-n", 1, "--on-failure", "continue", "--replace", 1, job)
    assert (done.returncode, done.stdout) == (3, "[0] done\n")
    assert "started again" not in done.stderr


def test_ctrl_c_while_a_replacement_waits_for_its_start_ends_the_job(tmp_path: Path) -> None:
    text = "import os, sys, time\nif int(os.environ['MULTIVERSO_WORKER_ID']): sys.exit(3)\n"
    job = script(tmp_path, text + "print('up', flush=True)\nwhile True: time.sleep(0.02)")
    running = Running(command("run", "-n", 2, "--on-failure", "continue", "--replace", 99, job))
    running.lines(1)
    assert running.process.stderr is not None
    while "started again in" not in (line := running.process.stderr.readline()):
        assert line, "it has ended"
    running.send(signal.SIGINT)
    assert running.end()[0] == 130


def test_pauses_grow_until_something_has_run_for_a_while() -> None:
    pauses = Pauses()
    assert [pauses.after(0.1) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [pauses.after(11.0), pauses.after(0.1), pauses.after(0.1)] == [0, 0, 0.5]


@pytest.mark.parametrize("most", [0, 2])
def test_replacements_are_counted_for_all_workers_together(most: int) -> None:
    replacements = Replacements(most)
    ends = [WorkerExit(worker, 7, 1, None, False, 0.1) for worker in (0, 1, 2)]
    assert [replacements.after(end) for end in ends] == [0.0] * most + [None] * (3 - most)


def test_who_was_replaced_is_not_said_to_have_left_the_others(tmp_path: Path) -> None:
    """Another one fails while the node still calls the replaced one lost, as its new process has not come to it yet."""
    first, started, failed = (tmp_path / name for name in ("first", "started", "failed"))
    await_file = "until [ -e {} ]; do sleep 0.01; done; exit {}"
    texts = [
        await_file.format(started, 3),
        f"[ -e {first} ] || {{ touch {first}; exit 1; }}; " + await_file.format(failed, 0),
    ]
    lost = [1]
    starts: list[int] = []

    def start(worker_id: int, pid: int) -> None:
        starts.append(worker_id)
        if starts.count(1) == 2:
            started.touch()

    def end(end: WorkerExit) -> None:
        if end.worker_id == 0:
            lost.clear()
            failed.touch()

    replacements = Replacements(1)
    result = Job(
        [
            WorkerCommand(
                ("sh", "-c", text),
                {**os.environ, "OF_THIS_TEST": str(tmp_path)},
                files=(tmp_path / "out", tmp_path / "err"),
            )
            for text in texts
        ],
        marker=f"OF_THIS_TEST={tmp_path}",
        on_failure="continue",
        on_start=start,
        on_exit=end,
        again=replacements.after,
        lost_workers=lambda: lost,
    ).run(60)
    assert [end.code for end in result.exits] == [3, 0]
    assert result.culprit is not None
    assert result.culprit.worker_id == 0
    assert result.deserter is None


def test_a_replacement_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system had no process left at that moment: that ended the whole job, with a traceback."""
    starts: list[int] = []
    said: list[str] = []

    def spawn(worker: WorkerCommand, *, keep_stdin: bool = False) -> subprocess.Popen[bytes]:
        starts.append(len(starts))
        if len(starts) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return processes.spawn(worker, keep_stdin=keep_stdin)

    monkeypatch.setattr("multiverso.launch.job.spawn", spawn)
    text = f"[ -e {tmp_path}/failed ] && exit 0; touch {tmp_path}/failed; exit 3"
    environ = {**os.environ, "OF_THIS_TEST": str(tmp_path)}
    files = (tmp_path / "out", tmp_path / "err")

    def job(most: int) -> JobResult:
        return Job(
            [WorkerCommand(("sh", "-c", text), environ, files=files)],
            marker=f"OF_THIS_TEST={tmp_path}",
            on_failure="continue",
            again=Replacements(most).after,
            on_trouble=said.append,
        ).run(60)

    assert [end.code for end in job(2).exits] == [0]
    assert len(said) == 1
    assert "worker 0 cannot be started: Resource temporarily unavailable; start fewer" in said[0]
    (tmp_path / "failed").unlink()
    starts.clear()
    assert [end.code for end in job(1).exits] == [3], "and given up when there were as many as there may be"
    starts[:] = [0]
    with pytest.raises(StartupError, match="cannot be started"):  # the first start of a job
        job(2)


def test_a_replacement_that_cannot_be_started_is_none_of_those_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[WorkerCommand] = []

    def spawn(worker: WorkerCommand, *, keep_stdin: bool = False) -> subprocess.Popen[bytes]:
        starts.append(worker)
        if len(starts) in (3, 4):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return processes.spawn(worker, keep_stdin=keep_stdin)

    monkeypatch.setattr("multiverso.launch.job.spawn", spawn)
    first = f"[ -e {tmp_path}/failed ] && touch {tmp_path}/again && exit 0; touch {tmp_path}/failed; exit 3"
    other = f"until [ -e {tmp_path}/again ]; do sleep 0.05; done"
    environ = {**os.environ, "OF_THIS_TEST": str(tmp_path)}
    files = (tmp_path / "out", tmp_path / "err")
    result = Job(
        [WorkerCommand(("sh", "-c", text), environ, files=files) for text in (first, other)],
        marker=f"OF_THIS_TEST={tmp_path}",
        on_failure="continue",
        again=Replacements(1).after,
    ).run(60)
    assert [end.code for end in result.exits] == [0, 0]
    assert len(starts) == 5


def test_a_launcher_without_standard_files_has_none_in_their_place() -> None:
    child = os.fork()
    if not child:
        wrong = True
        try:
            os.closerange(0, 3)
            sys.stdin = sys.stdout = sys.stderr = None  # as an interpreter has it that was started so
            open_standard_files()
            files = [sys.stdin, sys.stdout, sys.stderr]
            wrong = [file.fileno() for file in files if file is not None] != [0, 1, 2] or os.open("/", 0) < 3
        finally:
            os._exit(wrong)  # whatever was raised: the other tests are our parent's
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
