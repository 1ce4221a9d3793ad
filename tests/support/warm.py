"""Programs that begin in a fork of an interpreter that has imported what they need.

An interpreter takes a third of a second of processor time to import NumPy and multiverso, and seconds to import a
framework. A fork of one that has done so takes a hundredth: for tests of what a program does, not of how it starts::

    with Warm("numpy", "platoon") as warm:
        program = warm.start("worker.py", "--rate", "0.1", cwd=folder, env=environment)
        out, err = program.communicate(timeout=60)

Run as a script, this file is the interpreter. It ends with its socket, and takes with it what it has forked.
"""

from __future__ import annotations

import atexit
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
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import forked_workers

MOST_BYTES = 1 << 20  # of a request: mostly the environment
COMMANDS: dict[str, list[str]] = {
    "python": [],
    "multiverso": ["-m", "multiverso"],
    "platoon-launcher": ["-m", "platoon.launcher"],
}
# A script that is told to take a command of ours for its interpreter.
WHOLE = """
import runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COMMAND = """#!{python} -IS
import json, os, socket, sys
interpreter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
interpreter.connect({address!r})
what = dict(args=[*{words}, *sys.argv[1:]], cwd=os.getcwd(), env=dict(os.environ))
socket.send_fds(interpreter, [json.dumps(what).encode()], [0, 1, 2])
code = int(interpreter.recv(100))
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


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
            with suppress(ProcessLookupError):  # it has ended, and we have not been told yet
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
        forks: whether the workers that a program starts by our launchers begin in forks, too, see `forked_workers`.
    """

    def __init__(
        self, *modules: str, env: Mapping[str, str] | None = None, without: tuple[str, ...] = (), forks: bool = False
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._programs: dict[int, Program] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # for `write_commands`
        # not a node's name: whoever looks for nodes would ask here, and be taken for a command
        listener.bind(f"\0tests-of-multiverso-{os.urandom(8).hex()}")
        listener.listen(16)
        self._address = listener.getsockname().decode()
        what = json.dumps([modules, without, forks, listener.fileno(), 0])
        command = [sys.executable, "-u", __file__, str(theirs.fileno()), what]
        with theirs, listener:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(env or {})},
                pass_fds=[theirs.fileno(), listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def start(self, *args: str, cwd: Path, env: Mapping[str, str]) -> Program:
        """Starts ``python -u ARGS`` in a session of its own, with nothing to read; its output is kept in memory.

        ``ARGS`` begin with a script, with ``-c`` and a text, or with ``-m`` and a module; before them, ``-W error``.
        """
        program = Program(self, args)
        with open(os.devnull) as nothing:
            self._ask(program, cwd, env, nothing.fileno(), program.stdout.descriptor, program.stderr.descriptor)
        return program

    def run(
        self, *args: str, cwd: Path, env: Mapping[str, str], timeout: float = 250
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``python -u ARGS`` to its end, as `start`, with pipes for its output."""
        return self._run_all([args], [env], cwd, timeout)[0]

    def run_job(
        self, workers: int, *args: str, cwd: Path, env: Mapping[str, str], timeout: float = 250, hosts: int = 1
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
                            self._ask(programs[-1], cwd, env, nothing.fileno(), *(theirs for _, theirs in pipes))
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

    def write_commands(self, folder: Path) -> None:
        """Writes commands for a shell, ``python`` and ours, that begin in a fork and end as that does."""
        for name, words in COMMANDS.items():
            text = COMMAND.format(python=sys.executable, address=self._address, words=words)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def run_whole(
        self, folder: Path, script: str, *args: str, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script; what it starts by `sys.executable`, or by a command beside that, begins in forks, too.

        The commands are written to the folder. One that is killed takes its program with it.
        """
        self.write_commands(folder)
        return self.run("-c", WHOLE, str(folder / "python"), script, *args, cwd=cwd, env=env)

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


def _wait_to_be_a_program(control: socket.socket, listener: socket.socket) -> list[str]:
    """Forks for each request; returns in the forked process, as a new program would begin, with its arguments."""
    children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of the process: its number, who asked for it
    commands: dict[socket.socket, int] = {}  # what `write_commands` wrote, and runs: the number of its process
    while True:
        heard: list[int | socket.socket] = [control, listener, *children, *commands]
        for ready in select.select(heard, (), ())[0]:
            if isinstance(ready, int):
                os.close(ready)
                pid, asker = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                commands.pop(asker, None)
                with suppress(ConnectionError):
                    asker.send(json.dumps([pid, code] if asker is control else code).encode())
                if asker is not control:
                    asker.close()
                continue
            if ready is not control and ready is not listener:
                if ready in commands:  # it was killed, and takes its program with it
                    os.kill(commands.pop(ready), signal.SIGKILL)
                continue
            asker = control if ready is control else listener.accept()[0]
            request, streams = b"", list[int]()
            with suppress(ConnectionError):  # it has closed its end, and left something there unread
                request, streams, _, _ = socket.recv_fds(asker, MOST_BYTES, 3)
            if not request and asker is control:
                _end([pid for pid, _ in children.values()])
            if not request:  # a command that was killed just now
                asker.close()
                continue
            pid = os.fork()
            if not pid:
                os.setsid()  # before anybody who knows it can want to end it with all that it has started
                if asker is control:
                    control.send(json.dumps([os.getpid(), None]).encode())
                for descriptor, (_, other) in children.items():
                    os.close(descriptor)
                    other.close()
                for ours in (control, listener, asker):
                    ours.close()
                return _become(json.loads(request), streams)
            for stream in streams:
                os.close(stream)
            children[os.pidfd_open(pid)] = pid, asker
            if asker is not control:
                commands[asker] = pid


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # which has no session of its own yet
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    forked_workers.become(dict(enumerate(streams)), request["cwd"], request["env"])
    return list(request["args"])


def _leave(code: int) -> None:
    """Ends this process as the interpreter would, but for what was imported before the fork: that is not taken apart.

    Each object would be touched, and its page copied: a third of a second of processor time with PyTorch. Returns
    where its output cannot be written, which the interpreter tells.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _main(control: int, modules: list[str], without: list[str], forks: bool, listener: int, launcher: int) -> None:
    gc.disable()  # what is imported is there to stay
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    asker = socket.socket(fileno=control)
    if launcher:
        args = forked_workers.wait_to_be_a_worker(asker, launcher)
    else:
        args = _wait_to_be_a_program(asker, socket.socket(fileno=listener))
    if forks:
        args = forked_workers.program_of(args)
    if args[0] == "-W":
        sys.warnoptions[:] = [args[1]]
        warnings.resetwarnings()
        warnings.simplefilter(args[1])  # type: ignore[arg-type]
        args = args[2:]
    here = [os.getcwd()]
    if args[0] == "-P":
        here, args = [], args[1:]
    if args[0] == "-m":
        sys.path[:1], sys.argv = here, ["-m", *args[2:]]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    if args[0] == "-c":
        source, file, sys.path[0], sys.argv = args[1], "<string>", "", ["-c", *args[2:]]
    else:
        file = os.path.abspath(args[0])
        source, sys.argv = Path(file).read_text(), args
        sys.path[0] = str(Path(file).resolve().parent)
    main = types.ModuleType("__main__")
    main.__file__ = file
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec"), main.__dict__)


if __name__ == "__main__":
    status = 0
    try:
        _main(int(sys.argv[1]), *json.loads(sys.argv[2]))
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        status = error.code or 0
    _leave(status)
