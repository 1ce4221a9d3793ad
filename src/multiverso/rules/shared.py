"""One worker's parameters beside the shared ones, and the rule between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from multiverso.errors import DtypeMismatchError, MultiversoError, SnapshotError
from multiverso.rules.additive import asgd, downpour
from multiverso.rules.averaging import easgd, local_sgd, model_averaging
from multiverso.rules.rule import Rule
from multiverso.runtime import Session
from multiverso.runtime.session.current import current
from multiverso.spec.modes import MODES, ConsistencyMode
from multiverso.spec.states import check_numbers
from multiverso.spec.table import Initial
from multiverso.tables.convert import writable
from multiverso.tables.handler import TableHandler
from multiverso.tables.pending import Pending
from multiverso.tables.ruled import Ruled
from multiverso.tables.table import spec_with

RuleName = Literal["asgd", "easgd", "downpour", "model_averaging", "local_sgd", "diloco"]
_BY_DEFAULT = {make.__name__: make for make in (asgd, downpour, model_averaging, local_sgd)} | {"diloco": local_sgd}


def rule_of(rule: Rule | RuleName | None, workers: int) -> Rule:
    """Returns what ``rule=`` means: a rule itself, one by its name with its defaults, or ASGD for None.

    ``"easgd"`` takes the moving rate of its paper, 0.9 divided by the number of workers.

    Raises:
        ValueError: no rule has this name.
        TypeError: neither a rule nor a name.
    """
    if rule is None:
        return asgd()
    if isinstance(rule, Rule):
        return rule
    if rule == "easgd":
        return easgd(0.9 / workers)
    if isinstance(rule, str):
        if rule not in _BY_DEFAULT:
            more = f" ({rule!r} has no default: multiverso.rules.{rule}(rate))" if rule.startswith("dcasgd") else ""
            raise ValueError(f"no rule is named {rule!r}; there are {', '.join(get_args(RuleName))}{more}")
        return _BY_DEFAULT[rule]()
    raise TypeError(f'rule= takes a rule such as multiverso.rules.easgd(0.2), or its name, "easgd"; got {_words(rule)}')


def _words(rule: Any) -> str:
    module = getattr(rule, "__module__", "")
    if module.startswith("multiverso.rules") and callable(rule):
        return f"the function {rule.__name__} itself: call it"
    if module.startswith("multiverso.updaters"):
        return f"the updater {getattr(rule, 'name', rule)!r}, which updater= of a table takes"
    return repr(rule)


Array = npt.NDArray[Any]
_DTYPES = ("float32", "float64")


class Shared:
    """The centre of a rule and this worker's part in it. Made by `share`.

    Not thread-safe: one thread at a time exchanges.

    Attributes:
        rule: the rule.
        ruled: the table as a rule moves it.
        compiled: the rule, compiled for the table; None for ASGD, which has a kernel of its own.
        table: the centre: ``table.snapshot()`` is what to validate, ``table.save(path)`` what to keep.
    """

    def __init__(self, rule: Rule, table: TableHandler) -> None:
        self.rule = rule
        self.table = table
        self.ruled = Ruled(table, self)
        self._local_state = self.ruled.local_state()
        # ASGD has a kernel of its own, which is quicker
        self.compiled = None if rule == asgd() else self.ruled.compile(rule.push, rule.pull, rule.hyper)
        self._calls = 0
        self._is_replaced = False
        for other in self.ruled.others():
            other._is_replaced = True

    def exchange(self, local: Any, *, always: bool = False, timeout_seconds: float | None = None) -> None:
        """Does one step of the rule between ``local`` and the centre, in place.

        It waits as ``table.get`` does: asynchronously only for a worker that is writing to the same stripe; with
        bounded staleness for workers too far behind. In synchronous mode it is one round of all workers, except where
        the rule neither pushes nor pulls now.

        Args:
            local: this worker's parameters: flat or of any shape, of the table's size and dtype, C-contiguous
                and writable (NumPy, or a torch tensor on the CPU).
            always: push and pull, also where the rule does that at other calls.
            timeout_seconds: deadline of the wait, instead of the session's.

        Raises:
            ShapeMismatchError, DtypeMismatchError: ``local`` does not fit; nothing was changed.
            MultiversoError: this worker has shared the table by its name once more since.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the wait failed.

        A call that raised has not returned: call it again with the same array, and it is finished; what it had done
        is not done again.
        """
        self._check()
        if self.compiled is None:
            self.table.exchange(local, self._local_state[0], timeout_seconds=timeout_seconds)
            return
        call = self._calls + 1
        push, pull = (always or call % every == 0 for every in (self.rule.push_every, self.rule.pull_every))
        if push or pull:
            self.ruled.apply(self.compiled, local, push, pull, timeout_seconds=timeout_seconds)
        self._calls = call

    def exchange_async(self, local: Any) -> Pending:
        """Like `exchange`, in the background. Leave ``local`` alone until ``wait()`` returns."""
        self._check()
        if self.compiled is None:
            return self.table.exchange_async(local, self._local_state[0])
        call = self._calls + 1
        push, pull = call % self.rule.push_every == 0, call % self.rule.pull_every == 0
        pending = self.ruled.apply_async(self.compiled, local, push, pull)
        self._calls = call
        return pending

    def _check(self) -> None:
        if self._is_replaced:
            raise MultiversoError(
                f"{self.table!r} is shared anew in this worker since, by another manager or share() with its name, "
                "which has its local state now: use that one, or another name"
            )

    def restart(self, local: Any) -> None:
        """Makes ``local`` a copy of the centre and begins the rule again, as after ``table.load(path)``."""
        flat = writable(local, self.table.size, self.table.dtype, "local")
        self.table.snapshot(out=flat)
        for array, start in zip(self._local_state, self.rule.per_worker, strict=True):
            array[:] = flat if start == "centre" else 0
        self._calls = 0

    def state(self) -> dict[str, Any]:
        """Returns what is this worker's own of the rule: what it saves beside its parameters and the table.

        The arrays are the rule's own memory, not copies.

        Raises:
            InterruptedRoundError: an exchange was interrupted and has to be finished first.
        """
        return {
            "rule": self.rule.name,
            "calls": self._calls,
            "arrays": list(self._local_state),
            "staged": self.ruled.staged(),
        }

    def join(self, local: Any, state: dict[str, Any]) -> None:
        """Begins like `restart`, in step with a worker that continues from ``state``.

        Its next pushes and pulls come when that one's do.
        """
        self.restart(local)
        self.ruled.restage(None)
        self._calls = state["calls"]

    def check_state(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Raises SnapshotError where `state` was returned by another rule or for another size.

        Args:
            state: what `state` returned.
            left: the same of workers whose state nobody resumes.
        """
        if state["rule"] != self.rule.name or len(state["arrays"]) != len(self._local_state):
            raise SnapshotError(
                f"this was saved by the rule {state['rule']!r} and is loaded into the rule {self.rule.name!r}; "
                "nothing was changed"
            )
        staged = [each["staged"] for each in (state, *left) if each["staged"] is not None]
        if self.table.spec.mean and any(each["staged"] is not None for each in left):
            raise SnapshotError(
                f"the rule {self.rule.name!r} takes the mean of what workers contribute to a round, and this was saved "
                "in the middle of one, by more workers than resume: start as many again. Nothing was changed"
            )
        for array in (*state["arrays"], *staged):
            if array.shape != (self.table.size,) or array.dtype != self.table.dtype:
                raise SnapshotError(
                    f"an array of the rule {self.rule.name!r} was saved with shape {array.shape} and {array.dtype}; "
                    f"it has ({self.table.size},) and {self.table.dtype} here. Nothing was changed"
                )

    def set_state(self, state: dict[str, Any], left: Sequence[dict[str, Any]] = ()) -> None:
        """Continues with the rule from what `state` returned, once the table has its values.

        What the workers in ``left`` have contributed to an unfinished round, this one contributes.
        """
        for array, saved in zip(self._local_state, state["arrays"], strict=True):
            array[:] = saved
        self._calls = state["calls"]
        self.ruled.restage(_sum_of([each["staged"] for each in (state, *left)]))

    def __repr__(self) -> str:
        return f"<Shared by {self.rule}: {self.table!r}>"


