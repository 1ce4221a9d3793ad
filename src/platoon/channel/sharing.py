"""The shared parameters of a worker: tables that the first worker fills and the later ones attach to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso import kernels
from multiverso.errors import MultiversoError, TableMismatchError
from multiverso.kernels.compiling import compile_push
from multiverso.rules import Rule, Shared, easgd, share
from multiverso.runtime import Session
from multiverso.shards.shard import Shard
from multiverso.spec import TableSpec
from platoon.channel.joblock import JobLock
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
        rule: how they and the shared ones meet.

    Raises:
        PlatoonError: the other workers share parameters of other shapes or dtypes, or in another order.
    """

    def __init__(self, session: Session, lock: JobLock, params: Any, rule: ParamSyncRule | Rule) -> None:
        self._session = session
        self._lock = lock
        self._local = adapt(params)
        if not self._local:
            raise PlatoonError("there is no parameter to share: the list is empty")
        if isinstance(rule, Rule):
            self._of_core = [self._share(i, parameter, rule) for i, parameter in enumerate(self._local)]
            self._shards = [shared.table._shard for shared in self._of_core]
        else:
            self._of_core = []
            self._shards = [self._open(i, parameter) for i, parameter in enumerate(self._local)]
        self.arrays: list[Array] = [
            shard.values().reshape(parameter.shape)
            for shard, parameter in zip(self._shards, self._local, strict=True)
        ]
        self._last: list[Array] = []  # for ASGD: the worker's values when they last met the shared ones
        self._update = self._updater(params, rule)

    def _share(self, number: int, parameter: Parameter, rule: Rule) -> Shared:
        """For a rule of the core: it has a table of its own kind, and begins with the shared values."""
        value = parameter.load()
        name = f"platoon-{rule}-{number}"
        try:
            shared = share(value.reshape(-1), rule, name=name, session=self._session)
        except MultiversoError as error:
            raise PlatoonError(f"parameter {number} cannot be shared by the rule {rule}", error) from error
        parameter.write(value)
        return shared

    def _open(self, number: int, parameter: Parameter) -> Shard:
        value = parameter.load().reshape(-1)
        if value.size == 0:
            raise PlatoonError(f"parameter {number} has no elements (shape {parameter.shape})")
        spec = TableSpec(
            "array", 1, value.size, dtype=parameter.dtype.name, name=f"platoon-parameter-{number}"
        )
        try:
            _, shard = self._session.open_table(spec, lambda made, last, of: np.copyto(made.values(), value))
        except TableMismatchError as error:
            raise PlatoonError(
                f"parameter {number} is not what the others share there; all workers must give the same "
                "parameters in the same order",
                error,
            ) from error
        return shard

    def _updater(self, params: Any, rule: ParamSyncRule | Rule) -> Callable[[bool], None]:
        """Returns what a synchronisation does; its argument says whether the job's lock counts."""
        fused: Callable[[], None] | None
        if isinstance(rule, Rule):

            def step() -> None:
                self._each(lambda i, local: self._of_core[i].exchange(local))

            fused = step
        else:
            fused = self._fused(rule)
        if fused is not None:

            def update(locked: bool) -> None:
                if locked:
                    with self._lock.shared():
                        fused()
                else:
                    fused()

            return update
        assert isinstance(rule, ParamSyncRule)
        whole = rule.make_update_function(params)

        def update_whole(locked: bool) -> None:
            if locked:
                with self._lock.alone():
                    whole(self.arrays)
            else:
                whole(self.arrays)

        return update_whole

    def _fused(self, rule: ParamSyncRule) -> Callable[[], None] | None:
        """Returns a rule's pass over the shared memory, or None if it is a rule of the user's own."""
        overridden = [
            name for name in _METHODS if getattr(type(rule), name) is not getattr(_base_of(rule), name)
        ]
        if overridden:
            return None
        if isinstance(rule, EASGD):
            whole = [parameter for parameter in self._local if parameter.dtype.kind != "f"]
            if whole:
                raise PlatoonError(f"EASGD averages, which a parameter of dtype {whole[0].dtype} cannot hold")
            return lambda: self._each(lambda i, local: self._elastic(i, local, rule.get_alpha()))
        if isinstance(rule, ASGD):
            self._last = last = [np.array(parameter.load()).reshape(-1) for parameter in self._local]
            return lambda: self._each(lambda i, local: self._exchange(i, local, last[i]))
        return None

    def _each(self, work: Callable[[int, Array], None]) -> None:
        for i, parameter in enumerate(self._local):
            value = parameter.load()
            work(i, value.reshape(-1))
            parameter.write(value)

    def _run(self, kernel: Callable[..., int], number: int, *arguments: Any) -> None:
        shard = self._shards[number]
        control = self._session.control.address
        code = kernel(control, shard.base, *arguments, 0)
        if code == 0:
            return

        def again() -> int:
            nonlocal code
            code = kernel(control, shard.base, *arguments, code >> 16)  # from the stripe at which it stopped
            return code

        self._session.go_on(code, again, None, f"a part of the shared parameter {number}")

    def _exchange(self, number: int, local: Array, last: Array) -> None:
        self._run(_dense(local).exchange, number, 0, self._session.worker_id, local, last)

    def _elastic(self, number: int, local: Array, alpha: float) -> None:
        step, push = _elastic_step(local.dtype)
        hyper = np.array([alpha], local.dtype)
        me = self._session.worker_id
        self._run(step, number, 0, push, 0, me, 0, hyper.ctypes.data, local, 1)

    def synchronise(self, locked: bool) -> None:
        """Lets the worker's parameters and the shared ones meet."""
        self._session.check()
        self._update(locked)

    def copy_to_local(self, locked: bool) -> None:
        """Sets the worker's parameters to the shared ones."""
        with self._maybe_shared(locked):
            self._each(lambda i, local: self._run(_dense(local).get, i, self._session.worker_id, local))
            self._note_meeting()

    def copy_to_global(self, locked: bool) -> None:
        """Sets the shared parameters to the worker's."""
        with self._maybe_shared(locked):
            for i, parameter in enumerate(self._local):
                local = parameter.load().reshape(-1)
                self._run(_dense(local).put, i, self._session.worker_id, local)
            self._note_meeting()

    def _note_meeting(self) -> None:
        """Without this, ASGD would push what it has just copied as if the worker had learnt it."""
        for last, parameter in zip(self._last, self._local, strict=False):
            np.copyto(last, parameter.load().reshape(-1))
        if self._of_core:
            self._each(lambda i, local: self._of_core[i].restart(local))

    def _maybe_shared(self, locked: bool) -> AbstractContextManager[None]:
        self._session.check()
        return self._lock.shared() if locked else nullcontext()


def _dense(array: Array) -> Any:
    return _dense_kernels(array.dtype)


@functools.cache  # by dtype and not by its name, which is put together anew each time
def _dense_kernels(dtype: np.dtype[Any]) -> Any:
    return kernels.load(dtype.name).dense


@functools.cache
def _elastic_step(dtype: np.dtype[Any]) -> tuple[Any, int]:
    """Returns the kernel that runs a rule, and the address of the core's elastic averaging."""
    return kernels.load_steps(dtype.name).step, compile_push(easgd(1).push, dtype.name)


def memory_named(session: Session, name: str, size: int) -> Array:
    """Returns zeroed memory that all workers of a host share under a name: ``size`` bytes, or a few more."""
    spec = TableSpec("array", 1, -(-size // 8), dtype="int64", name=name)
    _, shard = session.open_table(spec, lambda made, last, of: None)
    return shard.values().view(np.uint8)


_METHODS = ("make_update_function", "theano_update", "update_params")


def _base_of(rule: ParamSyncRule) -> type[ParamSyncRule]:
    return next((base for base in (EASGD, ASGD) if isinstance(rule, base)), ParamSyncRule)
