"""Programs that begin in a fork of an interpreter that has imported what they need.

An interpreter takes a third of a second of processor time to import NumPy and multiverso, and seconds to import a
framework. A fork of one that has done so takes a hundredth: for tests of what a program does, not of how it starts::

    with Warm("numpy", "platoon") as warm:
        program = warm.start("worker.py", "--rate", "0.1", cwd=folder, env=environment)
        out, err = program.communicate(timeout=60)

Run as a script, this file is the interpreter. It ends with its socket, and takes with it what it has forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20  # of a request: mostly the environment


class Written:
    """What a program has written to one of its streams, kept in memory."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(f"warm-{name}")
        self._read = 0

    def readline(self, seconds: float = 250) -> str:
        """Waits for a line that has not been read yet."""
        end = time.monotonic() + seconds
        while b"\n" not in (rest := self._rest()):
            assert time.monotonic() < end, f"no line came; before its end stands {rest!r}"
            select.select((), (), (), 0.005)
        line = rest[: rest.index(b"\n") + 1]
        self._read += len(line)
        return line.decode()

    def read(self) -> str:
        """Returns what has not been read yet."""
        rest = self._rest()
        self._read += len(rest)
        return rest.decode()

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _rest(self) -> bytes:
        size = os.fstat(self.descriptor).st_size
        return os.pread(self.descriptor, size - self._read, self._read)


class Program:
    """A program that was started; what the tests use of `subprocess.Popen`."""

    def __init__(self, warm: Warm, args: Sequence[str]) -> None:
        self.args = args
        self.stdout, self.stderr = Written("stdout"), Written("stderr")
        self.returncode: int | None = None
        self.pid = 0
        self._warm = warm
        self._said: tuple[str, str] | None = None

    def poll(self) -> int | None:
        self._warm._look(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e6 if timeout is None else timeout)
        while self.returncode is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._warm._look(left)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end; returns what was written and not read yet, the same again when it is called again."""
        self.wait(timeout)
        if self._said is None:
            self._said = self.stdout.read(), self.stderr.read()
            self.close()
        return self._said

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Kills it with all that it has started in its session, if it still runs, and forgets what it wrote."""
        if self.pid and self.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.stdout.close()
        self.stderr.close()


