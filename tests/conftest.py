"""The harsh world that every test lives in: what it starts, opens or maps is gone when it ends.

Compared before and after each test, with half a minute to settle: processes (also ones that left our process
group or were adopted by init: a mark in their environment shows them), Python threads, file descriptors,
abstract sockets and mappings of shared memory.

What is allowed to stay, because a test does not decide it:

- processes of the standard library's that live as long as the interpreter (resource tracker, fork server);
- descriptors and threads that a framework opens in the test that first imports it;
- devices, /proc and /sys files and event descriptors (thread pools, entropy), at any time;
- anything that a failing test leaves: its traceback holds its objects. Its processes are killed all the same.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

MARK = "MULTIVERSO_TEST_RUN"
SETTLE_SECONDS = 30.0
FRAMEWORKS = ("torch", "keras", "jax", "pytensor", "theano", "lasagne", "mpi4py", "matplotlib", "sklearn")
LIVES_ON = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
# What those who call us may have set, and what our programs must not inherit: a job; output in small pieces, so
# that the lines of two workers mix; modules compiled anew by each process; what pytest is to add to its output.
OTHERS = (
    "MULTIVERSO_NODE",
    "MULTIVERSO_WORKER_ID",
    "MULTIVERSO_WORKERS_NUM",
    "MULTIVERSO_SECRET",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "PYTEST_ADDOPTS",
)
# The files that take most processor time, longest first.
LONGEST_FIRST = (
    "test_docs.py",
    "hosts/test_rehearsals.py",
    "launch/test_launchers.py",
    "platoon/test_all_reduce.py",
    "interleave/test_mutants.py",
    "interleave/test_interleavings.py",
    "theano/test_sharedvar.py",
    "launch/test_run_ending.py",
    "launch/test_run_output.py",
    "platoon/test_launcher.py",
    "testing/test_suites.py",
    "platoon/test_frameworks.py",
    "interrupts/test_interrupts.py",
    "apps/test_applications.py",
    "chaos/test_keyed.py",
    "chaos/test_hosts.py",
    "chaos/test_rows.py",
    "experiments/test_experiments.py",
    "launch/test_function.py",
    "hosts/test_engines.py",
    "test_examples.py",
    "test_actor_learner.py",
    "launch/test_run.py",
    "launch/test_cli.py",
    "page/test_page.py",
    "publications/test_following.py",
    "platoon/test_hosts.py",
    "platoon/test_param_sync.py",
    "simulation/test_simulation.py",
    "security/test_strangers.py",
    "test_site.py",
    "launch/test_begin_and_end.py",
    "test_package.py",
)
# Files whose tests share what has imported PyTorch.
PROGRAMS_WITH_PYTORCH = ("tests/test_docs.py", "tests/test_resuming_examples.py", "tests/platoon/test_examples.py")
sys.path.insert(
    0, str(Path(__file__).parent / "support")
)  # what several folders import; beside them it would find our folder theano
UNOWNED_FILES = ("/dev/", "/proc/", "/sys/", "anon_inode:[event")

os.environ[MARK] = uuid.uuid4().hex
for name in OTHERS:
    os.environ.pop(name, None)
# A machine that other tests share is no reason to fail.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# A thread per core in each process of several tests at once only waits for the others' threads, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _compile_once_for_all() -> None:
    """JAX's compiler takes most of the time of tests that run each program for a moment, in several workers.

    They share what it has made, in a folder that goes with the process that is first here.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="multiverso-tests-jax-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


_compile_once_for_all()


def _ignore_by_a_handler(number: int, frame: object) -> None:
    """Does what SIG_IGN does, here: a program that we start begins with the default all the same."""


def _forget_the_callers_signals() -> None:
    """What `nohup` or a shell's background ignores or blocks, the programs that we start would inherit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    pythons_own = {signal.SIGPIPE, signal.SIGXFSZ}  # ignored by the interpreter; subprocess sets them back
    for number in signal.valid_signals() - pythons_own:
        if signal.getsignal(number) is not signal.SIG_IGN:
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif number == signal.SIGCHLD:  # ignored, it takes the children's statuses away
            signal.signal(number, signal.SIG_DFL)
        else:
            signal.signal(number, _ignore_by_a_handler)


_forget_the_callers_signals()


@dataclass(frozen=True)
class Held:
    """What this process holds, each thing with words that a person can act on."""

    processes: dict[int, str]
    threads: dict[int, str]
    files: dict[str, str]
    sockets: dict[str, str]
    mappings: dict[str, str]
    frameworks: frozenset[str]


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _fields(pid: int | str) -> list[bytes]:
    """What /proc says of a process after its name: state, parent, ..., its start in ticks at 19."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


