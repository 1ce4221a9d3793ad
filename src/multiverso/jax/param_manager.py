"""A pytree of parameters, shared."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from multiverso.errors import ShapeMismatchError, SnapshotError
from multiverso.jax.framework import placed_like
from multiverso.params import SharedParams
from multiverso.rules import Rule, RuleName
from multiverso.runtime import Session


class ParamManager:
    """Shares a pytree of parameters between all workers: collective.

    All workers begin with the master worker's values: take them from ``params``. Of each floating leaf, what
    this worker changed since its last exchange adds up; ``statistics`` (batch normalisation's running means and
    variances) are averaged, never summed. Other leaves (integers, keys, None) stay with their worker. 16-bit
    leaves are shared in float32. Leaves keep their dtype, shape and devices.

    Args:
        params: a pytree of arrays: a dict, a flax or equinox module, ...
        statistics: another one, to be averaged.
        every: `step` and `transformation` exchange at every N-th call (`step`: or after a ``timedelta``).
        fragments: the parameters are cut into so many parts that take turns, each at every ``every`` steps, so that
            each exchange moves that much less (`multiverso.params.SharedParams`);
            not with `transformation`.
        rule: how parameters are exchanged (`multiverso.rules`, or ``"easgd"``); ASGD by default: changes add up.
        session: the session to use instead of the current one.

    Attributes:
        params: the parameters that all begin with; gone once a step has had them donated.
        statistics: the statistics that all begin with.

    Raises:
        DtypeMismatchError: a floating leaf that is not float16, bfloat16, float32 or float64.
        ValueError: no floating leaf.

    Examples:
        >>> import jax.numpy as jnp, multiverso as mv
        >>> from multiverso.jax import ParamManager
        >>> session = mv.init()
        >>> manager = ParamManager({"w": jnp.ones(3)})
        >>> params = manager.params
        >>> params = {"w": params["w"] - 0.5}  # a training step, jitted or not
        >>> manager.sync_all_param(params)
        {'w': Array([0.5, 0.5, 0.5], dtype=float32)}
        >>> mv.shutdown()
    """

    def __init__(
        self,
        params: Any,
        *,
        statistics: Any = None,
        every: int | timedelta = 1,
        fragments: int = 1,
        rule: Rule | RuleName | None = None,
        session: Session | None = None,
    ) -> None:
        self._every, self._fragments = every, fragments
        summed, averaged = _floating(params), _floating(statistics)
        self._trees = (jax.tree.structure(params), jax.tree.structure(statistics))
        paths = [
            path
            for tree in (params, statistics)
            for path, leaf in jax.tree.leaves_with_path(tree)
            if _is_floating(leaf)
        ]
        self._shared = SharedParams(
            [np.asarray(leaf) for leaf in summed],
            [np.asarray(leaf) for leaf in averaged],
            names=[jax.tree_util.keystr(path) for path in paths],
            every=every,
            fragments=fragments,
            rule=rule,
            session=session,
        )
        self.params, self.statistics = _rebuilt(self._shared.values(), params, statistics)

    def save(self, directory: str | os.PathLike[str], own: Any = None) -> None:
        """Saves everything that this job continues from: collective, whole or not at all.

        That is the shared parameters and the rule's state, and of each worker its own since its last exchange, and
        ``own``. Nothing is exchanged. If a worker is killed meanwhile, what was saved before is still there.

        Args:
            directory: the same for all workers, and for these parameters alone.
            own: this worker's own state, a pytree of arrays, keys, numbers and strings, such as
                ``{"params": params, "optimizer": optimizer_state, "key": key, "step": step}``. The parameters belong
                in it wherever they have changed since the last exchange.

        Raises:
            TypeError: ``own`` holds something else; the message says where.
            SnapshotError: it went wrong in another worker; or the directory holds something else, which is kept.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: not all workers came.
        """
        leaves, structure = jax.tree.flatten(own)
        state = {"leaves": [_saved(leaf) for leaf in leaves], "structure": str(structure)}
        self._shared.save(directory, state)

    def load(self, directory: str | os.PathLike[str], like: Any = None, *, missing_ok: bool = False) -> Any:
        """Goes back to what `save` wrote: collective; all of it fits in all workers, or nothing is changed.

        Afterwards ``self.params`` and ``self.statistics`` are this worker's of its last exchange before the save.

        There may be more or fewer workers than saved: with fewer, what those without a place had of their own is left
        out; with more, the others begin from the shared values (see `newcomer`). A line on standard error says so.

        Args:
            directory: as for `save`.
            like: a pytree as was saved: what is loaded gets its structure, kinds and devices. Where it holds the
                arrays of ``self.params`` themselves, a newcomer gets the shared values in their places.
            missing_ok: return None where nothing has been saved yet, as at a job's first start.

        Returns:
            What this worker handed over as ``own``, or a newcomer what another worker did, with the shared parameters.

        Raises:
            SnapshotError: nothing is there, it is damaged, or it was saved of other parameters, of another ``own`` or
                by another rule; or a newcomer's ``like`` may hold the parameters, and not the arrays of
                ``self.params``: nothing says which they are.
        """
        leaves, structure = jax.tree.flatten(like)
        shared = {id(leaf): i for i, leaf in enumerate(self._floating_leaves())}

        def check(own: dict[str, Any], newcomer: bool) -> None:
            if newcomer and not shared.keys() <= set(map(id, leaves)) and self._may_be_in(leaves):
                raise SnapshotError(
                    "fewer workers saved this, so it holds no parameters of this one's own: build like= from the very "
                    "arrays of manager.params (and statistics), so that the shared values take their places. Nothing "
                    "was changed"
                )
            if own["structure"] != str(structure):
                raise SnapshotError(
                    f"own was saved as {own['structure']}, and like= is {structure}; nothing was changed"
                )

        own = self._shared.load(directory, missing_ok=missing_ok, check=check)
        if own is None:
            return None
        self.params, self.statistics = _rebuilt(self._shared.values(), self.params, self.statistics)
        found = [_loaded(value, leaf) for value, leaf in zip(own["leaves"], leaves, strict=True)]
        if self.newcomer:
            now = self._floating_leaves()
            found = [
                now[shared[id(leaf)]] if id(leaf) in shared else value
                for value, leaf in zip(found, leaves, strict=True)
            ]
        return jax.tree.unflatten(structure, found)

    @property
    def newcomer(self) -> bool:
        """Whether this worker had nothing of its own in what `load` loaded last, as fewer workers had saved it.

        What `load` returned was another worker's then, keys included: ``jax.random.fold_in(key, mv.worker_id())``.
        """
        return self._shared.newcomer

    def _floating_leaves(self) -> list[Any]:
        return _floating(self.params) + _floating(self.statistics)

    def _may_be_in(self, leaves: list[Any]) -> bool:
        """Returns whether there is a leaf of each shared array's shape and dtype."""
        kinds = Counter((leaf.shape, leaf.dtype) for leaf in leaves if _is_floating(leaf))
        return not Counter((leaf.shape, leaf.dtype) for leaf in self._floating_leaves()) - kinds

    def sync_all_param(self, params: Any, statistics: Any = None) -> Any:
        """Adds what this worker changed since the last call, and returns the values of all.

        Args:
            params: this worker's parameters now, a pytree like the first one; not modified.
            statistics: its statistics now, where the manager has some.

        Returns:
            The parameters; with statistics, the pair of both.

        Raises:
            ShapeMismatchError: another tree, or leaves of other shapes; nothing has been exchanged.
        """
        return self._sync(params, statistics, whole=True)

    def _sync(self, params: Any, statistics: Any, whole: bool) -> Any:
        if (jax.tree.structure(params), jax.tree.structure(statistics)) != self._trees:
            raise ShapeMismatchError(
                f"expected trees like those that the ParamManager was made with, {self._trees[0]} and statistics "
                f"{self._trees[1]}; got {jax.tree.structure(params)} and {jax.tree.structure(statistics)}"
            )
        values = self._shared.sync([np.asarray(leaf) for leaf in _floating(params) + _floating(statistics)], whole)
        new = _rebuilt(values, params, statistics)
        return new[0] if statistics is None else new

    def finish(self, params: Any, statistics: Any = None) -> Any:
        """After the last step: shares what is left, and returns what all have as `sync_all_param` does; collective.

        It pushes what this worker has learned since its last exchange, whatever ``every=`` and the rule's intervals
        are, waits until all workers have, and takes the values of all.
        """

        def exchange() -> Any:
            if self._shared.ending < 2:
                return self.sync_all_param(params, statistics)
            return self.sync_all_param(*_rebuilt(self._shared.values(), params, statistics))

        return self._shared.finish(exchange)

    def step(self, params: Any, statistics: Any = None) -> Any:
        """Counts one training step, and exchanges when that is due; returns as `sync_all_param` does."""
        if self._shared.due():
            return self._sync(params, statistics, whole=False)
        return params if statistics is None else (params, statistics)

    def transformation(self) -> optax.GradientTransformation:
        """Returns an optax transformation that exchanges after every ``every``-th update, in jitted steps too.

        Put it last in ``optax.chain``: the parameters that it returns updates for are those of all workers. The
        exchange is a host callback (``jax.experimental.io_callback``, ordered), so the step may not be mapped
        (``vmap``, ``pmap``), nor run on several devices: use `step` outside of the jitted function there.
        Statistics are not part of it.

        Raises:
            ValueError: ``every`` is a time, or the manager has statistics or fragments.

        Examples:
            >>> optimizer = optax.chain(optax.adam(1e-3), manager.transformation())  # doctest: +SKIP
        """
        if isinstance(self._every, timedelta):
            raise ValueError("a transformation exchanges at every so many updates: every= must be a number of steps")
        if self._shared.statistics:
            raise ValueError(
                "a transformation sees no statistics: call step(params, statistics) after the step instead"
            )
        if self._fragments > 1:
            raise ValueError(
                "a transformation exchanges all fragments at once: call step(params) after the step instead"
            )
        every = self._every

        def begin(params: Any) -> _State:
            return _State(jnp.zeros([], jnp.int32))

        def exchanged(params: Any, updates: Any) -> Any:
            new = _floating(optax.apply_updates(params, updates))
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in new]
            pulled = io_callback(self._on_host, shapes, new, ordered=True)
            moves = [value - leaf for value, leaf in zip(pulled, _floating(params), strict=True)]
            return _replaced(updates, moves)

        def update(updates: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
            if params is None:
                raise ValueError("pass the parameters: optimizer.update(gradients, state, params)")
            count = optax.safe_int32_increment(state.count)
            updates = jax.lax.cond(count % every == 0, exchanged, lambda _, same: same, params, updates)
            return updates, _State(count)

        return optax.GradientTransformation(begin, update)

    def _on_host(self, leaves: list[Any]) -> list[Any]:
        # NumPy in, NumPy out: allocating JAX memory in a callback can deadlock.
        return self._shared.sync([np.asarray(leaf) for leaf in leaves])


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _saved(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf)) if _is_key(leaf) else leaf


def _loaded(value: Any, leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(leaf))
    return placed_like(value, leaf)


class _State(NamedTuple):
    """How many updates there were: all that the transformation keeps in an optimizer's state."""

    count: Any


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _floating(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_floating(leaf)]


def _replaced(tree: Any, values: Any) -> Any:
    """Returns the tree with its floating leaves replaced, in order."""
    new = iter(values)
    return jax.tree.map(lambda leaf: next(new) if _is_floating(leaf) else leaf, tree)


def _rebuilt(values: list[Any], params: Any, statistics: Any) -> tuple[Any, Any]:
    leaves = _floating(params) + _floating(statistics)
    placed = [placed_like(value, leaf) for value, leaf in zip(values, leaves, strict=True)]
    number = len(_floating(params))
    return _replaced(params, placed[:number]), _replaced(statistics, placed[number:])
