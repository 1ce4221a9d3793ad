"""The shared parameters of a worker: tables that the first worker fills and the later ones attach to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import MultiversoError, TableMismatchError
from multiverso.rules import Rule, Shared, easgd, share
from multiverso.runtime import JobLock, Session
from multiverso.tables import ArrayTableHandler, TableHandler
from multiverso.tables.ruled import Ruled
from platoon.param_sync import ASGD, EASGD, ParamSyncRule
from platoon.params import Parameter, adapt
from platoon.util import PlatoonError

Array = npt.NDArray[Any]


class SharedParameters:
    """What `Worker.init_shared_params` makes.

    Args:
        session: the worker's session.
        lock: the job's lock.
        params: the worker's own parameters.
        rule: how they are exchanged with the shared ones.

    Raises:
        PlatoonError: this is no rule; or the other workers share parameters of other shapes or dtypes, or in another
            order.
    """

    def __init__(self, session: Session, lock: JobLock, params: Any, rule: object) -> None:
        if not isinstance(rule, ParamSyncRule | Rule):  # before a table is made
            call = ": call it" if callable(rule) else ""
            raise PlatoonError(
                "a rule is one of platoon.param_sync, such as EASGD(0.5), a subclass of ParamSyncRule of your own, or "
                f"one of multiverso.rules; got {getattr(rule, '__name__', repr(rule))}{call}"
            )
        self._session = session
        self._lock = lock
        self._local = adapt(params)
        if not self._local:
            raise PlatoonError("there is no parameter to share: the list is empty")
        self._of_core: list[Shared] = []
        self._last: list[Array] = []  # for ASGD: the worker's values when they last met the shared ones
        self._alone = not (isinstance(rule, Rule) or _is_fused(rule, self._local))
        self._tables = [self._open(i, parameter, rule) for i, parameter in enumerate(self._local)]
        self.arrays: list[Array] = [
            table.memory().reshape(parameter.shape) for table, parameter in zip(self._tables, self._local, strict=True)
        ]
        if self._alone:
            assert isinstance(rule, ParamSyncRule)
            self._update = self._by_whole(rule.make_update_function(params))
        else:
            exchange = self._exchange_of(rule)
            self._update = lambda: self._each(exchange)

    def _open(self, number: int, parameter: Parameter, rule: ParamSyncRule | Rule) -> TableHandler:
        """Returns a parameter's table. That of a rule of the core is one of its own kind."""
        value = parameter.load()
        if value.size == 0:
            raise PlatoonError(f"parameter {number} has no elements (shape {parameter.shape})")
        what: dict[str, Any] = {"session": self._session, "holds": f"of shape {parameter.shape}"}
        try:
            if not isinstance(rule, Rule):
                name = f"platoon-parameter-{number}"
                return ArrayTableHandler(value.size, value, dtype=parameter.dtype, name=name, **what)
            self._of_core.append(share(value.reshape(-1), rule, name=f"platoon-{rule}-{number}", **what))
        except TableMismatchError as error:
            raise PlatoonError(
                f"parameter {number} is not what the others share there; all workers must give the same "
                "parameters in the same order",
                error,
            ) from error
        except MultiversoError as error:
            if not isinstance(rule, Rule):  # it is not the rule's fault: no memory, or who does not come
                raise
            raise PlatoonError(f"parameter {number} cannot be shared by the rule {rule}", error) from error
        parameter.write(value)  # which is the shared one now
        return self._of_core[-1].table

    def _exchange_of(self, rule: ParamSyncRule | Rule) -> Callable[[int, Array], object]:
        """Returns a rule's pass over the shared memory of one parameter, by its number and the worker's values."""
        if isinstance(rule, Rule):
            return lambda i, local: self._of_core[i].exchange(local)
        if isinstance(rule, EASGD):
            ruled = [Ruled(table) for table in self._tables]
            compiled = functools.lru_cache(len(ruled))(
                lambda i, alpha: ruled[i].compile(_PULL_TOGETHER, None, (alpha,))
            )
            # alpha may be changed at any time
            return lambda i, local: ruled[i].apply(compiled(i, rule.get_alpha()), local, True, False)
        self._last = last = [np.array(parameter.load()).reshape(-1) for parameter in self._local]
        return lambda i, local: self._tables[i].exchange(local, last[i])

    def _by_whole(self, update: Callable[[list[Array]], None]) -> Callable[[], None]:
        """Returns a synchronisation by a rule of the user's own, which works on the whole arrays."""

        def work() -> None:
            if not self._session.hosts:
                update(self.arrays)
                return
            # other hosts' changes arrive meanwhile: only what the rule has changed is added
            before = [table.snapshot() for table in self._tables]
            after = [old.reshape(array.shape).copy() for old, array in zip(before, self.arrays, strict=True)]
            update(after)
            for table, old, new in zip(self._tables, before, after, strict=True):
                table.add(new.reshape(old.shape) - old)

        return work

    def _each(self, work: Callable[[int, Array], object]) -> None:
        for i, parameter in enumerate(self._local):
            value = parameter.load()
            work(i, value.reshape(-1))
            parameter.write(value)

    def _run(self, work: Callable[[], None], locked: bool, alone: bool = False) -> None:
        self._session.check()
        if not locked:
            work()
        elif alone:
            self._lock.alone(work)
        else:
            self._lock.shared(work)

    def synchronise(self, locked: bool) -> None:
        """Exchanges the worker's parameters with the shared ones, by the rule."""
        self._run(self._update, locked, self._alone)

    def copy_to_local(self, locked: bool) -> None:
        """Sets the worker's parameters to the shared ones."""

        def work() -> None:
            self._each(lambda i, local: self._tables[i].snapshot(out=local))
            self._note_exchange()

        self._run(work, locked)

    def copy_to_global(self, locked: bool) -> None:
        """Sets the shared parameters to the worker's."""

        def work() -> None:
            for table, parameter in zip(self._tables, self._local, strict=True):
                table.set(parameter.load().reshape(-1))
            self._note_exchange()

        self._run(work, locked)

    def note_written(self) -> None:
        """The shared parameters may have been changed in place: other hosts are to see it."""
        if self._session.hosts and self._session.closed is None:
            for table in self._tables:
                table.note_written()

    def _note_exchange(self) -> None:
        """Without this, ASGD would push what it has just copied as if the worker had learnt it."""
        for last, parameter in zip(self._last, self._local, strict=False):
            np.copyto(last, parameter.load().reshape(-1))
        if self._of_core:
            self._each(lambda i, local: self._of_core[i].restart(local))


_PULL_TOGETHER = easgd(1).push
_METHODS = ("make_update_function", "theano_update", "update_params")


def _is_fused(rule: ParamSyncRule, parameters: list[Parameter]) -> bool:
    """Returns whether a rule is ours, and has a pass over the shared memory; one of the user's own has none.

    Raises:
        PlatoonError: it cannot work on such parameters.
    """
    base = next((base for base in (EASGD, ASGD) if isinstance(rule, base)), None)
    if base is None or any(getattr(type(rule), name) is not getattr(base, name) for name in _METHODS):
        return False
    whole = [parameter for parameter in parameters if parameter.dtype.kind != "f"]
    if base is EASGD and whole:
        raise PlatoonError(f"EASGD averages, which a parameter of dtype {whole[0].dtype} cannot hold")
    return True
