"""Joining the job that the environment names, and starting its node unless it runs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy

from multiverso.deadline import checked_seconds
from multiverso.errors import NodeLostError, StartupError
from multiverso.hosts.options import VARIABLES, ExchangeOptions
from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE
from multiverso.layout.words import MAX_WORKERS, MOST_WORKERS
from multiverso.runtime.discovery.environment import JobInfo, discover, socket_name
from multiverso.runtime.session.session import START_SECONDS, Session
from multiverso.wire import messages
from multiverso.wire.trust import new_secret, proof_needed, user_secret

if TYPE_CHECKING:
    from multiverso.runtime.discovery.meetings.meeting import Met

_NODE_ATTEMPTS = 12
_LOOK_SECONDS = 0.02
# Where this package and the only other ones that a node needs lie: perhaps on our path alone.
_PLACES = tuple(
    str(Path(file).absolute().parents[up]) for file, up in ((__file__, 2), (numpy.__file__, 1), (msgspec.__file__, 1))
)
_NODE_PROGRAM = """
import sys
sys.path += sys.argv[5:]
from multiverso.runtime.node_process import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
"""
TIMEOUT_VARIABLE = "MULTIVERSO_TIMEOUT_SECONDS"


def join(
    environ: Mapping[str, str] | None = None,
    *,
    on_lost: str | None = None,
    wire: str | None = None,
    every: float | str | None = None,
    between: str | None = None,
    timeout_seconds: float | None = None,
    start_timeout_seconds: float | None = None,
    **consistency: Any,
) -> Session:
    """Returns this process's session in the job that its environment belongs to.

    A job of `multiverso run` has its node in the launcher. In one of mpirun, torchrun or srun the worker that
    comes first starts the node as a child process; a plain process holds its node itself.

    Args:
        environ: the environment; this process's by default.
        on_lost, wire, every, between, timeout_seconds, start_timeout_seconds: see `multiverso.init`.
        consistency: ``sync``, ``staleness``, ``quorum``, ``grace_seconds``, ``record`` and ``replay``, likewise.

    Raises:
        StartupError: see ``multiverso.runtime.discovery.environment``; or this is not Linux.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise StartupError(
            f"multiverso runs on Linux (x86-64, aarch64); this is {platform.system()} on {platform.machine()}"
        )
    environ = os.environ if environ is None else environ
    if on_lost not in (None, "stop", "continue"):
        raise StartupError(f"on_lost is 'stop' or 'continue'; got {on_lost!r}")
    asked = {"wire": wire, "every": every, "between": between}
    left = {name: environ.get(variable) or None for name, variable in VARIABLES.items()}
    exchange = ExchangeOptions.of(**{name: left[name] if value is None else value for name, value in asked.items()})
    job = discover(environ)
    if job.address is None and (job.local_num > MAX_WORKERS or job.workers_num > MOST_WORKERS):
        raise StartupError(
            f"a job has 1 to {MAX_WORKERS} workers on each host, and {MOST_WORKERS} at most; {job.started_by} has "
            f"started {job.local_num} here, of {job.workers_num}: start fewer, and give each more threads "
            "(OMP_NUM_THREADS)"
        )
    timeout = _seconds(timeout_seconds, environ)
    start = (
        START_SECONDS if start_timeout_seconds is None else _positive(start_timeout_seconds, "start_timeout_seconds")
    )
    options: dict[str, Any] = {
        **consistency,
        "on_lost": on_lost or job.on_lost,
        "exchange": exchange,
        "timeout_seconds": timeout,
        "workers_num": job.workers_num,
    }
    session = _join(job, options, start)
    explain_on_sigusr1(session)
    return session


def _join(job: JobInfo, options: dict[str, Any], start: float) -> Session:
    if job.address is not None:
        return Session(
            job.address,
            job.worker_id,
            start_timeout_seconds=start,
            ends_with_node=job.launched,
            secret=job.secret,
            **options,
        )
    if job.key is None:
        from multiverso.runtime.node.node import Node  # which most workers need not import

        secret = new_secret()
        node = Node.__new__(Node)  # known here before it begins, so that an interruption cannot lose it
        try:
            Node.__init__(node, 1, on_lost=options["on_lost"] or "stop", secret=secret)
            return Session(node.address, 0, start_timeout_seconds=start, secret=secret, on_close=node.close, **options)
        except BaseException:
            node.close()
            raise
    secret = job.secret or _user_secret()
    deadline = time.monotonic() + start
    met = _meet(job, next(_joined), secret, start)
    name, on_lost = socket_name(met.key, secret), options["on_lost"] or "stop"
    with contextlib.ExitStack() as stack:
        if met.listening is not None:
            stack.enter_context(met.listening)
        if met.roster is not None:
            _start_node_unless_there(name, job, on_lost, met)
    for attempt in itertools.count(1):
        if job.hosts == 1:
            _start_node_unless_there(name, job, on_lost)
        try:
            return Session(
                name,
                job.worker_id,
                start_timeout_seconds=max(0.1, deadline - time.monotonic()),
                secret=secret or None,
                node_is_silent=not os.environ.get("MULTIVERSO_NODE_STDERR"),
                **options,
            )
        except (NodeLostError, StartupError) as error:
            # The node of the same processes' last job was just ending; or, of several hosts, this one's first worker,
            # which starts the node once the hosts have found each other, is not as far yet.
            none_yet = isinstance(error.__cause__, ConnectionRefusedError) and met.roster is None
            gone = none_yet or (job.hosts == 1 and isinstance(error, NodeLostError))
            if not gone or time.monotonic() >= deadline:
                raise
            if job.hosts == 1 and attempt == _NODE_ATTEMPTS:
                raise StartupError(
                    f"the node of this job ended {attempt} times while it was starting; set "
                    "MULTIVERSO_NODE_STDERR=1 to see what it says"
                ) from error
        time.sleep(min(1.0, _LOOK_SECONDS * 2**attempt) if job.hosts == 1 else _LOOK_SECONDS)
    raise AssertionError("unreachable")


