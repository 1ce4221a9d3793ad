"""Compiles each kernel once per machine and dtype, when first needed, and keeps the result on disk.

Numba's cache does not notice a change in a function imported from another file, so a kernel's cache directory is
named after a hash of every source that it is made of. One process compiles, the others wait for its file lock.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from multiverso.kernels.sources import digest_of, sources_of

_HERE = Path(__file__)
_lock = threading.RLock()

Update = Callable[..., None]
"""``(values, delta, state, stride, hyper, count)``: a plain loop over pointers, see ``multiverso.updaters``."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one dtype, a module's functions as attributes; each module when it is first asked for."""

    dtype: str

    @functools.cached_property
    def dense(self) -> Any:
        """Whole tables, at once."""
        from multiverso.kernels import dense

        return self._group("dense", dense)

    @functools.cached_property
    def rows(self) -> Any:
        """Rows, at once."""
        from multiverso.kernels import rows

        return self._group("rows", rows)

    @functools.cached_property
    def rounds(self) -> Any:
        """Synchronous rounds."""
        from multiverso.kernels import rounds

        return self._group("rounds", rounds)

    def _group(self, group: str, module: Any) -> SimpleNamespace:
        with building(f"{group}-{self.dtype}", module):
            signatures = _signatures(self.dtype)[group]
            kernels = {name: compile_kernel(getattr(module, name), s) for name, s in signatures.items()}
            return SimpleNamespace(**kernels)


@functools.cache
def _digest(*modules: Path) -> str:
    """Returns a hash of the sources of some modules, of the compiler and of the processor.

    The place of the package is in it: Numba keeps code by the path of its source.
    """
    import llvmlite.binding
    import numba
    import numpy

    sources = {_HERE, *(source for module in modules for source in sources_of(module))}
    machine = (numba.__version__, numpy.__version__, llvmlite.binding.get_host_cpu_name(), sys.version)
    return digest_of(sorted(sources), machine, str(_HERE))


