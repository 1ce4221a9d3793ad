"""A function's call in workers that are other processes, and what comes of it: how both travel, and who is to blame."""

from __future__ import annotations

import importlib.machinery
import io
import linecache
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import IO, Any

from multiverso.errors import (
    DeadlockError,
    NodeLostError,
    StartupError,
    WaitTimeoutError,
    WorkerFailedError,
    WorkerLostError,
)
from multiverso.launch.job import OnFailure
from multiverso.launch.results import WorkerExit

# What a worker raises because of another one's end.
_CONSEQUENCES = (WorkerLostError, NodeLostError, DeadlockError)
_by_value_lock = threading.Lock()


@dataclass(frozen=True)
class Failed:
    """A worker's failure, beside which any result can be told apart.

    Attributes:
        error: what to raise for it.
        end: how the worker ended.
    """

    error: BaseException
    end: WorkerExit


def conclude(outcomes: list[Any], on_failure: OnFailure, timeout: str | None = None) -> list[Any]:
    """Returns what all workers returned, or raises.

    Args:
        outcomes: each worker's result, or a `Failed`.
        on_failure: "continue": a worker that has failed leaves its exception in its place, unless all have.
        timeout: which deadline has passed, for the error that says so; None where none has.

    Raises:
        Exception: what the worker raised that is to blame.
        WaitTimeoutError: the deadline has passed.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if timeout is not None:
        missing = [failure.end.worker_id for failure in failures if failure.end.ended_by_us]
        raise WaitTimeoutError(f"{timeout}; workers {missing} had not finished and were ended.")
    if failures and (on_failure == "stop" or len(failures) == len(outcomes)):
        raise min(failures, key=_blame).error
    return [outcome.error if isinstance(outcome, Failed) else outcome for outcome in outcomes]


def _blame(failure: Failed) -> tuple[bool, bool, float]:
    # The cause before its consequences; one that was killed before one that complained; then the earliest.
    consequence = isinstance(failure.error, _CONSEQUENCES) and failure.end.signal is None
    return failure.end.ended_by_us or consequence, failure.end.signal is None, failure.end.seconds


def read_answer(answer: IO[bytes], end: WorkerExit) -> Any:
    """Returns what a worker has written (see `_call`): its result, or a `Failed`."""
    who = f"Worker {end.worker_id} (pid {end.pid})"
    lost = f"{who} ended with exit code {end.code} before the function returned."
    if end.signal:
        lost = f"{who} was killed by {end.signal}."
    answer.seek(0)
    try:
        kind, text = pickle.load(answer)
    except Exception:
        return Failed(WorkerLostError(lost, [end.worker_id]), end)
    if end.signal and kind == "value":
        return Failed(WorkerLostError(lost, [end.worker_id]), end)
    try:
        value = pickle.load(answer)
    except Exception as error:
        if end.signal:  # in the middle of its answer
            return Failed(WorkerLostError(f"{lost} It had failed:\n{text}", [end.worker_id]), end)
        message = f"{who} sent a {kind} that cannot be read here: {error}\n{text}"
        return Failed(WorkerFailedError(message), end)
    if kind == "value":
        return value
    if not isinstance(value, Exception):
        return Failed(WorkerFailedError(f"{who} failed:\n{text}"), end)
    value.add_note(f"In multiverso worker {end.worker_id} (pid {end.pid}):\n{text}")
    return Failed(value, end)


def write_call(file: IO[bytes], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    """Writes a call as `_call` reads it; what a fresh interpreter would not find travels with it."""
    import cloudpickle  # here, so that `import multiverso` does not pay for it

    pickle.dump((sys.path, sys.argv[:1] or [""], _cells()), file)
    modules = {id(module): module for module in _modules([function, *args, *kwargs.values()])}
    with _by_value_lock, ExitStack() as stack:
        for module in modules.values():
            if not _importable(module) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            _pickler(file).dump((function, args, kwargs))
        except Exception as error:
            each = {f"args[{i}]": value for i, value in enumerate(args)} | {f"{name}=": kwargs[name] for name in kwargs}
            each["the function"] = function
            named = next((name for name, value in each.items() if not _can_be_sent(value)), None)
            if named is None:  # a signal's handler has raised it
                raise
            raise StartupError(f"{named} cannot be sent to workers, which are other processes: {error}") from error
    file.flush()


def _can_be_sent(value: Any) -> bool:
    try:
        _pickler(io.BytesIO()).dump(value)
    except Exception:
        return False
    return True


def _pickler(file: IO[bytes]) -> Any:
    """Returns cloudpickle's, which from 3.1.3 on drops the files' names from code: tracebacks show lines by them."""
    import cloudpickle

    inherited = cloudpickle.Pickler.dispatch_table

    def with_file_name(code: CodeType) -> tuple[Any, ...]:
        make, values = inherited[CodeType](code)
        return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # which has no types
        dispatch_table = inherited.new_child({CodeType: with_file_name})

    return Pickler(file)


def _cells() -> dict[str, tuple[int, None, list[str], str]]:
    """Returns the sources that no file has, as `linecache` keeps them: a notebook's cells, for workers' tracebacks."""
    entries = list(linecache.cache.items())
    return {name: entry for name, entry in entries if len(entry) == 4 and entry[1] is None}  # type: ignore[misc]


def _modules(values: Sequence[Any]) -> Iterator[ModuleType]:
    for value in values:
        inner = getattr(value, "func", value)  # functools.partial
        for owner in (inner, type(inner)):
            module = sys.modules.get(getattr(owner, "__module__", None) or "")
            if module is not None and module.__name__ != "__main__":
                yield module


def _importable(module: ModuleType) -> bool:
    """Returns whether a fresh interpreter finds the same module; a test runner's own it often does not."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    path: Any = None
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.__name__.split(".")
    finders = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        found = (finder.find_spec(name, path) for finder in finders)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    assert spec is not None
    if not spec.has_location or spec.origin is None:  # built in, frozen, or a namespace
        return True
    return os.path.samefile(spec.origin, file)
