"""Shared variables that are shared between processes, too."""

from __future__ import annotations

import weakref
import zlib
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiverso.errors import ClosedError, DtypeMismatchError, NotInitializedError, ShapeMismatchError
from multiverso.params.hold import Hold
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import all_gather
from multiverso.runtime.session.current import current
from multiverso.tables import ArrayTableHandler
from multiverso.theano.framework import array_of, framework


class _Link:
    """A variable's buffers and table, without the variable: it may be kept for as long as that lives."""

    def __init__(self, variable: Any) -> None:
        value = array_of(variable)
        dtype = _table_dtype(value.dtype)
        session = current()
        self._local = value.astype(dtype).reshape(-1)
        counts = _whose_counts(session, self._local, variable) == session.worker_id
        table = ArrayTableHandler(
            value.size, self._local, dtype=dtype.name, session=session, master=counts and session.worker_id > 0
        )
        # The session keeps its tables; a variable that outlives it must not keep the shared memory.
        self.session, self._table = weakref.ref(session), weakref.ref(table)
        table.snapshot(out=self._local)
        session.barrier()  # no worker trains before all have read the initial value
        self._last = self._local.copy()
        self._view: NDArray[Any] | None = None
        self._given: NDArray[Any] | None = None
        self._hold = Hold()
        self._hold.take([variable])
        self._publish(variable, value)

    def sync(self, variable: Any) -> None:
        table = self._table()
        if table is None:
            raise ClosedError(
                f"the session that the shared variable {variable} was made in is over; "
                "MVSharedVariable(variable), called alike in every worker, shares it in a new one"
            )
        self._hold.check()
        value = array_of(variable)
        if value.size != self._local.size:
            raise ShapeMismatchError(
                f"the shared variable {variable} has {value.size} values now, shape {value.shape}; "
                f"its table was made for {self._local.size}. Make a new variable with mv_shared"
            )
        if self._given is not None:  # 16 bits: what is shared is finer, and rounding is nothing learned
            self._local += value.reshape(-1).astype(self._local.dtype) - self._given
        elif value is not self._view:
            self._local[:] = value.reshape(-1)
        table.exchange(self._local, self._last)
        self._publish(variable, value)

    def _publish(self, variable: Any, old: NDArray[Any]) -> None:
        # The variable is given the exchanged buffer itself: a framework that updates in place then trains on
        # it, and the next exchange needs no copy.
        if old is self._view:
            return
        view = self._local.reshape(old.shape)
        if view.dtype != old.dtype:  # float16 is shared in float32
            rounded = view.astype(old.dtype)
            self._given = rounded.reshape(-1).astype(view.dtype)
            variable.set_value(rounded, borrow=True)
            return
        variable.set_value(view, borrow=True)
        stored = variable.get_value(borrow=True)
        self._view = stored if np.shares_memory(stored, self._local) else None


# Beside the variables and not in them, so that their pickles are loaded without multiverso.
_links: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()


def _whose_counts(session: Session, value: NDArray[Any], variable: Any) -> int:
    """Returns the worker whose value all begin with: the master, or the only one that has any but zeros.

    The oldest documents give the value in one process, whichever it is, and zeros in the others.
    """
    said = all_gather(session, str(zlib.crc32(value.tobytes())) if value.any() else "")
    first = min(said)
    given = {worker: note for worker, note in said.items() if note}
    if not given or first in given:
        return first
    if len(set(given.values())) > 1:
        raise ValueError(
            f"the shared variable {variable} begins with zeros in the master worker and with different values in "
            f"workers {sorted(given)}: give it its value in the master, or in one worker alone"
        )
    return min(given)


