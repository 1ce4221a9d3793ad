"""Takes kernels from the libraries of a wheel, or else compiles each group once per machine and dtype, when needed.

A process that finds its kernels on disk links them in a few milliseconds and never imports Numba. One that does not
lets a child process compile them: the child has none of the user's settings for Numba, and takes its memory with it
when it ends. The name of a file holds a hash of all that went into it: the sources that the group is made of, the
compiler, the processor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from multiverso.compiling import object_cache, prebuilt
from multiverso.compiling.compiler_process import CompilerProcess, serve
from multiverso.compiling.object_code import Code, group_of
from multiverso.compiling.sources import are_unchanged, digest_of, sources_of, stamps_of
from multiverso.saying import say
from multiverso.turns import uninterrupted

_HERE = Path(__file__).parent
_lock = threading.RLock()
BUILD_SECONDS = 600.0
Group = tuple[str, str, str | None]
"""``"module"`` for one of kernels or ``"loops"``, the name of that module, and the dtype of the tables, if any."""

_AT_FIRST: tuple[Group, ...] = tuple(
    ("module", f"multiverso.kernels.{name}", dtype)
    for name, dtype in (
        *(("dense", "float32"), ("waits", None), ("locking", None)),  # the slowest first
        *(("plain_arrays", None), ("dense", None)),
    )
)
"""What nearly every program needs: where one is missing, the others are compiled beside it, on all cores."""

_kept: list[object] = []

Update = Callable[..., None]
"""``(values, delta, state, stride, hyper, count)``: a plain loop over pointers, see ``multiverso.updaters``."""


# -- what is asked for -----------------------------------------------------------------------------------------


@functools.cache
def load_module(name: str, dtype: str | None) -> dict[str, Callable[..., Any]]:
    """Returns the compiled kernels that a module declares for a dtype, or (None) those without one, by name."""
    from multiverso.compiling.functions import callable_at

    addresses = link_group("module", name, dtype)
    return {kernel: callable_at(kernel, address) for kernel, address in addresses.items()}


@functools.cache
def load_loop(function: Callable[..., None], dtype: str) -> int:
    """Returns the address of an updater's or a rule's loop compiled for ``dtype``.

    Our own come from the cache. A user's is compiled by Numba in this process: nothing says what it is made of.
    The code lives as long as the process.
    """
    if is_ours(function):
        return link_group("loops", function.__module__, dtype)[function.__name__]
    require_numba(f"{function.__qualname__}: an updater or rule of your own")
    with _lock, telling(f"compiling {function.__qualname__} for {dtype}"), _compiler() as compiler:
        compiled = uninterrupted(lambda: compiler.compile_loop(function, dtype))
        _kept.append(compiled)
        return int(compiled.address)


compile_update = compile_push = compile_pull = load_loop


def ensure(kind: str, name: str, dtype: str | None, process: CompilerProcess | None = None) -> None:
    """Compiles a group that is not on disk yet, without linking it.

    Args:
        kind, name, dtype: see ``Group``.
        process: what compiles it; without, a process of its own.
    """
    if not _is_there(name, dtype):
        require_numba(_why(name, dtype))
        _build(kind, name, dtype, file_name(name, dtype), process)


def ensure_all(groups: Sequence[Group]) -> None:
    """Compiles those of several groups that are not on disk yet, on all cores, and says how far it is.

    A process for each core compiles one after another: they share much, and the import of Numba takes a second.
    """
    if all(_is_there(name, dtype) for _, name, dtype in groups):
        return
    from concurrent.futures import ThreadPoolExecutor

    with object_cache.one_at_a_time("several"):
        wanted = deque(group for group in groups if not _is_there(*group[1:]))
        number, done = len(wanted), []

        def compile_some() -> None:
            with CompilerProcess() as process, contextlib.suppress(IndexError):
                while True:
                    group = wanted.popleft()
                    ensure(*group, process)
                    done.append(group)

        def progress(seconds: float) -> str:
            left = f", about {seconds / len(done) * (number - len(done)):.0f} s left" if done else ""
            return f" ({len(done)} of {number} groups{left})"

        cores = min(len(os.sched_getaffinity(0)), number)
        begin = f"compiling kernels, once on this machine ({number} groups on {cores} cores) ..."
        with (
            telling("compiling kernels", begin if number else None, progress) as seconds,
            ThreadPoolExecutor(max(1, cores)) as pool,
        ):
            try:
                for share in [pool.submit(compile_some) for _ in range(cores)]:
                    share.result()
            finally:
                wanted.clear()  # one has failed, or a signal has come
        if number:
            say(f"compiled in {seconds():.1f} s")


def _is_there(name: str, dtype: str | None) -> bool:
    if prebuilt.addresses_of(name, dtype, sources_behind(name)) is not None:
        return True
    return find_numba() is not None and object_cache.read(file_name(name, dtype)) is not None


def _why(name: str, dtype: str | None) -> str:
    return f"{group_of(name, dtype)}: no library of these kernels came with multiverso for this machine; they"


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


def link_group(kind: str, name: str, dtype: str | None) -> dict[str, int]:
    """Returns the addresses of a group's functions in this process, compiled first where they are not on disk."""
    with _lock:
        found = prebuilt.addresses_of(name, dtype, sources_behind(name))
        if found is not None:
            return found
        require_numba(_why(name, dtype))
        from multiverso.compiling.linking import link

        file = file_name(name, dtype)
        code = object_cache.read(file)
        if code is None and (kind, name, dtype) in _AT_FIRST and object_cache.cache_directory() is not None:
            ensure_all(_AT_FIRST)
            code = object_cache.read(file)
        if code is not None:
            try:
                return _by_kernel(link(code.content, code.needed, code.names))
            except (RuntimeError, OSError, AttributeError):
                object_cache.forget(file)  # another version of LLVM, or one of us was wrong: compile again
        code = _build(kind, name, dtype, file)
        return _by_kernel(link(code.content, code.needed, code.names))