BEGAN = int(_fields("self")[19])


@dataclass
class Looked:
    """What the last look at all processes leaves for the next: not to look again at those of others."""

    at: int = 0  # the latest number then, of a process or thread; 0 before the first look
    unsettled: frozenset[int] = frozenset()  # ours, or on their way to another program

    def may_be_ours(self, pid: int, now: int) -> bool:
        """Whether it has begun since, as numbers go up and come round, or it was not known to be another's then."""
        began = self.at < pid <= now if self.at <= now else pid > self.at or pid <= now
        return not self.at or began or pid in self.unsettled


LOOKED = Looked()


def _latest_number() -> int:
    return int(_read("/proc/loadavg").split()[-1])


def _processes() -> dict[int, str]:
    token = f"{MARK}={os.environ[MARK]}".encode()
    me = os.getpid()
    before = _latest_number()
    names = os.listdir("/proc")
    now = _latest_number()
    found = {}
    unsettled = set()
    for name in names:
        if not name.isdecimal() or (pid := int(name)) == me or not LOOKED.may_be_ours(pid, now):
            continue
        try:
            fields = _fields(pid)
            if fields[0] in b"ZX" or int(fields[19]) < BEGAN:  # older than this process: nothing of ours
                continue
            environment, until = _read(f"/proc/{name}/environ"), time.monotonic() + 1
            # in the middle of an exec it has none yet; nor has the kernel's own, without memory
            while not environment and int(_fields(pid)[20]) and time.monotonic() < until:
                time.sleep(0.001)
                environment = _read(f"/proc/{name}/environ")
            if int(fields[1]) == me or token in environment or not environment:
                unsettled.add(pid)
            if int(fields[1]) != me and token not in environment:
                continue
            command = _read(f"/proc/{name}/cmdline").replace(b"\0", b" ").strip()
        except OSError:  # it ended while we looked
            unsettled.add(pid)
            continue
        if not any(name in command for name in LIVES_ON):
            found[pid] = command.decode(errors="replace")
    LOOKED.at, LOOKED.unsettled = before, frozenset(unsettled)
    return found


def _files() -> dict[str, str]:
    kept = _tracker_file()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue
        if int(name) != kept and not target.startswith(UNOWNED_FILES):
            found[f"{name} -> {target}"] = target
    return found


def _tracker_file() -> int | None:
    module = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(module, "_resource_tracker", None), "_fd", None)


def _sockets(files: dict[str, str]) -> dict[str, str]:
    inodes = {target[len("socket:[") : -1] for target in files.values() if target.startswith("socket:[")}
    if not inodes:
        return {}
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {row[6]: row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("@")}


def _mappings() -> dict[str, str]:
    text = _read("/proc/self/maps")
    if b"memfd:multiverso" not in text:
        return {}
    ours = (line for line in text.decode().splitlines() if "memfd:multiverso" in line)
    return {row[0].partition("-")[0]: row[5] for row in (line.split(maxsplit=5) for line in ours)}


def _held() -> Held:
    files = _files()
    return Held(
        processes=_processes(),
        threads={t.ident or 0: t.name for t in threading.enumerate() if t is not threading.main_thread()},
        files=files,
        sockets=_sockets(files),
        mappings=_mappings(),
        frameworks=frozenset(name for name in FRAMEWORKS if name in sys.modules),
    )


def _leaks(before: Held, after: Held) -> list[str]:
    said = [f"process {pid}: {what}" for pid, what in after.processes.items() if pid not in before.processes]
    said += [f"shared memory {what}" for key, what in after.mappings.items() if key not in before.mappings]
    said += [f"abstract socket {what}" for key, what in after.sockets.items() if key not in before.sockets]
    if after.frameworks == before.frameworks:
        said += [f"thread {what}" for key, what in after.threads.items() if key not in before.threads]
        said += [f"descriptor {what}" for what in after.files if what not in before.files]
    return said


KEPT: list[Held] = []  # what was held after the last test, and is before the next one: to look takes milliseconds


