"""Takes kernels from the libraries of a wheel, or else compiles each group once per machine and dtype, when needed.

A process that finds its kernels on disk links them in a few milliseconds and never imports Numba. One that does not
lets child processes compile them, on all cores: they have none of the user's settings for Numba, and take their memory
with them when they end. The name of a file holds a hash of all that went into it: the sources that the group is made
of, the compiler, the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from multiverso.compiling import object_cache, prebuilt
from multiverso.compiling.declared import declared_in, group_of
from multiverso.compiling.functions import callable_at
from multiverso.compiling.sources import are_unchanged, digest_of, sources_of
from multiverso.deadline import Deadline
from multiverso.saying import say
from multiverso.signal_safety import uninterrupted

_HERE = Path(__file__).parent
_lock = threading.RLock()
BUILD_SECONDS = 600.0
EVERY_SECONDS = 1.5
_DEATH_SIGNAL = 1  # of prctl
_MOST = 256  # groups at once: a byte tells which
Group = tuple[str, str | None]
"""The name of a module of kernels, or of loops of updaters or rules, and the dtype of the tables, if any."""

_AT_FIRST: tuple[Group, ...] = tuple(
    (f"multiverso.kernels.{name}", dtype)
    for name, dtype in (
        *(("dense", "float32"), ("waits", None), ("locking", None)),  # the slowest first
        *(("plain_arrays", None), ("dense", None)),
    )
)
"""What nearly every program needs: where one is missing, the others are compiled beside it, on all cores."""

_kept: list[object] = []

# -- what is asked for -----------------------------------------------------------------------------------------


@functools.cache
def load_module(name: str, dtype: str | None) -> dict[str, Callable[..., Any]]:
    """Returns the compiled kernels that a module declares for a dtype, or (None) those without one, by name."""
    return {kernel: callable_at(kernel, address) for kernel, address in link_group(name, dtype).items()}


@functools.cache
def load_loop(function: Callable[..., None], dtype: str) -> int:
    """Returns the address of an updater's or a rule's loop compiled for ``dtype``.

    Our own come from the cache. A user's is compiled by Numba in this process: nothing says what it is made of.
    The code lives as long as the process.
    """
    if is_ours(function):
        return link_group(function.__module__, dtype)[function.__name__]
    require_numba(f"{function.__qualname__}: an updater or rule of your own")
    with _lock, _compiler() as compiler:
        compiled = uninterrupted(lambda: compiler.compile_loop(function, dtype))
        _kept.append(compiled)
        return int(compiled.address)


compile_update = compile_push = compile_pull = load_loop


def ensure_all(groups: Sequence[Group]) -> None:
    """Compiles those of several groups that are not on disk yet, without linking them."""
    compile_beside(groups)
    for name, dtype in groups:
        if not _is_there(name, dtype):
            build(name, dtype)


def _is_there(name: str, dtype: str | None) -> bool:
    return _came_compiled(name, dtype) or object_cache.read(file_name(name, dtype)) is not None


def _came_compiled(name: str, dtype: str | None) -> bool:
    """Returns whether a group is in the libraries of a wheel; where it is not, Numba has to be here."""
    if prebuilt.has(group_of(name, dtype), digest_of(sources_behind(name))):
        return True
    require_numba(f"{group_of(name, dtype)}: no library of these kernels came with multiverso for this machine; they")
    return False


@functools.cache
def find_numba() -> ModuleSpec | None:
    """Returns where Numba is. An exception of a signal in the middle would leave the import lock held for ever."""
    return uninterrupted(lambda: importlib.util.find_spec("numba"))


def require_numba(why: str) -> None:
    """Refuses to continue without Numba.

    Args:
        why: it is needed, as the beginning of a sentence.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if find_numba() is None:
        raise ModuleNotFoundError(
            f'{why} must be compiled, and Numba is not installed: pip install "multiverso[compile]"', name="numba"
        )


def is_ours(function: Callable[..., None]) -> bool:
    """Whether a loop is one of this package's modules, so that it can be kept on disk."""
    module = function.__module__ or ""  # none of what is made by `exec`, as at some prompts
    found = getattr(sys.modules.get(module), function.__name__, None)
    return module.startswith("multiverso.") and found is function


# -- from disk, or else from the compiler ----------------------------------------------------------------------


def link_group(name: str, dtype: str | None) -> dict[str, int]:
    """Returns the addresses of a group's functions in this process, compiled first where they are not on disk."""
    group = group_of(name, dtype)
    symbols = {f"{group}.{each}": each for each in declared_in(importlib.import_module(name), dtype)}
    with _lock:
        if _came_compiled(name, dtype):
            addresses = prebuilt.addresses_of(symbols)
        else:
            from multiverso.compiling.linking import link

            code = _object_code(name, dtype)
            try:
                addresses = uninterrupted(lambda: link(code, symbols))
            except (RuntimeError, OSError, AttributeError):
                object_cache.forget(file_name(name, dtype))  # another version of LLVM, or one of us was wrong
                again = _object_code(name, dtype)
                addresses = uninterrupted(lambda: link(again, symbols))
    return {symbols[symbol]: address for symbol, address in addresses.items()}


def _object_code(name: str, dtype: str | None) -> bytes:
    file = file_name(name, dtype)
    code = object_cache.read(file)
    if code is None:
        compile_beside(_AT_FIRST if (name, dtype) in _AT_FIRST else [(name, dtype)])
        code = object_cache.read(file)
    return code or build(name, dtype)