@functools.cache
def cache_directory() -> Path | None:
    """Returns the directory of all compiled kernels, or None (with one warning) where none can be written."""
    home = os.environ.get("MULTIVERSO_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        place = Path(home) if home else Path.home() / ".cache"
        directory = place / "multiverso"
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{os.getpid()}-{threading.get_ident()}"
        probe.touch()
        probe.unlink()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"multiverso cannot keep its compiled kernels ({error}), so each process compiles them anew; "
            "set MULTIVERSO_CACHE_DIR to a directory that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return directory


@contextlib.contextmanager
def _caching(source: Path) -> Iterator[bool]:
    """Lets Numba keep what is decorated meanwhile in the directory of a source file; yields whether it can."""
    import numba

    home = cache_directory()
    directory = home / f"{source.stem}-{_digest(source)}" if home and source.is_file() else None
    with _lock:
        before = numba.config.CACHE_DIR
        try:
            if directory is not None:
                numba.config.CACHE_DIR = str(directory)
            yield directory is not None
        finally:
            numba.config.CACHE_DIR = before


@contextlib.contextmanager
def _file_lock(name: str) -> Iterator[None]:
    """Lets one process at a time in, where the directory lets us lock; the kernel frees it when one dies."""
    directory = cache_directory()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # gone, another user's, or on a disk without locks
            if directory is not None:
                file = stack.enter_context((directory / name).open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
                # by name: a child that was forked meanwhile has the file open, too, and would keep it locked
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _one_process_compiles(what: str, modules: tuple[Path, ...]) -> Iterator[None]:
    """Holds the file lock while something is compiled for the first time on this machine."""
    directory = cache_directory()
    if directory is None:
        yield
        return
    done = directory / f"{what}-{_digest(*modules)}.done"
    if done.exists():
        yield
        return
    with _file_lock("lock"):
        if done.exists():
            yield
            return
        began = time.monotonic()
        print(
            f"multiverso: compiling kernels ({what}), once on this machine ...", file=sys.stderr, flush=True
        )
        yield
        done.touch()
        print(f"multiverso: compiled in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def compile_kernel(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Returns ``function`` compiled for one signature (Numba types), loaded from disk where it can be.

    Call it inside :func:`building`.
    """
    import numba

    with _caching(Path(function.__code__.co_filename)) as cached:
        kernel = numba.njit(nogil=True, cache=cached)(function)
    kernel.compile(signature)
    kernel.disable_compile()
    compiled: Callable[..., Any] = kernel
    return compiled


@contextlib.contextmanager
def building(what: str, *modules: ModuleType) -> Iterator[None]:
    """Around the compilation of kernels of some modules: one thread here, one process on the machine."""
    with _lock, _one_process_compiles(what, tuple(Path(str(module.__file__)) for module in modules)):
        yield


def _signatures(dtype: str) -> dict[str, dict[str, tuple[Any, ...]]]:
    from numba import from_dtype, int64, uintp
    from numpy import dtype as numpy_dtype

    data = from_dtype(numpy_dtype(dtype))[::1]
    ids = progress = int64[::1]
    base = control = update = uintp
    me = number = int64
    return {
        "dense": {
            "add": (control, base, update, me, data, number),
            "get": (control, base, me, data, number),
            "put": (control, base, me, data, number),
            "exchange": (control, base, update, me, data, data, number),
        },
        "rows": {
            "get_rows": (control, base, me, ids, data, number),
            "add_rows": (control, base, update, me, ids, data, number),
        },
        "rounds": {
            "stage": (base, me, data, number),
            "stage_difference": (base, me, data, data, number),
            "stage_rows": (base, me, ids, data, number),
            "commit": (control, base, update, me, number, progress, data),
            "commit_exchange": (control, base, update, me, progress, data, data),
            "take": (base, me, progress, data),
            "take_both": (base, me, progress, data, data),
            "take_rows": (base, me, progress, ids, data),
            "committed_copy": (base, number, data),
            "committed_put": (base, number, data),
        },
    }


@functools.cache
def load(dtype: str) -> Kernels:
    """Returns the kernels for tables of ``dtype``, compiled or from disk; a group's first use takes seconds."""
    return Kernels(dtype)


@functools.cache
def load_steps(dtype: str) -> Any:
    """Returns the kernels that run rules on tables of ``dtype``."""
    from numba import from_dtype, int64, uintp
    from numpy import dtype as numpy_dtype

    from multiverso.kernels import steps

    data = from_dtype(numpy_dtype(dtype))[::1]
    progress, address, number = int64[::1], uintp, int64
    signatures: dict[Callable[..., Any], tuple[Any, ...]] = {
        steps.step: (
            address,
            address,
            address,
            address,
            address,
            number,
            address,
            address,
            data,
            number,
            number,
        ),
        steps.stage_step: (address, address, number, address, address, progress, data, number, number),
        steps.finish_step: (address, address, number, address, address, progress, data, number),
    }
    with building(f"steps-{dtype}", steps):
        return SimpleNamespace(**{f.__name__: compile_kernel(f, s) for f, s in signatures.items()})


@functools.cache
def load_waits() -> Any:
    """Returns the kernels that need no dtype: barrier, clocks, waking."""
    from numba import int32, int64, uintp

    from multiverso.kernels import dense, rounds, waits

    signatures: dict[Callable[..., Any], tuple[Any, ...]] = {
        waits.barrier: (uintp, int64, int64),
        waits.wait_clock: (uintp, uintp, int64, int64),
        waits.tick: (uintp, uintp, int64),
        waits.wake: (uintp,),
        waits.set_long: (uintp, int64),
        waits.begin_wait: (uintp, int64, int32, int64, int64),
        waits.finish_wait: (uintp, int64),
        dense.version: (uintp,),
        rounds.leave: (uintp, uintp, int64, int64),
    }
    with building("waits", dense, rounds, waits):
        return SimpleNamespace(**{f.__name__: compile_kernel(f, s) for f, s in signatures.items()})


@functools.cache
def compile_update(function: Update, dtype: str) -> int:
    """Returns the address of an updater's loop compiled for ``dtype``; the code lives as long as the process."""
    return _compile_loop(function, dtype, "pppnpn")


@functools.cache
def compile_push(function: Callable[..., None], dtype: str) -> int:
    """Returns the address of a rule's push, see ``multiverso.rules.Rule``."""
    return _compile_loop(function, dtype, "pppnppn")


@functools.cache
def compile_pull(function: Callable[..., None], dtype: str) -> int:
    """Returns the address of a rule's pull, see ``multiverso.rules.Rule``."""
    return _compile_loop(function, dtype, "pppnpn")


def _compile_loop(function: Callable[..., None], dtype: str, arguments: str) -> int:
    """Compiles a loop over pointers of ``dtype`` (p) and numbers (n)."""
    from numba import cfunc, from_dtype, int64, types, void
    from numpy import dtype as numpy_dtype

    kinds = {"p": types.CPointer(from_dtype(numpy_dtype(dtype))), "n": int64}
    signature = void(*(kinds[argument] for argument in arguments))
    with _lock:
        try:
            # Numba writes its index of what is cached, and the code, in two steps: two processes at once mix
            # them up.
            with _file_lock("loops.lock"), _caching(Path(function.__code__.co_filename)) as cached:
                compiled = cfunc(signature, cache=cached)(function)
        except RuntimeError:  # no file to cache for: a function typed into a prompt
            compiled = cfunc(signature)(function)
        _kept.append(compiled)
        return int(compiled.address)


_kept: list[Any] = []