class Shared:
    """Lets the next test look anew where something has been made or ended that several tests share.

    A plugin of its own: pytest does not tell a folder's conftest of the fixtures of a whole session.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            self.pytest_fixture_post_finalizer(fixturedef)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if fixturedef.scope != "function":
            KEPT.clear()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test that leaves a process, thread, descriptor, socket or mapping behind."""
    before = KEPT.pop() if KEPT else _held()
    yield
    leaks = _leaks(before, after := _held())
    deadline = time.monotonic() + SETTLE_SECONDS
    failed = request.node.stash.get(FAILED, False) or request.session.stash.get(FAILED, False)
    late = False
    while leaks and not failed and not late:
        gc.collect()
        threading.Event().wait(0.02)
        late = time.monotonic() > deadline  # asked before the last look: what took long may be this process
        leaks = _leaks(before, after := _held())
    for pid in after.processes.keys() - before.processes.keys():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if not leaks and not failed:
        KEPT.append(after)
    if leaks and not failed:
        what = "\n  ".join(leaks)
        pytest.fail(f"left behind {SETTLE_SECONDS:g} s after the test:\n  {what}", pytrace=False)


@pytest.fixture(scope="session")
def warm() -> Iterator[Any]:
    """An interpreter from which programs of ours are forked that are not about how a program starts."""
    from frameworks import PROGRAMS
    from warm import Warm

    with Warm(*PROGRAMS, "multiverso.cli.main", "platoon.channel", "platoon.param_sync", forks=True) as made:
        yield made


@pytest.fixture(scope="session")
def warm_torch() -> Iterator[Any]:
    """The same, which has imported PyTorch and scikit-learn, too."""
    from frameworks import PROGRAMS, TORCH
    from warm import Warm

    modules = [*TORCH, *PROGRAMS, "multiverso.cli.main", "multiverso.torch", "sklearn.datasets"]
    with Warm(*modules, "platoon.launcher", "platoon.param_sync", "platoon.ops", forks=True) as made:
        yield made


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Callable[[str], Any]]:
    """Gives an interpreter that has imported something, see `support/frameworks.py`: one for all tests."""
    from forked_workers import Interpreter
    from frameworks import IMPORTED

    made: dict[str, Any] = {}
    with ExitStack() as stack:

        def having(what: str) -> Any:
            if what not in made:
                imported = IMPORTED[what]
                made[what] = Interpreter(*imported.modules, env=imported.env, without=imported.without)
                stack.callback(made[what].close)
            return made[what]

        yield having


@pytest.fixture(scope="session")
def forked_from(interpreters: Callable[[str], Any]) -> Callable[[str], AbstractContextManager[None]]:
    """Makes a block in which workers of `multiverso.run` are forks of one of them."""
    return lambda what: interpreters(what).forking()


@pytest.fixture(scope="module")
def forked_runs(forked_from: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """In these tests the workers of `multiverso.run` are forks of an interpreter that has imported it."""
    with forked_from("multiverso"):
        yield


FAILED = pytest.StashKey[bool]()
SESSIONS: list[pytest.Session] = []
FROZEN = [0]  # how many modules there were


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and call.when in ("setup", "call"):
        item.stash[FAILED] = True
    return report


def pytest_keyboard_interrupt() -> None:
    """Ctrl-C stops a test anywhere, so what it leaves is not its fault; its processes are killed all the same."""
    for session in SESSIONS:
        session.stash[FAILED] = True


def pytest_sessionstart(session: pytest.Session) -> None:
    """Keeps the session for the hook of Ctrl-C, which is not told."""
    SESSIONS.append(session)
    session.config.pluginmanager.register(Shared())


def pytest_collection_finish() -> None:
    """Takes the frameworks' million objects out of the garbage collector's sight: a collection took 0.4 s."""
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()
    FROZEN[:] = [len(sys.modules)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Does so again after a file that has imported much."""
    yield
    if nextitem is not None and nextitem.path != item.path and len(sys.modules) > FROZEN[0] + 200:
        _freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The core's tests go first, so that a broken core is seen at once; then the files that take longest.

    A long file that came last would run alone, with nothing beside it.
    """
    root = Path(__file__).parent
    order = {root / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: (not item.path.is_relative_to(root / "core"), order.get(item.path, len(order))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file go to one process, and so do those of several that share what has imported a framework."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.partition("::")[0] in PROGRAMS_WITH_PYTORCH:  # fixture `warm_torch`
                return PROGRAMS_WITH_PYTORCH[0]
            return str(super()._split_scope(nodeid))

    return Together(config, log)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that is free, and stays so: not one of those that the kernel gives out, nor another test process's."""
    while True:
        with socket.socket(socket.AF_UNIX) as ours, socket.socket() as probe:
            port = random.SystemRandom().randrange(20_000, 32_000)
            try:
                ours.bind(f"\0multiverso-test-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            probe.close()
            yield port
            return
