"""`multiverso doctor`: try what we depend on, for real, and say what to do where it fails.

Versions say little: sandboxes and container settings change what the system calls do.
"""

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from multiverso.cli import trials

State = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_FRAMEWORKS = ("torch", "keras", "jax", "optax", "pytensor", "Theano", "Lasagne", "mpi4py")
_PROGRAM_SECONDS = 20.0


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        state: "ok"; "warn": works, with a limit; "fail": multiverso does not work here.
        text: What was seen.
        advice: What to do about it; empty when there is nothing to do.
    """

    name: str
    state: State
    text: str
    advice: str = ""


class Advice(Exception):
    """Raised by a check that found something wrong, with what to do about it."""

    def __init__(self, state: State, text: str, advice: str) -> None:
        super().__init__(text)
        self.state = state
        self.advice = advice


def examine() -> Iterator[Finding]:
    """Runs every check, one after the other; a check that breaks is a finding, too."""
    for name, (check, advice) in CHECKS.items():
        yield _run(name, check, advice)


def _run(name: str, check: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(name, "ok", check())
    except Advice as problem:
        return Finding(name, problem.state, str(problem), problem.advice)
    except Exception as error:
        if isinstance(error, PermissionError):
            advice = (
                f"The system has this but refuses it to user {os.getuid()}: "
                + (f"check who may use {error.filename}" if error.filename else "check the file's owner and mode")
                + ", and the container's security profile (seccomp, AppArmor, SELinux)."
            )
        return Finding(name, "fail", f"{type(error).__name__}: {error}", advice)


def _platform() -> str:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    text = f"{system}, Python {platform.python_version()}"
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise Advice("fail", text, "multiverso runs on Linux, x86-64 or aarch64.")
    return text


def _packages() -> str:
    names = ("multiverso", "numpy", "safetensors", "cloudpickle", "msgspec")
    needed = [f"{name} {metadata.version(name)}" for name in names]
    return ", ".join([*needed, *_installed("numba")])  # which is only needed to compile


def _installed(*names: str) -> list[str]:
    """Returns those of some packages that are there, with their versions."""
    found = []
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def _cores() -> str:
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} of {os.cpu_count()} may be used"
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return text
    if quota == "max" or int(quota) >= cores * int(period):
        return text
    share = int(quota) / int(period)
    advice = f"Start no more than {max(1, int(share))} workers, or raise the container's CPU limit."
    raise Advice("warn", f"{text}, but the container may use the time of {share:g} only", advice)


def _memory() -> str:
    from multiverso.memory.heap import free_memory, left_in_groups

    left, free = left_in_groups(), free_memory()
    text = f"{free / _GIB:.1f} GiB available"
    if left and min(left) <= free:
        text += " (by the container's limit)"
    if free < _GIB // 4:
        raise Advice("fail", text, "Free some memory, or raise the container's limit.")
    if free < _GIB:
        raise Advice("warn", text, "Large tables will be refused; free some memory, or raise the limit.")
    return text


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} at a time"
    if 0 <= soft < 256:
        more = "raise it with `ulimit -n 1024`" if hard < 0 or hard >= 1024 else "ask for a higher hard limit"
        raise Advice("warn", text, f"A large job needs a few per worker; {more}.")
    return text


def _proc() -> str:
    for path in ("/proc/self/stat", "/proc/self/environ", "/proc/self/ns/pid", "/proc/net/unix"):
        Path(path).stat()
    if str(os.getpid()) not in os.listdir("/proc"):
        raise Advice("fail", "this process is not in /proc", "Mount /proc of this process's own namespace.")
    return "readable"


def _try_a_kernel() -> None:
    import numpy as np

    from multiverso.kernels import waits

    word = np.zeros(1, np.int64)
    waits.set_long.compiled()(word.ctypes.data, 7)
    if word[0] != 7:
        raise RuntimeError("a compiled kernel did not do what it should")


def _kernel_cache() -> str:
    from multiverso.compiling import prebuilt
    from multiverso.compiling.object_cache import cache_directory

    if prebuilt.level() is not None:
        _try_a_kernel()
        return f"not needed: the kernels came compiled, for {prebuilt.level()}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        directory = cache_directory()
    if directory is None or warned:
        advice = (
            "Set MULTIVERSO_CACHE_DIR to a folder that you alone can write to; until then kernels are compiled "
            + ("again in each process." if directory is None else f"and kept in {directory}.")
        )
        raise Advice("warn", "the usual folder for compiled kernels cannot be used", advice)
    _try_a_kernel()
    return f"{sum(1 for _ in directory.glob('*-*'))} files in {directory}"


def _job() -> str:
    from multiverso.launch import run

    began = time.monotonic()
    results = run(trials.job_of_two, workers=2, timeout_seconds=150.0)
    if results != [3.0, 3.0]:
        raise RuntimeError(f"two workers added 1 and 2 to a table and read {results}")
    return f"two workers added to one table and read the sum ({time.monotonic() - began:.1f} s)"


def _environment() -> str:
    from multiverso.errors import StartupError
    from multiverso.runtime.discovery.environment import discover

    try:
        job = discover()
    except StartupError as error:
        advice = "init() would fail in this shell; unset the launcher's variables that are left over."
        raise Advice("warn", str(error), advice) from None
    if job.started_by == "single":
        return "no launcher's variables: `python train.py` is a job of one worker"
    return f"worker {job.worker_id} of {job.workers_num}, started by {job.started_by}"


def _launchers() -> str:
    found = ["multiverso run"]
    root = os.getuid() == 0
    for name in ("mpiexec", "mpirun"):
        path = _program(name)
        if path is None:
            continue
        kind = _version_line([path, "--version"])
        found.append(f"{path} ({kind})")
        if "open mpi" in kind.lower() and root and not os.environ.get("OMPI_ALLOW_RUN_AS_ROOT"):
            advice = "Set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or use another user."
            raise Advice("warn", f"{', '.join(found)}: it refuses to run as root", advice)
        break
    found += [str(path) for name in ("torchrun", "srun") if (path := _program(name))]
    return ", ".join(found)


def _several_hosts() -> str:
    versions = _installed("pyopenssl", "cryptography")
    if len(versions) < 2:
        return 'without encryption only: pip install "multiverso[hosts]" brings it; doctor --hosts a,b tries the way'
    return f"{', '.join(versions)}; doctor --hosts a,b tries the way there"


def _frameworks() -> str:
    return ", ".join(_installed(*_FRAMEWORKS)) or "none (NumPy is enough)"


def _platoon() -> str:
    spec = importlib.util.find_spec("platoon")
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    ours = found is not None and (found / "channel" / "controller.py").is_file()
    other = "".join(_installed("platoon"))
    if ours and not other:
        return f"multiverso's own, in {found}"
    reason = "it is another project of that name, which installs the same import package as multiverso"
    again = f"install multiverso again: pip install --force-reinstall --no-deps {_AS_BEFORE}"
    advice = f"{'pip uninstall platoon, then ' if other else ''}{again}; or use one environment for each."
    state = "is installed over multiverso's own" if not ours else "is installed beside multiverso's own"
    what = f"{other or 'something else'} {state} ({found}): {reason}" if found else "the package is missing"
    raise Advice("warn", what, advice)


def _gpus() -> str:
    from multiverso.errors import StartupError
    from multiverso.launch.resources import choose_gpus

    try:
        return f"`multiverso run --gpus auto` would share out {', '.join(choose_gpus('auto', os.environ))}"
    except StartupError:
        return "none found (none needed)"


def _program(name: str) -> str | None:
    beside = Path(sys.prefix) / "bin" / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def _version_line(command: Sequence[str]) -> str:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    text = f"{answer.stdout}\n{answer.stderr}".strip()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    version = next((line for line in lines if "open mpi" in line.lower() or "openrte" in line.lower()), None)
    version = version or next((line for line in lines if "version" in line.lower()), *lines[:1])
    return f"MPICH, {version}" if "hydra" in text.lower() else version


_AS_BEFORE = "and what you gave pip the first time (`.` in a clone)"
_SANDBOX = "This kernel or sandbox lacks it (gVisor and old kernels do); run on a plain Linux kernel 5.4 or newer."
_REPORT = "Please report this with the text above."

# What to do where a check breaks that does not say so itself.
CHECKS: dict[str, tuple[Callable[[], str], str]] = {
    "platform": (_platform, _REPORT),
    "packages": (_packages, f"Install multiverso again: pip install --force-reinstall {_AS_BEFORE}."),
    "cores": (_cores, _REPORT),
    "memory": (_memory, _REPORT),
    "open files": (_open_files, _REPORT),
    "/proc": (_proc, "Mount /proc in this container; multiverso reads pids and limits there."),
    "shared memory": (trials.shared_memory, _SANDBOX),
    "abstract sockets": (
        trials.abstract_sockets,
        "Allow Unix sockets in this sandbox: workers get their memory by one.",
    ),
    "robust lock": (trials.robust_lock, _SANDBOX),
    "lock deadline": (trials.lock_deadline, "glibc 2.30 or newer is needed (pthread_mutex_clocklock), and no musl."),
    "futex": (trials.futex, _SANDBOX),
    "process end": (trials.process_end, _SANDBOX),
    "kernel cache": (_kernel_cache, "Check that Numba works: python -m numba -s"),
    "a small job": (_job, "The checks above that failed say why; otherwise please report this with the text."),
    "environment": (_environment, _REPORT),
    "launchers": (_launchers, _REPORT),
    "several hosts": (_several_hosts, _REPORT),
    "frameworks": (_frameworks, _REPORT),
    "platoon": (_platoon, _REPORT),
    "GPUs": (_gpus, _REPORT),
}