def file_name(name: str, dtype: str | None) -> str:
    """Returns what the cache calls a group's object code."""
    return f"{group_of(name, dtype)}-{digest_of(sources_behind(name), *_machine())}"


def sources_behind(name: str) -> list[Path]:
    """Returns all files that the kernels of a module are made of, and the compiler of ours."""
    module = Path(str(sys.modules[name].__file__)) if name in sys.modules else _source(name)
    return sorted({*sources_of(module), *sources_of(_HERE / "compiler.py")})


def _source(name: str) -> Path:
    return _HERE.parent.parent.joinpath(*name.split(".")).with_suffix(".py")


@functools.cache
def _machine() -> tuple[object, ...]:
    """What else object code depends on. Not Python's and NumPy's versions: the fields that it reads are the same."""
    return (_numba_version(), *uninterrupted(_processor), platform.machine())


def _processor() -> tuple[str, str, str]:
    import llvmlite
    import llvmlite.binding as llvm

    return llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def _numba_version() -> list[str]:
    """Returns the names of Numba's metadata: ``importlib.metadata`` takes as long to import as all else here."""
    found = find_numba()
    if found is None or found.origin is None:
        return []
    return sorted(name for name in os.listdir(Path(found.origin).parent.parent) if name.startswith("numba-"))


def build(name: str, dtype: str | None) -> bytes:
    """Compiles a group in this process, unless another one has done so meanwhile, and keeps it."""
    importlib.import_module(name)
    group, file = group_of(name, dtype), file_name(name, dtype)
    with object_cache.one_at_a_time(group):
        code = object_cache.read(file)
        if code is None:
            with _compiler() as compiler:
                code = uninterrupted(lambda: compiler.emit(compiler.translate(name, dtype), compiler.this_machine()))
            if are_unchanged(sources_behind(name)):
                object_cache.write(file, code)
            else:  # what was compiled may be of another text than the file's name says
                say(f"kernels ({group}) are not kept, as the sources have changed meanwhile")
    return code


@contextmanager
def _compiler() -> Iterator[ModuleType]:
    """Gives what needs Numba, which asks for NUMBA_DISABLE_JIT whenever a function is decorated."""
    import numba

    before, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 0
    try:
        from multiverso.compiling import compiler

        yield compiler
    finally:
        numba.config.DISABLE_JIT = before


# -- in other processes -----------------------------------------------------------------------------------------


def compile_beside(groups: Sequence[Group]) -> None:
    """Has child processes compile those groups that are not on disk yet, on all cores, and says how far they are.

    Each takes one group after another: they share much, and the import of Numba takes a second. Where no child can be
    started, or it fails or takes too long, groups are left out: who compiles them here is told why.
    """
    if object_cache.cache_directory() is None or all(_is_there(*group) for group in groups):
        return
    # who wants one group does not wait for a process that compiles all: that group has a lock of its own, see `build`
    with object_cache.one_at_a_time("several" if len(groups) > 1 else f"{group_of(*groups[0])} alone"):
        wanted = [group for group in groups if not _is_there(*group)][:_MOST]
        if not wanted:
            return
        cores = min(len(os.sched_getaffinity(0)), len(wanted))
        names = group_of(*wanted[0]) if len(wanted) == 1 else f"{len(wanted)} groups on {cores} cores"
        say(f"compiling kernels, once on this machine ({names}) ...")
        began = time.monotonic()

        def tell() -> None:
            done, seconds = sum(_is_there(*group) for group in wanted), time.monotonic() - began
            left = f", about {seconds / done * (len(wanted) - done):.0f} s left" if done else ""
            how_far = f" ({done} of {len(wanted)} groups{left})" if len(wanted) > 1 else ""
            say(f"compiling kernels{how_far}: {seconds:.0f} s")

        with contextlib.suppress(OSError):
            await_children(wanted, cores, tell)
        if all(_is_there(*group) for group in wanted):
            say(f"compiled in {time.monotonic() - began:.1f} s")


def await_children(groups: Sequence[Group], cores: int, tell: Callable[[], None]) -> None:
    """Starts processes that compile these groups between them, waits for their end, and tells that it does."""
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # it ends when its parent wants it to
        f"sys.path[:] = {[p for p in sys.path if p]!r}\n"
        "from multiverso.compiling import sources; sources.read_all()\n"
        f"from multiverso.compiling.on_demand import child; child({os.getpid()}, {list(groups)!r})"
    )
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("NUMBA_") and key != "PYTHONWARNINGS"
    }
    environment["NUMBA_OPT"] = "0"  # compiler.emit optimises a group at once, and not each function before
    deadline = Deadline.after(BUILD_SECONDS * (1 + len(groups) // 10))
    children: list[subprocess.Popen[bytes]] = []
    places, handed_out = os.pipe()  # one byte for each group: who reads it, compiles that one
    try:
        with open(handed_out, "wb") as file:
            file.write(bytes(range(len(groups))))
        for _ in range(cores):
            nothing = subprocess.DEVNULL  # what is wrong with it is said by trying it here
            arguments = [sys.executable, "-c", program]
            child = subprocess.Popen(arguments, env=environment, stdin=places, stdout=nothing, stderr=nothing)
            children.append(child)
        pause = EVERY_SECONDS
        while not deadline.passed and any(child.poll() is None for child in children):
            with contextlib.suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(deadline.left(pause))
                return
            tell()
            pause *= 2  # a job's log is read later
    finally:
        os.close(places)
        for child in children:
            child.kill()
            child.wait()


def child(parent: int, groups: Sequence[Group]) -> None:
    """What such a process does."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == parent:
        while place := os.read(0, 1):
            build(*groups[place[0]])