def share(
    local: Any,
    rule: Rule | RuleName | None = None,
    *,
    name: str | None = None,
    initial: Initial = "master",
    session: Session | None = None,
    master: bool = False,
    holds: str = "",
) -> Shared:
    """Shares an array between all workers by a rule; all begin with the same values.

    Collective: it returns when every live worker has called it. With ``name``, in an asynchronous job, it creates the
    centre or attaches to it at once, and ``local`` takes the live values.

    Args:
        local: this worker's parameters: float32 or float64, C-contiguous and writable; overwritten with the
            initial value of all.
        rule: a rule, or its name; ASGD by default.
        name, initial, session, master: as for `multiverso.ArrayTableHandler`.
        holds: what lies in the array, in words, which are to be equal in all workers.

    Raises:
        ValueError: no rule of that name, or it is not defined for the session's consistency; nothing was made.
        DtypeMismatchError: another dtype, read-only, or not in this process's memory; or the rule's numbers are others
            in this dtype.
        TableMismatchError: other workers share another array, or by another rule.

    Examples:
        >>> import numpy as np, multiverso as mv
        >>> session = mv.init()
        >>> local = np.zeros(3, "float32")
        >>> shared = mv.rules.share(local, mv.rules.easgd(0.5))
        >>> local += 1  # a training step
        >>> shared.exchange(local)
        >>> local, shared.table.get()
        (array([0.5, 0.5, 0.5], dtype=float32), array([0.5, 0.5, 0.5], dtype=float32))
        >>> mv.shutdown()
    """
    session = session or current()
    session.check()
    rule = rule_of(rule, session.workers_num)
    check_mode(rule, session.consistency)
    dtype = _dtype_of(local)
    check_numbers(f"the rule {rule.name}", rule.hyper, dtype.name)
    flat = writable(local, int(np.prod(tuple(local.shape))), dtype, "local")
    spec = spec_with(
        rule.updater,
        kind="array",
        rows=1,
        columns=flat.size,
        dtype=dtype.name,
        initial=initial,
        name=name,
        per_worker=len(rule.per_worker),
        rule=str(rule),
        convex=rule.convex,
        holds=holds,
    )
    shared = Shared(rule, TableHandler(session, spec, rule.updater, flat, master))
    shared.restart(flat)
    if session.makes_together(name):
        session.barrier()  # no worker trains before all have read the initial value
    return shared


def _sum_of(contributions: Sequence[Array | None]) -> Array | None:
    there = [each for each in contributions if each is not None]
    return np.sum(there, axis=0, dtype=there[0].dtype) if there else None


def check_mode(rule: Rule, mode: ConsistencyMode) -> None:
    """Raises ValueError when a rule is not defined for a mode."""
    if (mode.family or mode.name) not in rule.modes:
        raise ValueError(
            f"the rule {rule.name} is not defined for {mode.name} mode; use "
            f"{' or '.join(MODES[name].option for name in rule.modes)}, or another rule"
        )


def _dtype_of(local: Any) -> np.dtype[Any]:
    name = str(getattr(local, "dtype", type(local).__name__)).removeprefix("torch.")
    if name not in _DTYPES:
        raise DtypeMismatchError(f"local is a float32 or float64 array that is written to; got {name}")
    return np.dtype(name)