class MVSharedVariable:
    """A shared variable's link to a table of its size: whatever workers do to the variable adds up.

    Making one is collective: the table begins with the master worker's value (or, where that is all zeros, with the
    value of the one worker that has another), and the variable of every worker takes it. The variable itself stays
    what it is, the framework's own class, and has an attribute ``mv_sync`` from then on. Attributes of the variable
    can be read through the link.

    Attributes:
        variable: the framework's shared variable.

    Pickling a variable keeps its value and not its table, and needs no multiverso to be loaded; the loaded one is a
    shared variable like any other, and ``MVSharedVariable(loaded)`` gives it a table.
    """

    def __init__(self, svobj: Any) -> None:
        """Shares ``svobj``, a shared variable of Theano or PyTensor, with the other workers.

        Raises:
            TypeError: not a shared variable, or one whose value is not an array (a sparse matrix, say).
            DtypeMismatchError: values that are not float16, float32, float64, int32 or int64.
            ValueError: zeros in the master, and different values in several other workers.
        """
        if _shared_vars and not _is_open(_shared_vars[-1]):  # to ask each, each time, takes the square of their number
            _forget_ended()
        link = _Link(svobj)
        self.variable = svobj
        if svobj in _links:
            _shared_vars[:] = [each for each in _shared_vars if each.variable is not svobj]
        _links[svobj] = link
        _shared_vars.append(self)
        _give_method(type(svobj))

    def mv_sync(self) -> None:
        """Adds what this worker changed since the last call to the table, and takes the table's values.

        One exchange of the table: in a synchronous job it is one round.

        Raises:
            ShapeMismatchError: the variable has been given a value of another size.
            NotInitializedError: the variable was loaded from a pickle, so it has no table.
            ClosedError: the session in which it was made is over.
        """
        link = _links.get(self.variable)
        if link is None:
            raise NotInitializedError(_no_table(self.variable))
        link.sync(self.variable)

    def __getattr__(self, name: str) -> Any:
        if name == "variable" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.variable, name)

    def __repr__(self) -> str:
        return f"MVSharedVariable({self.variable})"


def _give_method(kind: type) -> None:
    """Gives the framework's class of shared variables the attribute ``mv_sync``; only shared ones show it."""
    base = next(base for base in reversed(kind.__mro__) if hasattr(base, "get_value"))
    if "mv_sync" not in vars(base):
        base.mv_sync = property(_method_of)  # type: ignore[attr-defined]


def _method_of(variable: Any) -> Any:
    link = _links.get(variable)
    if link is None:
        raise AttributeError(_no_table(variable))
    return partial(link.sync, variable)


def _no_table(variable: Any) -> str:
    return (
        f"the shared variable {variable} has no table: it was made by the framework alone, loaded from a pickle or "
        "copied; MVSharedVariable(variable), called alike in every worker, gives it one"
    )


def mv_shared(*args: Any, **kwargs: Any) -> Any:
    """Makes a shared variable whose value is shared between all workers: collective.

    Takes what the framework's ``shared`` takes (``value``, ``name``, ``borrow``, ...) and returns the same
    object: it can be a key of ``updates`` and be pickled. It has one more method, ``mv_sync()``. All workers
    begin with the master worker's value; or, where that is all zeros, with the value of the one worker that has
    another. ``mv_shared.shared_vars`` lists what is shared.

    Examples:
        >>> W = mv_shared(value=np.zeros((784, 10), "float32"), name="W")  # doctest: +SKIP
        >>> W.mv_sync()  # doctest: +SKIP
    """
    variable = framework().shared(*args, **kwargs)
    MVSharedVariable(variable)
    return variable


_shared_vars: list[MVSharedVariable] = []
mv_shared.shared_vars = _shared_vars  # type: ignore[attr-defined]


def sync_all_mv_shared_vars() -> None:
    """Calls ``mv_sync()`` of every variable that was shared since ``init()``, in that order.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    current()
    _forget_ended()
    for link in _shared_vars:
        link.mv_sync()


def _forget_ended() -> None:
    # A variable of a session that is over cannot be exchanged; a new session starts a list of its own.
    _shared_vars[:] = [link for link in _shared_vars if _is_open(link)]


def _is_open(link: MVSharedVariable) -> bool:
    kept = _links.get(link.variable)
    session = kept.session() if kept is not None else None
    return session is not None and session.closed is None


def _table_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.name in ("float32", "float64", "int32", "int64"):
        return dtype
    if dtype.name == "float16":
        return np.dtype(np.float32)
    raise DtypeMismatchError(
        f"a shared variable of dtype {dtype} cannot be shared between workers: expected float16, float32, "
        "float64, int32 or int64; make it with the framework's own shared() to keep it in this worker"
    )
