"""What the whole package shares: its errors, names of operations, words about how a process ended."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiverso.launch import WorkerExit


class PlatoonException(Exception):
    """What is thrown by Platoon: a `PlatoonError`, or a warning.

    Args:
        severity: ``"ERROR"`` or ``"WARNING"``.
        descr: what happened.
        from_exc: the exception behind it, shown after the description.
    """

    def __init__(self, severity: str, descr: str, from_exc: BaseException | None = None) -> None:
        super().__init__(descr if from_exc is None else f"{descr}: {type(from_exc).__name__}: {from_exc}")
        self.severity = severity
        self.descr = descr
        self.from_exc = from_exc
        if from_exc is not None:
            self.__cause__ = from_exc

    def __reduce__(self) -> Any:
        given = (self.descr, self.from_exc)
        return type(self), given if isinstance(self, PlatoonError | PlatoonWarning) else (self.severity, *given)


class PlatoonError(PlatoonException):
    """Something between a worker and its controller went wrong; the message says what and what to do.

    Args:
        descr: what happened.
        from_exc: the exception behind it.
    """

    def __init__(self, descr: str, from_exc: BaseException | None = None) -> None:
        super().__init__("ERROR", descr, from_exc)


class PlatoonWarning(PlatoonException, UserWarning):
    """Something that may be a mistake.

    Args:
        descr: what.
        from_exc: the exception behind it.
    """

    def __init__(self, descr: str, from_exc: BaseException | None = None) -> None:
        super().__init__("WARNING", descr, from_exc)


OPERATIONS = {
    **dict.fromkeys(("sum", "+", "add"), "sum"),
    **dict.fromkeys(("product", "prod", "*", "mul"), "product"),
    **dict.fromkeys(("max", "maximum"), "max"),
    **dict.fromkeys(("min", "minimum"), "min"),
    **dict.fromkeys(("average", "avg", "mean"), "average"),
}
_LAST_LINES, _LAST_BYTES = 20, 16384
_MPI_OPERATIONS = {"sum": "SUM", "product": "PROD", "max": "MAX", "min": "MIN"}


def op_to_mpi(op: str) -> Any:
    """Returns the operation of mpi4py for one of `Worker.all_reduce`, by any of its names.

    Raises:
        AttributeError: there is no mpi4py.
        ValueError: MPI has no such operation (the average is a sum that is divided).
    """
    name = _MPI_OPERATIONS.get(OPERATIONS.get(op.lower(), ""))
    if name is None:
        raise ValueError(f"MPI has no operation {op!r}; expected one of sum, product, max, min")
    return getattr(_mpi(), name)


def dtype_to_mpi(dtype: Any) -> Any:
    """Returns the datatype of mpi4py for a NumPy dtype, or its name.

    Raises:
        AttributeError: there is no mpi4py.
        TypeError: MPI has no such datatype, as for float16.
    """
    import numpy as np

    mpi = _mpi()
    try:
        plain = np.dtype(dtype)
        if plain == np.float16:  # no version of MPI reduces it, though some have a name for it
            raise KeyError(plain)
        return mpi.INT8_T if plain == np.int8 else mpi._typedict[plain.char]  # as the original has it
    except (KeyError, TypeError):
        raise TypeError(f"MPI has no datatype for {dtype!r}") from None


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise AttributeError(f"there is no MPI here ({error}); pip install mpi4py mpich") from error
    return MPI


def readable(sources: Iterable[Any], seconds: float) -> list[Any]:
    """Waits until one of some descriptors, or of what has a ``fileno()``, can be read; returns those that can."""
    by_number = {each if isinstance(each, int) else each.fileno(): each for each in sources}
    poll = select.poll()  # and not select(), which knows descriptors under 1024 only
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(1000 * max(0.0, seconds))]


def last_lines(path: str | os.PathLike[str]) -> list[str]:
    """Returns the last lines of a log, or an empty list if there is none."""
    try:
        with Path(path).open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _LAST_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()[-_LAST_LINES:]


def counted(number: int, noun: str) -> str:
    """Returns ``1 worker``, ``2 workers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def exit_text(end: WorkerExit) -> str:
    """Returns how a process ended, in words: ``exit code 3`` or ``signal SIGKILL``."""
    return f"signal {end.signal}" if end.signal else f"exit code {end.code}"
