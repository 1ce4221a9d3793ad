"""Experiments in a folder of their own: files written by a test, run by the launcher or by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platoon.channel import Controller
from warm import Program, Warm

# A worker that reduces the shared variables that the functions in `makers` make.
SHARED_VARIABLES = """
    import numpy as np
    from multiverso.errors import ShapeMismatchError
    from platoon.worker import Worker

    worker = Worker(control_port=5567)
    size = worker.global_size
    assert worker._multinode is False
    first = np.arange(6.0).reshape(2, 3)
    for make in makers:
        src, dest = make(first), make(np.empty_like(first))
        assert worker.all_reduce(src, "+", dest) is None
        assert (dest.get_value() == size * first).all() and (src.get_value() == first).all()
        worker.all_reduce(src, "+", src)
        assert (src.get_value() == size * first).all()
        for op, wanted in (("*", (size * first) ** size), ("max", size * first), ("min", size * first)):
            result = worker.all_reduce(src, op)
            assert type(result) is type(src) and result is not src, result
            np.testing.assert_allclose(result.get_value(), wanted)
            assert (src.get_value() == size * first).all()
        array = np.empty_like(first)
        worker.all_reduce(src, "+", array)
        assert (array == size * size * first).all()
        worker.all_reduce(array, "max", dest)
        assert (dest.get_value() == array).all()
        try:
            worker.all_reduce(src, "+", make(np.zeros(7)))
        except ShapeMismatchError as error:
            assert "(2, 3)" in str(error), error
        else:
            raise AssertionError("it took a variable of another shape")
        memory = worker.shared(src)
        assert (memory.shape, memory.dtype) == (first.shape, first.dtype)
        assert worker.shared(src) is memory is worker.shared_arrays[first.nbytes]
    print("all there")
"""

SECONDS = 150  # the first test after a change of a kernel compiles, maybe on a busy machine


@dataclass
class Result:
    """What a launch left: its exit code, what it printed, and the logs by name."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def logs(self) -> dict[str, str]:
        runs = sorted((self.folder / "PLATOON_LOGS").glob("*/*"))
        return {file.name: file.read_text() for file in sorted(runs[-1].iterdir())} if runs else {}

    def outputs(self) -> list[str]:
        """What the workers printed, in rank order."""
        return [text for name, text in self.logs.items() if name.startswith("worker") and name.endswith(".out")]

    def __str__(self) -> str:
        logs = "\n".join(f"--- {name}\n{text}" for name, text in self.logs.items())
        return f"exit code {self.code}\n{self.out}\n{self.err}\n{logs}"


@dataclass
class Experiment:
    """A folder with worker and controller files, and the processes started in it.

    Scripts and launchers begin in a fork of ``warm``, and so does what a launcher starts.
    """

    folder: Path
    warm: Warm
    started: list[Program | subprocess.Popen[str]] = field(default_factory=list)

    def write(self, **files: str) -> Experiment:
        """Writes ``name.py`` for each keyword."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        return self

    def environment(self, **variables: str) -> dict[str, str]:
        names = ("PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC", "THEANO_FLAGS")
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        return {**inherited, "HOME": str(self.folder), "OMP_NUM_THREADS": "1", **_caches(), **variables}

    def launch(self, *arguments: str, **variables: str) -> Result:
        """Runs the launcher to its end."""
        return self._result(self.start("-m", "platoon.launcher", *arguments, **variables))

    def launch_program(self, *arguments: str) -> Result:
        """Runs `platoon-launcher` to its end as a person does: all that it starts are new interpreters."""
        program = Path(sys.executable).with_name("platoon-launcher")
        return self._result(self.start_fresh(str(program), *arguments))

    def _result(self, launcher: Any) -> Result:
        out, err = launcher.communicate(timeout=SECONDS)
        return Result(launcher.returncode, out, err, self.folder)

    def train(self, name: str, workers: int, *arguments: str, **variables: str) -> list[str]:
        """Runs ``NAME_worker.py`` in workers of a controller here; returns what each printed, in rank order.

        What the launcher does, without it and without a controller file; all workers have to succeed.
        """
        controller = Controller(control_port=0, devices=["cpu"] * workers)
        try:
            controller.init_control(0)

            variables["PLATOON_CONTROL_PORT"] = str(controller.control_port)
            serving = threading.Thread(target=controller.serve)
            serving.start()
        except BaseException:
            controller.close()
            raise
        try:
            programs = [
                self.start(f"{name}_worker.py", *arguments, PLATOON_LOCAL_RANK=str(rank), **variables)
                for rank in range(workers)
            ]
            # one that failed would keep the others waiting
            until(lambda: all(p.poll() == 0 for p in programs) or any(p.poll() for p in programs))
        finally:
            self.end()
            controller.stop()
            serving.join(SECONDS)
        said = [program.communicate() for program in programs]
        assert [program.returncode for program in programs] == [0] * workers, said
        assert not serving.is_alive()
        return [out for out, _ in said]

    def start(self, *command: str, **variables: str) -> Any:
        """Starts a Python process in the folder, in a fork."""
        process = self.warm.start(*command, cwd=self.folder, env=self.environment(**variables))
        self.started.append(process)
        return process

    def start_fresh(self, *command: str, **variables: str) -> Any:
        """Starts a Python process in the folder as a person does: it and what it starts are new interpreters."""
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Kills whatever still runs."""
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()

    def finish(self, process: Any, code: int | None = 0) -> str:
        """Waits for a process and returns what it printed; its exit code has to be as given."""
        out, err = process.communicate(timeout=SECONDS)
        assert code is None or process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        said: str = out + err
        return said


def _caches() -> dict[str, str]:
    # HOME is the test's folder, but compiled kernels are kept where they always are
    home = os.environ.get("MULTIVERSO_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {"MULTIVERSO_CACHE_DIR": home}


def until(condition: Any, seconds: float = SECONDS) -> None:
    """Waits until a condition holds; fails if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.01)
