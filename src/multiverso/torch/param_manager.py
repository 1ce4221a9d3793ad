"""A module's parameters, shared: one exchange for all of them; and what of a module is saved beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from multiverso.checkpoints import Parts
from multiverso.checks import whole
from multiverso.errors import SnapshotError
from multiverso.params import Model, Resumable, SharedParams, broadcast
from multiverso.rules import Rule, RuleName
from multiverso.runtime import Session
from multiverso.torch.beside import beside
from multiverso.torch.groups import InPlace, Staged, can_move, split_like
from multiverso.torch.lookups import Hook, LookedUp, lookups_of
from multiverso.torch.structure import Structure


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)


class ParamManager(Resumable):
    """Shares a module's parameters between all workers: collective.

    All workers begin with the master worker's values. Each exchange adds this worker's changes to the shared
    parameters, and takes the sum of all workers' changes, in place: optimizers keep their state. On the CPU, parameters
    become views of one flat memory, so that an exchange copies nothing.

    How a module's tensors are shared:

    - parameters that require gradients are shared: float32 and float64 in their dtype, 16-bit ones in float32
      (small changes would vanish in a 16-bit sum). Tied parameters are shared once;
    - weights of `torch.nn.Embedding` and `EmbeddingBag` with ``sparse=True`` on the CPU, of 32,768 numbers or more,
      are exchanged by rows: `step` pushes the rows that were read since the exchange before, and a forward first
      pulls the rows that it is about to read (see ``whole_every``);
    - floating buffers named ``running_...`` (batch normalisation's statistics) are averaged, never summed;
    - frozen parameters and other floating buffers take the master's values once and are never exchanged;
    - integer and boolean buffers stay with their worker.

    Args:
        module: moved to its device and converted to its dtype before; devices may differ.
        every: `step` exchanges at every N-th call (a bare number), or after that much time (a ``timedelta``).
        fragments: the parameters are cut into so many parts that take turns, each at every ``every`` steps, so that
            each exchange moves that much less (`multiverso.params.SharedParams`).
        rule: how parameters are exchanged (`multiverso.rules`, or ``"easgd"``); ASGD by default: changes add up.
        statistics: the names of the buffers to average, instead of those named ``running_...``.
        whole_every: sparse embeddings are exchanged by rows, and whole at every N-th exchange and by each
            `sync_all_param`; 1 for always whole. They always are with rules other than ASGD and Downpour, in a
            synchronous job, with ``overlap=True``, and where the optimizer (of `attach` or `SharedOptimizer`) has
            momentum or weight decay, which change rows that were not read.
        overlap: `step` begins an exchange and applies its result later, so that training does not wait for it: True at
            its next exchange, a number so many steps later (or at the next exchange, if that is earlier), when what
            was learned meanwhile is added. Costs two more copies of the parameters.
        session: the session to use instead of the current one.

    Raises:
        DtypeMismatchError: a trained parameter of another dtype.
        TableMismatchError: other workers share parameters of other names, or in another order.
        TypeError: parameters that are sparse, or sharded already (FSDP).
        ValueError: a parameter without memory (lazy, meta), or that shares a part of another's memory; a
            module with nothing to share.

    Not thread-safe: one thread at a time. Load checkpoints before making one: every worker's load would count
    as a change (the next exchange warns). A parameter belongs to the newest manager of it: older ones raise.

    Examples:
        >>> import multiverso as mv, torch
        >>> from multiverso.torch import ParamManager
        >>> session = mv.init()
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> manager = ParamManager(model)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 3)).sum().backward()
        ...     optimizer.step()
        ...     manager.sync_all_param()
        >>> mv.shutdown()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        every: int | timedelta = 1,
        fragments: int = 1,
        rule: Rule | RuleName | None = None,
        statistics: Iterable[str] | None = None,
        whole_every: int = 100,
        overlap: bool | int = False,
        session: Session | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"ParamManager(module) shares a torch.nn.Module; got {type(module).__name__}"
                + (": give it the module whose parameters that trains" if hasattr(module, "param_groups") else "")
            )
        self.module = module
        self._structure = Structure(module, statistics)
        self._overlap = overlap if isinstance(overlap, bool) else whole(overlap, "overlap", 0)
        self._flight: _Flight | None = None
        dense, self._sparse = _grouped(self._structure, bool(overlap), lookups_of(module) if fragments == 1 else {})
        self._groups: list[InPlace | Staged] = [*dense, *self._sparse]
        if not self._groups:
            raise ValueError(
                f"ParamManager(module) shares parameters and buffers; this {type(module).__name__} has none"
            )
        called = {id(tensor): name for name, tensor in (self._structure.trained | self._structure.statistics).items()}
        in_order = sorted(self._groups, key=lambda group: (group in self._sparse, group.averaged))
        self._shared = SharedParams(
            [group.initial() for group in dense if not group.averaged],
            [group.initial() for group in dense if group.averaged],
            [group.initial().reshape(group.tensors[0].shape) for group in self._sparse],
            every=every,
            whole_every=whole_every,
            fragments=fragments,
            rule=rule,
            names=[_plain(called[id(tensor)]) for group in in_order for tensor in group.tensors],
            allocate=partial(_memory, pinned=any(group.tensors[0].is_cuda for group in self._groups)),
            session=session,
        )
        with torch.no_grad():
            shared = self._shared
            flats = shared.arrays + shared.statistics + [matrix.reshape(-1) for matrix in shared.matrices]
            for group, flat in zip(self._groups, flats, strict=True):
                group.adopt(flat)
            for sparse, rows in zip(self._sparse, shared.by_rows, strict=True):
                sparse.watch(rows)
            _begin_alike(list(self._structure.constant.values()), session)
        self._shared.hold.take(tensor for group in self._groups for tensor in group.tensors)
        self._loaded = False  # since the last exchange, by something else than `load`
        if self._shared.workers_num > 1:
            for part in module.modules():
                part.register_load_state_dict_post_hook(Hook(self._note_load))
        self._shared.model = Model(read=self._read, check=self._check_parts, write=lambda _, parts: self._write(parts))

    def sync_all_param(self) -> None:
        """Adds this worker's changes to the shared parameters and takes the values of all, in place.

        Blocks for the round in a synchronous job (one exchange is one round), and not otherwise. Where the rule pushes
        or pulls at every N-th exchange only, it counts as one. After the last step call `finish`.

        Raises:
            RuntimeError: parameters were added, replaced, unfrozen, moved or converted since; nothing has been
                exchanged.
        """
        self._sync(whole=True)

    def _sync(self, whole: bool) -> None:
        with torch.no_grad():
            self._land()
            self._check()
            whole = whole or any(group.whole for group in self._sparse)
            self._shared.as_one_call(self._collect, self._publish, whole)

    def _check(self) -> None:
        self._structure.check()
        if self._loaded:
            self._loaded = False
            warnings.warn(
                "load_state_dict was called after ParamManager(module): what it changed counts as this worker's "
                "learning, and adds up if every worker loads. Load before the manager is made, or resume from "
                "manager.save by manager.load",
                stacklevel=4,
            )

    def _note_load(self, *_: Any) -> None:
        self._loaded = True

    def _collect(self) -> None:
        for wait in [group.collect() for group in self._groups]:
            wait()

    def _publish(self) -> None:
        for group in self._groups:
            group.publish()

    def step(self) -> bool:
        """Counts one training step and exchanges when that is due (``every=``); returns whether it did."""
        if not self._shared.due():
            if self._flight is not None and self._flight.is_due():
                self.flush()
            return False
        if self._overlap:
            with torch.no_grad():
                self._land()
                self._check()
                self._flight = _Flight(self._groups, self._steps_to_land())
                self._flight.begin(self._shared.begin())
        else:
            self._sync(whole=False)
        return True

    def _steps_to_land(self) -> int | None:
        return None if self._overlap is True else int(self._overlap)

    def state_dict(self, part: torch.nn.Module | None = None) -> dict[str, Any]:
        """Returns a state with the shared parameters and statistics, to validate and publish.

        Exchanges nothing, and waits only as `multiverso.ArrayTableHandler.snapshot` does. This worker's own
        parameters may differ, and with EASGD they do. What is shared is copied, each tensor into memory of its own:
        ``torch.save`` writes the whole memory that a tensor lies in, and the module's own tensors lie in that of all.

        Args:
            part: a submodule, to have its state alone; else the whole module's.
        """
        shared: dict[int, Any] = {}
        for group, flat in zip(self._groups, self._shared.centre(), strict=True):
            parts = split_like(torch.from_numpy(flat).reshape(-1), group.tensors)
            shared |= {
                id(tensor): part.to(tensor, copy=True) for tensor, part in zip(group.tensors, parts, strict=True)
            }
        state = (part or self.module).state_dict(keep_vars=True)
        return {name: shared.get(id(value), getattr(value, "data", value)) for name, value in state.items()}

    # -- what of the module is saved beside the shared arrays: integers and booleans (counters, masks) are this worker's
    # own; frozen parameters and other floating buffers are most often alike in all workers, and are saved once

    def _rest(self) -> dict[str, Any]:
        shared = {id(tensor) for group in self._groups for tensor in group.tensors}
        state = self.module.state_dict(keep_vars=True)
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
            if id(value) not in shared
        }

    def _read(self) -> Parts:
        with torch.no_grad():
            self._structure.check()
            if self._flight is not None:
                self._flight.finish()
            rest = self._rest()
            common = {name: value for name, value in rest.items() if _is_floating(value)}
            own = {name: value for name, value in rest.items() if name not in common}
            left = None if self._flight is None else self._flight.left
            groups = [group.state() for group in self._groups]
            return Parts({"groups": groups, "rest": own, "left": left}, common or None)

    def _check_parts(self, parts: Parts) -> None:
        self._structure.check()
        saved = {**parts.own["rest"], **(parts.common or {})}
        expected = {name: _kind(value) for name, value in self._rest().items()}
        got = {name: _kind(value) for name, value in saved.items()}
        if got != expected or len(parts.own["groups"]) != len(self._groups):
            odd = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            raise SnapshotError(
                f"the module is not the one that was saved; {', '.join(odd) or 'its devices or dtypes'} differ. "
                "Nothing was changed"
            )

    def _write(self, parts: Parts) -> None:
        """Gives the module its state back; the flat memory has its values already."""
        with torch.no_grad():
            if self._flight is not None:
                self._flight.finish()
            for group, state in zip(self._groups, parts.own["groups"], strict=True):
                group.restore(None if parts.newcomer else state)
            self.module.load_state_dict({**parts.own["rest"], **(parts.common or {})}, strict=False)
            self._loaded = False
            in_flight = any(isinstance(group, Staged) and group.in_flight for group in self._groups)
            self._flight = _Flight(self._groups, parts.own.get("left")) if in_flight else None

    def flush(self) -> None:
        """Waits for the exchange that ``overlap=`` has begun, and applies its result."""
        with torch.no_grad():
            self._land()

    def attach(self, optimizer: Any) -> Any:
        """Makes each ``optimizer.step()`` call `step`, so that a training loop needs no other line.

        Returns:
            A handle whose ``remove()`` undoes it.
        """
        self._trained_by(optimizer)
        return optimizer.register_step_post_hook(lambda *_: self.step() and None)

    def _trained_by(self, optimizer: Any) -> None:
        for group in self._sparse:
            group.trained_by(optimizer)

    def _land(self) -> None:
        if self._flight is not None:
            flight, self._flight = self._flight, None
            try:
                flight.land()
            except BaseException:
                self._shared.make_due()
                raise


