"""A Keras model's weights, shared."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from multiverso.checkpoints import Parts
from multiverso.errors import DtypeMismatchError
from multiverso.keras.framework import settle
from multiverso.params import Model, Resumable, SharedParams, check_unshared
from multiverso.rules import Rule, RuleName
from multiverso.runtime import Session

_FLOATS = ("float16", "bfloat16", "float32", "float64")


class ParamManager(Resumable):
    """Shares a Keras model's weights between all workers: collective.

    All workers begin with the master worker's values. Of trainable weights, what each worker changed since its
    last exchange adds up; weights that are not trainable (a batch normalisation's moving mean and variance) are
    averaged, never summed. A weight that several layers share is shared once. Integers (seeds, counters) stay
    with their worker, as the optimizer's own variables do. 16-bit weights are shared in float32.

    Args:
        model: a built model.
        every: `step` exchanges at every N-th call (a bare number), or after that much time (a ``timedelta``).
        fragments: the parameters are cut into so many parts that take turns, each at every ``every`` steps, so that
            each exchange moves that much less (`multiverso.params.SharedParams`).
        rule: how weights are exchanged (`multiverso.rules`, or a name: ``"easgd"``); changes add up (ASGD) by default.
        session: the session to use instead of the current one.

    Raises:
        ValueError: the model is not built, or has no weights.
        DtypeMismatchError: a trainable weight that is not of a floating dtype.

    Load saved weights before making one: every worker's load would count as a change.

    Examples:
        >>> manager = ParamManager(model)  # doctest: +SKIP
        >>> manager.sync_all_param()  # after each minibatch  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        *,
        every: int | timedelta = 1,
        fragments: int = 1,
        rule: Rule | RuleName | None = None,
        session: Session | None = None,
    ) -> None:
        if not hasattr(model, "built") or not hasattr(model, "weights"):
            raise TypeError(f"ParamManager(model) shares a Keras model; got {type(model).__name__}")
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} has no weights yet: give it an input shape, or call it once, before "
                "it is shared"
            )
        self.model = model
        settle(model)
        self._weights = _shared_weights(model)
        self._trained = [weight.trainable for weight in self._weights]
        values = [weight.numpy() for weight in self._weights]
        self._order = sorted(range(len(values)), key=lambda index: not self._trained[index])
        ordered = [values[index] for index in self._order]
        summed = sum(self._trained)
        self._shared = SharedParams(
            ordered[:summed], ordered[summed:], every=every, fragments=fragments, rule=rule, session=session
        )
        self._shared.hold.take(self._weights)
        self._assign(self._shared.values())
        self._shared.model = Model(
            values=self._values,
            read=lambda: Parts([weight.numpy() for weight in self._rest()]),
            check=lambda parts: check_unshared(parts.own, self._rest()),
            write=self._resume,
        )

    def sync_all_param(self) -> None:
        """Adds what this worker changed since the last call, and sets the model to the values of all.

        Raises:
            RuntimeError: the model has other weights now, or others are trainable, than when this manager was
                made; nothing has been exchanged.
        """
        self._sync(whole=True)

    def _sync(self, whole: bool) -> None:
        self._assign(self._shared.sync(self._values(), whole))

    def _values(self) -> list[Any]:
        settle(self.model)
        now = _shared_weights(self.model)
        trained = [weight.trainable for weight in self._weights]
        if {id(weight) for weight in now} != {id(weight) for weight in self._weights} or trained != self._trained:
            raise RuntimeError(
                f"the weights of {self.model.name!r}, or which of them are trainable, have changed since its "
                "ParamManager was made; make a new one, in every worker, after such a change"
            )
        return [self._weights[index].numpy() for index in self._order]

    def _rest(self) -> list[Any]:
        """What stays with its worker: seeds, counters."""
        shared = {id(weight) for weight in self._weights}
        variables = {id(variable): variable for variable in self.model.variables}
        return [variable for key, variable in variables.items() if key not in shared]

    def _resume(self, values: list[Any], parts: Parts) -> None:
        settle(self.model)
        self._assign(values)
        if parts.newcomer:
            return  # another worker's seeds are of no use here
        for weight, value in zip(self._rest(), parts.own, strict=True):
            weight.assign(value)

    def _assign(self, values: list[Any]) -> None:
        for index, value in zip(self._order, values, strict=True):
            self._weights[index].assign(value)


def _shared_weights(model: Any) -> list[Any]:
    weights = list({id(weight): weight for weight in model.weights}.values())
    for weight in weights:
        if weight.trainable and str(weight.dtype) not in _FLOATS:
            raise DtypeMismatchError(
                f"the weight {weight.path} is {weight.dtype}; shared ones are {', '.join(_FLOATS)}"
            )
    return [weight for weight in weights if str(weight.dtype) in _FLOATS]