_joined = itertools.count()


def _meet(job: JobInfo, number: int, secret: str, timeout_seconds: float) -> Met:
    """Waits until the job's hosts have found each other, where there are several and our launcher has not started them.

    Three ways, by what has started them. Under torchrun over the store that its agents keep; under mpirun over MPI
    itself; under srun from Slurm's variables and what only this user knows, without a word between the hosts.

    Args:
        job: what the environment says.
        number: of this `init` in this process, as each makes a job of its own.
        secret: what only this user knows; empty where there is nothing.
        timeout_seconds: how long to wait for what another host has to say.

    Raises:
        StartupError: the others cannot be reached, or not all came in time.
    """
    if job.hosts == 1:
        from multiverso.runtime.discovery.meetings.meeting import Met

        return Met(job.key or "")
    if job.store is not None:
        from multiverso.runtime.discovery.meetings.store import meet_over_store

        return meet_over_store(job, number, timeout_seconds)
    if job.roster is not None:
        from multiverso.runtime.discovery.meetings.slurm import meet_in_slurm

        return meet_in_slurm(job, job.roster, number, secret)
    from multiverso.runtime.discovery.meetings.mpi import meet_over_mpi

    return meet_over_mpi(job, number, timeout_seconds)


def _user_secret() -> str:
    try:
        return user_secret()
    except StartupError:
        if proof_needed():
            raise
        return ""  # no home: another user can guess the name and take it, but is found out by its number


def _start_node_unless_there(name: str, job: JobInfo, on_lost: str, met: Met | None = None) -> None:
    """The worker that gets the name starts the node, and hands it the listening socket."""
    try:
        listener = messages.listen(name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return
        raise StartupError(f"cannot listen at {name!r}: {error}") from error
    # It finds the standard library and what it needs of ours, and nothing else: not the directory that we are in or
    # that our program lies in, where a file may be called json.py.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = [str(listener.fileno()), str(job.workers_num), on_lost, str(os.getpid())]
    inherited = [listener.fileno()]
    if met is not None and met.roster is not None:
        environ[ROSTER_VARIABLE] = met.roster.as_text()
        if met.listening is not None:
            inherited.append(met.listening.fileno())
            environ[LISTENER_VARIABLE] = str(met.listening.fileno())
    with listener:
        # Standard streams and a process group of its own: a child that holds the launcher's pipe keeps mpiexec
        # waiting, and Ctrl-C must reach the workers first.
        subprocess.Popen(
            [sys.executable, "-P", "-S", "-c", _NODE_PROGRAM, *arguments, *_PLACES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("MULTIVERSO_NODE_STDERR") else subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,
            env=environ,
        ).returncode = 0  # never waited for: it outlives us, and subprocess would warn


def _positive(value: float, what: str) -> float:
    try:
        return checked_seconds(value, positive=True)
    except ValueError as error:
        raise StartupError(f"{what}: {error}") from None


def _seconds(argument: float | None, environ: Mapping[str, str]) -> float | None:
    if argument is not None:
        return _positive(argument, "timeout_seconds")
    text = environ.get(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        return checked_seconds(float(text), positive=True)
    except ValueError:
        raise StartupError(f"{TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds above 0") from None


def explain_on_sigusr1(session: Session) -> None:
    """Makes SIGUSR1 print who waits for whom in a session's job, unless the program uses the signal itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, _explain):
        _explained.add(session)
        signal.signal(signal.SIGUSR1, _explain)


_explained: weakref.WeakSet[Session] = weakref.WeakSet()
_explaining = threading.Lock()


def _explain(number: int, frame: object) -> None:
    if sys.__stderr__ is None or not _explaining.acquire(blocking=False):
        return  # the last signal is still being answered
    try:
        for session in [s for s in list(_explained) if s.closed is None]:
            for line in session.wait_graph().describe(time.monotonic_ns()):
                # not print: what the signal interrupted may be one, which refuses another within it
                os.write(sys.__stderr__.fileno(), f"multiverso: {line}\n".encode())
    except (OSError, ValueError):
        pass  # it has no reader, or is closed
    finally:
        _explaining.release()