def _by_kernel(addresses: dict[str, int]) -> dict[str, int]:
    return {symbol.rpartition(".")[2]: address for symbol, address in addresses.items()}


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


def _build(kind: str, name: str, dtype: str | None, file: str, process: CompilerProcess | None = None) -> Code:
    what = file.rpartition("-")[0]
    with object_cache.one_at_a_time(what):
        code = object_cache.read(file)
        if code is not None:
            return code
        paths = sources_behind(name)
        stamps = {**stamps_of(paths), **(process.stamps if process else {})}
        words = f"compiling kernels ({what})"
        begin = f"{words}, once on this machine (up to half a minute) ..."
        with contextlib.nullcontext() if process else telling(words, begin) as seconds:
            code = process.build(kind, name, dtype, BUILD_SECONDS) if process else built_by_a_child(kind, name, dtype)
            code = code or _built_here(kind, name, dtype)
        unchanged = are_unchanged(paths, stamps)
        if unchanged:
            object_cache.write(file, code)
        if seconds is not None:
            say(f"compiled in {seconds():.1f} s")
        if not unchanged:  # what was compiled may be of another text than the file's name says
            say(f"kernels ({what}) are not kept, as the sources have changed meanwhile")
        return code


def built_by_a_child(kind: str, name: str, dtype: str | None) -> Code | None:
    """Returns what a child process has compiled, or None where none can be started or it has failed."""
    with CompilerProcess() as process:
        return process.build(kind, name, dtype, BUILD_SECONDS)


def child(parent: int, writing: int) -> None:
    """What that process does."""
    serve(parent, writing, _built_here)


def _built_here(kind: str, name: str, dtype: str | None) -> Code:
    with _compiler() as compiler:
        code: Code = uninterrupted(
            lambda: compiler.emit(compiler.translate(kind, name, dtype), compiler.this_machine())
        )
        return code


@contextlib.contextmanager
def _compiler() -> Iterator[ModuleType]:
    """Gives what needs Numba, which asks for NUMBA_DISABLE_JIT whenever a function is decorated."""
    import numba

    before, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 0
    try:
        from multiverso.compiling import compiler

        yield compiler
    finally:
        numba.config.DISABLE_JIT = before


EVERY_SECONDS = 1.5


@contextmanager
def telling(
    what: str, begin: str | None = None, progress: Callable[[float], str] = lambda seconds: ""
) -> Iterator[Callable[[], float]]:
    """Says how long something has taken, repeatedly while the block runs.

    On a terminal that is one line, which is written over and gone in the end; elsewhere a line each time, each
    after twice the pause of the one before.

    Args:
        what: what is being done.
        begin: what is said at once; nothing by default.
        progress: returns how far it is after so many seconds; said after ``what``.

    Yields:
        What returns how many seconds it has taken until now.
    """
    began = time.monotonic()
    if begin:
        say(begin)
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, began, over, progress), name="multiverso-telling", daemon=True)
    try:
        thread.start()
        yield lambda: time.monotonic() - began
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _tell(what: str, began: float, over: threading.Event, progress: Callable[[float], str]) -> None:
    stream, longest = sys.stderr, 0
    moves = stream is not None and stream.isatty()
    pause = EVERY_SECONDS
    while not over.wait(pause):
        seconds = time.monotonic() - began
        text = f"multiverso: {what}{progress(seconds)}: {seconds:.0f} s"
        longest = max(longest, len(text))
        print(f"\r{text.ljust(longest)}" if moves else text, end="" if moves else "\n", file=stream, flush=True)
        if not moves:
            pause *= 2  # a job's log is read later
    if longest and moves:
        print("\r" + " " * longest + "\r", end="", file=stream, flush=True)