class _Flight:
    """One exchange during training.

    Attributes:
        left: steps until its result is applied; None: that is done at the next exchange.
    """

    def __init__(self, groups: Sequence[InPlace | Staged], left: int | None) -> None:
        self.left = left
        self._groups = [group for group in groups if isinstance(group, Staged)]
        self._beside: Future[Any] | None = None  # none in one whose exchange was done before a save

    def begin(self, exchange: Callable[[], None]) -> None:
        for group in self._groups:
            group.absorb()
        waits = [group.send() for group in self._groups]

        def work() -> None:
            for wait in waits:
                wait()
            exchange()
            with torch.no_grad():
                for group in self._groups:
                    group.fetch()

        self._beside = beside(work, "multiverso-flight")

    def is_due(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left <= 0

    def finish(self) -> None:
        if self._beside is not None:
            self._beside.result()

    def land(self) -> None:
        self.finish()
        for group in self._groups:
            group.receive()


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put into it: some workers may compile a module, and others not."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _grouped(
    structure: Structure, overlap: bool, lookups: dict[int, list[Any]]
) -> tuple[list[InPlace | Staged], list[LookedUp]]:
    groups: list[InPlace | Staged] = []
    sparse: list[LookedUp] = []
    for averaged, tensors in ((False, structure.trained), (True, structure.statistics)):
        kinds: dict[Any, list[Any]] = {}
        for tensor in tensors.values():
            in_place = not overlap and can_move(tensor) and id(tensor) not in structure.twins
            if in_place and id(tensor) in lookups:
                sparse.append(LookedUp(tensor, lookups[id(tensor)]))
                continue
            kinds.setdefault((in_place, str(tensor.device), tensor.dtype), []).append(tensor)
        for (in_place, *_), members in kinds.items():
            groups.append((InPlace if in_place else Staged)(members, averaged))
    return groups, sparse


def _begin_alike(tensors: list[Any], session: Session | None) -> None:
    """Gives tensors that are not exchanged the master's values, whatever their dtype."""
    parts = [tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu() for tensor in tensors if tensor.numel()]
    before = [part.clone() for part in parts]
    broadcast([part.numpy() for part in before], session)
    full = [tensor for tensor in tensors if tensor.numel()]
    for tensor, part, new in zip(full, parts, before, strict=True):
        if not torch.equal(part, new):
            tensor.copy_(new.view(tensor.dtype).view(tensor.shape))


def _memory(size: int, dtype: Any, pinned: bool) -> Any:
    return torch.empty(size, dtype=getattr(torch, dtype.name), pin_memory=pinned).numpy()
