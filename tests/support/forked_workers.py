"""Workers that begin in a fork of their launcher: for tests of what a job does, not of how its processes start.

Our launchers start each worker as a new interpreter, which takes a quarter of a second of processor time to import
NumPy and multiverso, and seconds to import a framework. In a program that has called `program_of`, every worker that
`multiverso.launch.processes.spawn` starts is forked instead, from a copy of that program that has done nothing but
import. It is a process like the other: a child of the launcher, in a session of its own, that is killed with it, with
its environment and its streams; but /proc shows the environment of the interpreter that was forked.

What is not just a script, a module or a text (another program, other options of Python, another search path) is
started as ever.

An `Interpreter` is the same for workers that this process starts itself, by `multiverso.run`: they begin in forks of an
interpreter beside it, which imports what all of them need once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20  # of a request: mostly the environment
MOST_DESCRIPTORS = 64
LAUNCHERS = ("multiverso", "multiverso.cli", "platoon.launcher", "platoon.channel.controller")
_SHIM = 6  # what `spawn` puts before the worker's command
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_libc = ctypes.CDLL(None)


def program_of(args: list[str]) -> list[str]:
    """Lets this process fork its workers; returns what to run: its own program, or in a fork a worker's."""
    while True:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.getpid()
        if os.fork():
            theirs.close()
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _fork_in_spawn(ours)
            return args
        ours.close()
        args = wait_to_be_a_worker(theirs, launcher)
        name = args[args.index("-m") + 1 if args[0] in ("-m", "-P") else 0]
        if name not in LAUNCHERS and not name.endswith("_controller.py"):
            return args


class Interpreter:
    """An interpreter that has imported some modules, from which this process's workers are forked.

    Args:
        modules: what it imports.
        env: what its environment has besides ours while it imports.
        without: modules that are not to be found, which others import only because they are installed.
        forks: whether the workers that a program starts by our launchers begin in forks, too.
    """

    def __init__(
        self, *modules: str, env: Mapping[str, str] | None = None, without: tuple[str, ...] = (), forks: bool = False
    ) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        what = json.dumps([modules, without, forks, -1, os.getpid()])
        warm = str(Path(__file__).with_name("warm.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", warm, str(theirs.fileno()), what],
                env={**os.environ, **(env or {})},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @contextmanager
    def forking(self) -> Iterator[None]:
        """In the block, the workers of `multiverso.run` are forks of the interpreter."""
        with _adopting():
            undo = _fork_in_spawn(self._asking)
            try:
                yield
            finally:
                undo()

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts ``python COMMAND`` in a fork; the rest is as for `subprocess.Popen`."""
        with _adopting():
            return _forked(self._asking, lambda args, _: args)(command, **options)

    def close(self) -> None:
        self._asking.close()
        self._process.wait()


@contextmanager
def _adopting() -> Iterator[None]:
    """In the block, this process is the parent of what its children leave behind."""
    before = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def become(descriptors: dict[int, int], cwd: str, env: dict[str, str]) -> None:
    """Gives this process what another was to have: descriptors, under their numbers there, and the environment."""
    apart = 1 + max((*descriptors, *descriptors.values()))
    moved = {number: os.dup2(given, apart + place) for place, (number, given) in enumerate(descriptors.items())}
    for given in descriptors.values():
        os.close(given)
    for number, given in moved.items():
        os.dup2(given, number)
        os.close(given)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # each begins with numbers of its own, as a new interpreter does


# -- in the launcher -------------------------------------------------------------------------------------------


def _fork_in_spawn(zygote: socket.socket) -> Callable[[], None]:
    """Returns what undoes it."""
    from multiverso.launch import processes

    pythons = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}

    def command_of(args: Any, env: Any) -> list[str]:
        command = [] if isinstance(args, str) else _forkable([*map(str, args)][_SHIM:])
        if not command or not args[3].endswith("_shim.py") or args[5] != "-" or not _same(pythons, env):
            return []
        return command

    forking = types.ModuleType("subprocess")
    forking.__dict__.update(vars(subprocess), Popen=_forked(zygote, command_of))
    before, processes.subprocess = processes.subprocess, forking  # type: ignore[attr-defined]
    return lambda: setattr(processes, "subprocess", before)


def _forked(zygote: socket.socket, command_of: Callable[[Any, Any], Sequence[str]]) -> type[subprocess.Popen[Any]]:
    """What starts processes, and forks those for which there is a command."""
    asking = threading.Lock()

    class Forked(subprocess.Popen[Any]):
        """A worker; anything else is started as ever."""

        def _execute_child(self, args: Any, *others: Any) -> None:
            pass_fds, env, streams = others[3], others[5], others[9:15]
            reading, _, _, writing, _, error = streams
            command = command_of(args, env)
            if not command:
                super()._execute_child(args, *others)  # type: ignore[misc]
                return
            sent = [given if given >= 0 else number for number, given in enumerate((reading, writing, error))]
            numbers = [0, 1, 2, *pass_fds]
            request = json.dumps([command, os.getcwd(), env, numbers]).encode()
            assert len(request) < MOST_BYTES
            with asking:
                socket.send_fds(zygote, [request], [*sent, *pass_fds])
                self.pid = int(zygote.recv(100))  # our child, and in its session
            self._child_created = True
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    return Forked


def _forkable(command: list[str]) -> list[str]:
    """What Python is to run, or nothing where it is to be another program, or told more."""
    if command[:1] != [sys.executable]:
        return []
    rest = command[2:] if command[1:2] == ["-u"] else command[1:]
    ours = rest[0] in ("-m", "-c") or rest[:2] == ["-P", "-m"] or os.path.isfile(rest[0])
    return rest if ours else []


def _same(pythons: dict[str, str], env: dict[str, str]) -> bool:
    told = {name: value for name, value in env.items() if name.startswith("PYTHON")}
    return {**told, "PYTHONUNBUFFERED": "1"} == {**pythons, "PYTHONUNBUFFERED": "1"}


# -- in its copy -----------------------------------------------------------------------------------------------


def wait_to_be_a_worker(launcher: socket.socket, pid: int) -> list[str]:
    """Forks for each request; returns in the worker, with what it is to run."""
    os.setsid()
    os.chdir("/")  # out of the way of who looks for what is left in a test's folder
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # whose ends others wait for
        os.dup2(nothing, stream)
    os.close(nothing)
    while True:
        request, given, _, _ = socket.recv_fds(launcher, MOST_BYTES, MOST_DESCRIPTORS)
        if not request:
            os._exit(0)
        # The launcher adopts what its copy leaves behind.
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            command, cwd, env, numbers = json.loads(request)
            _follow(pid)
            os.setsid()
            launcher.send(str(os.getpid()).encode())
            launcher.close()
            become(dict(zip(numbers, given, strict=True)), cwd, env)
            return list(command)
        os.waitpid(between, 0)
        for descriptor in given:
            os.close(descriptor)


def _follow(launcher: int) -> None:
    """Waits to be the launcher's child, and asks to be killed with it."""
    between = os.getppid()
    while os.getppid() == between and between != launcher:
        time.sleep(0.0005)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(1)
