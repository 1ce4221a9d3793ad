"""Parameters that are looked up by rows, ``sparse=True``: which they are, and what sees the rows go by."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from multiverso.params.rows import RowExchange
from multiverso.torch.groups import InPlace

_LOOKUPS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_FORWARDS = tuple(kind.forward for kind in _LOOKUPS)
# Below it the whole matrix is exchanged as quickly as some rows are found.
_LEAST = 1 << 15


def lookups_of(module: Any) -> dict[int, list[Any]]:
    """Returns, by the parameter's id, the modules that look it up, for parameters that are used in no other way.

    Those are the weights of `torch.nn.Embedding` and `EmbeddingBag` with ``sparse=True``, whose forwards say which rows
    a step reads; optimizers that take sparse gradients change these rows alone (see `changes_other_rows`).
    """
    users: dict[int, list[Any]] = {}
    others: set[int] = set()
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is None:
                continue
            if isinstance(part, _LOOKUPS) and part.sparse and type(part).forward in _FORWARDS:
                users.setdefault(id(parameter), []).append(part)
            else:
                others.add(id(parameter))
    return {key: parts for key, parts in users.items() if key not in others and parts[0].weight.numel() >= _LEAST}


def changes_other_rows(optimizer: Any, parameter: Any) -> bool:
    """Returns whether an optimizer's step may change rows that the minibatch has not read: by momentum or decay."""
    return any(
        bool(group.get("momentum")) or bool(group.get("weight_decay"))
        for group in optimizer.param_groups
        if any(parameter is other for other in group["params"])
    )


class LookedUp(InPlace):
    """One parameter that is exchanged by the rows that its modules' forwards read."""

    def __init__(self, parameter: Any, modules: list[Any]) -> None:
        super().__init__([parameter], averaged=False)
        self._modules = modules
        self._rows: RowExchange | None = None
        self._whole = False

    def watch(self, rows: RowExchange | None) -> None:
        """From here on the modules' forwards pull the rows that they read; None: all rows are exchanged anyhow."""
        self._rows = rows
        if rows is not None:
            for module in self._modules:
                module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True)

    def trained_by(self, optimizer: Any) -> None:
        """Exchanges whole from here on if this optimizer changes rows that were not read."""
        self._whole = self._whole or changes_other_rows(optimizer, self.tensors[0])

    @property
    def whole(self) -> bool:
        """Whether rows that no forward has read may have changed."""
        gradient = self.tensors[0].grad  # a dense one: it was used in another way than by looking up
        return self._whole or self._elsewhere() or (gradient is not None and not gradient.is_sparse)

    def _elsewhere(self) -> bool:
        """Whether the tensor was pointed elsewhere since."""
        return bool(self.tensors[0].data_ptr() != self._addresses[0])

    def _before_forward(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert self._rows is not None
        if self._elsewhere():
            return  # pointed elsewhere: the next exchange takes it up whole
        ids = arguments[0] if arguments else named["input"]
        changes = module.max_norm is not None or torch.is_grad_enabled()  # a norm is kept without gradients, too
        flat = np.ascontiguousarray(ids.detach().reshape(-1).numpy(), np.int64)
        # where an id is out of range PyTorch says so itself
        if flat.size and flat.min() >= 0 and flat.max() < len(self._rows.local):
            self._rows.read(flat, changes)


class Hook:
    """A module's hook that calls a method. Where its object is gone, and in copies of the module, it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *arguments: Any) -> None:  # noqa: D102
        method = self._method()
        if method is not None:
            method(*arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing, and needs no package