class Warm:
    """An interpreter that has imported some modules and forks itself for each program.

    Args:
        modules: what it imports.
        env: what its environment has besides ours while it imports.
        without: modules that are not to be found, which others import only because they are installed.
    """

    def __init__(
        self, *modules: str, env: Mapping[str, str] | None = None, without: tuple[str, ...] = ()
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._programs: dict[int, Program] = {}
        what = json.dumps([modules, without])
        command = [sys.executable, "-u", __file__, str(theirs.fileno()), what]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, *args: str, cwd: Path, env: Mapping[str, str]) -> Program:
        """Starts ``python -u ARGS`` in a session of its own, with nothing to read; its output is kept in memory.

        ``ARGS`` begin with a script, with ``-c`` and a text, or with ``-m`` and a module; before them, ``-W error``.
        """
        program = Program(self, args)
        with open(os.devnull) as nothing:
            self._ask(
                program, cwd, env, nothing.fileno(), program.stdout.descriptor, program.stderr.descriptor
            )
        return program

    def run(
        self, *args: str, cwd: Path, env: Mapping[str, str], timeout: float = 250
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``python -u ARGS`` to its end, as `start`, with pipes for its output."""
        return self._run_all([args], [env], cwd, timeout)[0]

    def run_job(
        self,
        workers: int,
        *args: str,
        cwd: Path,
        env: Mapping[str, str],
        timeout: float = 250,
        hosts: int = 1,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs ``python -u ARGS`` in each worker of a job whose nodes are here; returns what each left, in order."""
        from multiverso.hosts.roster import spread
        from multiverso.launch.rehearsing import hosts_here
        from multiverso.runtime import Node

        with ExitStack() as stack:
            if hosts == 1:
                nodes = [stack.enter_context(Node(workers))] * workers
            else:
                roster, made = stack.enter_context(hosts_here(spread(workers, hosts)))
                nodes = [made[roster.host_of(worker)] for worker in range(workers)]
            envs = [
                {
                    **env,
                    "MULTIVERSO_NODE": nodes[worker].address,
                    "MULTIVERSO_WORKERS_NUM": str(workers),
                    "MULTIVERSO_WORKER_ID": str(worker),
                }
                for worker in range(workers)
            ]
            return self._run_all([args] * workers, envs, cwd, timeout)

    def _run_all(
        self, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: Path, timeout: float
    ) -> list[subprocess.CompletedProcess[str]]:
        end = time.monotonic() + timeout
        programs: list[Program] = []
        said: list[list[Future[str]]] = []
        with ThreadPoolExecutor(2 * len(commands)) as readers:
            try:
                for args, env in zip(commands, envs, strict=True):
                    pipes = [os.pipe() for _ in range(2)]
                    said.append([readers.submit(_read_all, ours) for ours, _ in pipes])
                    programs.append(Program(self, args))
                    try:
                        with open(os.devnull) as nothing:
                            self._ask(
                                programs[-1], cwd, env, nothing.fileno(), *(theirs for _, theirs in pipes)
                            )
                    finally:
                        for _, theirs in pipes:
                            os.close(theirs)
                for program in programs:
                    program.wait(end - time.monotonic())
            finally:
                for program in programs:
                    program.close()
        return [
            subprocess.CompletedProcess(program.args, program.wait(), *(text.result() for text in streams))
            for program, streams in zip(programs, said, strict=True)
        ]

    def _ask(self, program: Program, cwd: Path, env: Mapping[str, str], *streams: int) -> None:
        request = json.dumps({"args": program.args, "cwd": str(cwd), "env": dict(env)}).encode()
        assert len(request) < MOST_BYTES
        socket.send_fds(self._control, [request], list(streams))
        while not program.pid:
            self._look(1000, program)
        self._programs[program.pid] = program

    def _look(self, seconds: float, begun: Program | None = None) -> None:
        """Takes the next thing that the interpreter says: that a program has begun, or ended."""
        if not select.select([self._control], (), (), seconds)[0]:
            return
        said = self._control.recv(1000)
        if not said:
            raise RuntimeError(f"the warm interpreter ended with {self._process.wait()}")
        pid, code = json.loads(said)
        if code is None:
            assert begun is not None
            begun.pid = pid
        elif pid in self._programs:
            self._programs.pop(pid).returncode = code

    def close(self) -> None:
        self._control.close()
        self._process.wait()

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_all(descriptor: int) -> str:
    with open(descriptor) as file:
        return file.read()


# -- in the interpreter ----------------------------------------------------------------------------------------


def _wait_to_be_a_program(control: socket.socket) -> list[str]:
    """Forks for each request; returns in the forked process, as a new program would begin, with its arguments."""
    children: dict[int, int] = {}  # descriptor of the process: its number
    while True:
        for ready in select.select([control, *children], (), ())[0]:
            if ready is not control:
                os.close(ready)
                pid = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    control.send(json.dumps([pid, code]).encode())
                continue
            request, streams, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
            if not request:
                _end(list(children.values()))
            pid = os.fork()
            if not pid:
                os.setsid()  # before anybody who knows it can want to end it with all that it has started
                control.send(json.dumps([os.getpid(), None]).encode())
                control.close()
                for descriptor in children:
                    os.close(descriptor)
                return _become(json.loads(request), streams)
            for stream in streams:
                os.close(stream)
            children[os.pidfd_open(pid)] = pid


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # which has no session of its own yet
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return list(request["args"])


def _main(control: int, modules: list[str], without: list[str]) -> None:
    gc.disable()  # what is imported is there to stay
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    args = _wait_to_be_a_program(socket.socket(fileno=control))
    if args[0] == "-W":
        sys.warnoptions[:] = [args[1]]
        warnings.resetwarnings()
        warnings.simplefilter(args[1])  # type: ignore[arg-type]
        args = args[2:]
    if args[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), ["-m", *args[2:]]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    if args[0] == "-c":
        source, file, sys.path[0], sys.argv = args[1], "<string>", "", ["-c", *args[2:]]
    else:
        source, file, sys.argv = Path(args[0]).read_text(), args[0], args
        sys.path[0] = str(Path(file).resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = file
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec"), main.__dict__)


if __name__ == "__main__":
    _main(int(sys.argv[1]), *json.loads(sys.argv[2]))
