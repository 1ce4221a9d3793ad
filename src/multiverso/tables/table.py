"""The base of every kind of table: its description, its updater's learning rate and bounds."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from multiverso.checks import positive
from multiverso.errors import ClosedError, MultiversoError
from multiverso.in_process import Closing, InProcess
from multiverso.runtime.session.session import Session
from multiverso.spec.states import check_numbers
from multiverso.spec.table import TableSpec
from multiverso.tables.convert import Array
from multiverso.updaters import BY_NAME, Updater


class _Named(Protocol):
    """The common part of specs of all kinds of table."""

    @property
    def name(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...


Spec = TypeVar("Spec", bound=_Named)


def spec_with(updater: Updater, **rest: Any) -> TableSpec:
    """Returns the spec of a table whose adds an updater applies; ``rest`` says what else it is."""
    return TableSpec(
        updater=updater.name, hyper=tuple(map(float, updater.hyper)), states=updater.states, mean=updater.mean, **rest
    )


class Table(Closing, InProcess, Generic[Spec]):
    """One worker's handle of a table of any kind.

    Args:
        session: the worker's.
        spec: everything that the workers have agreed on.
        updater: the table's.
    """

    def __init__(self, session: Session, spec: Spec, updater: Updater) -> None:
        self._session, self._spec = session, spec
        self._dtype = np.dtype(spec.dtype)
        self._clip, self._takes_mean = updater.clip, updater.mean
        self._schedule = updater.schedule
        self._before_me = [i for i in session.control.local if i < session.worker_id] if updater.schedule else []
        self._transforms = not (self._clip is None and self._schedule is None)
        self._updater_name, self._rate_index = updater.name, updater.rate_index

    @property
    def spec(self) -> Spec:
        """Everything that the workers have agreed on."""
        return self._spec

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values in the shared memory."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """Its name, or None for one that was created by order."""
        return self._spec.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec}>"

    # -- the updater while the job runs --------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The updater's learning rate, as it is now for all workers. Set it in one worker, at any time.

        A worker that adds after that uses it: no worker that has seen a later rate comes back to an earlier one. An add
        that is on its way may take either. In synchronous mode set it between two barriers, so that no round is on its
        way. Workers that make or open the table still give the updater that it was made with, and so does a saved one.

        Raises:
            MultiversoError: the updater has no learning rate.
            ValueError: not a finite number above 0, or none in the table's dtype.
        """
        self._session.check()
        return float(self._rate()[0])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._session.check()
        self._set_rate(rate)
        self._tell_rate(rate)

    def _set_rate(self, rate: float) -> None:
        kept = self._rate()
        check_numbers(f"the updater {self._updater_name}", [positive(rate, "learning rate")], kept.dtype.name)
        kept[0] = rate

    def _tell_rate(self, rate: float) -> None:
        """Sets the rate where else the updater runs: only this host's memory has it by now."""

    def _rate(self) -> Array:
        """Returns the number in the table's header itself: every operation reads it."""
        if self._rate_index is None:
            having = sorted(name for name, make in BY_NAME.items() if make().rate_index is not None)
            raise MultiversoError(
                f"the updater {self._updater_name!r} of {self!r} has no learning rate; {', '.join(having)} have one"
            )
        return self._hyper(self._rate_index)

    def _hyper(self, index: int) -> Array:
        """Returns one of the updater's hyperparameters, as it lies in the shared memory: an array of one."""
        raise NotImplementedError

    def _steps(self) -> int:
        """Returns how many steps the table has done, as a schedule counts them."""
        raise NotImplementedError

    def _follow_schedule(self) -> None:
        """Before every step of this worker's; most have no schedule, and small calls do not even ask here.

        Of a host's workers the lowest that is still there sets the rate for all: worker 0 may have died, or left.
        """
        if self._schedule is not None and not any(map(self._session.control.is_live, self._before_me)):
            self._set_rate(self._schedule(self._steps()))

    def _transformed(self, delta: Array, rows: int = 1) -> Array:
        """Returns what is to be added, within its bounds, once the learning rate is what the schedule says."""
        if self._schedule is not None:
            self._follow_schedule()
        return delta if self._clip is None else self._clip(delta, rows)

    def _refuse_clipped(self) -> None:
        if self._clip is not None:
            raise MultiversoError(
                f"{self!r} clips what is added ({self._clip}), and an exchange does not: use add() and get()"
            )


class Closed:
    """Stands in for a closed table's memory and operations: whatever is asked of it raises ClosedError.

    So the way of an open table's calls has no check in it.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> None:
        raise ClosedError(self._reason)
