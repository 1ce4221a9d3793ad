"""An optimizer that shares what it has learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from multiverso.in_process import InProcess
from multiverso.torch.param_manager import ParamManager


def _refuse_strangers(optimizer: Any, module: Any) -> None:
    """Raises ValueError when an optimizer trains none of a module's parameters."""
    if not isinstance(module, torch.nn.Module):
        return  # ParamManager says what it expects
    shared = {id(parameter) for parameter in module.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in shared for parameter in trained):
        raise ValueError(
            f"the optimizer trains {len(trained)} parameters and none of them is one of the {len(shared)} of this "
            f"{type(module).__name__}: what it learns would never be shared. Make it of module.parameters()"
        )
    if strangers := sum(id(parameter) not in shared for parameter in trained):
        warnings.warn(
            f"the optimizer trains {strangers} parameters that are not of this {type(module).__name__}: they are not "
            "shared. Give SharedOptimizer the module that has them all",
            stacklevel=3,
        )


class SharedOptimizer(InProcess, torch.optim.Optimizer):  # type: ignore[misc]  # torch is seen as untyped
    """Wraps an optimizer: after each of its steps, the parameters are exchanged when that is due.

    It is an optimizer like any other for schedulers, gradient scalers and checkpoints: all but ``step`` is the
    wrapped one's, which is not changed.

    Args:
        optimizer: the optimizer to wrap.
        module: the module whose parameters it trains, or a `ParamManager` of it.
        options: what `ParamManager` takes: ``every=``, ``rule=``, ``overlap=``, ...

    Raises:
        TypeError: the arguments are not an optimizer and a module, or they are swapped.
        ValueError: the optimizer trains no parameter of the module.

    Attributes:
        optimizer: the wrapped one.
        manager: the `ParamManager`.

    Examples:
        >>> optimizer = SharedOptimizer(torch.optim.Adam(model.parameters()), model)  # doctest: +SKIP
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: torch.nn.Module | ParamManager, **options: Any
    ) -> None:
        if isinstance(optimizer, torch.nn.Module | ParamManager) or not hasattr(optimizer, "param_groups"):
            raise TypeError(
                "SharedOptimizer(optimizer, module): the optimizer comes first, then the module whose parameters it "
                f"trains; got {type(optimizer).__name__} and {type(module).__name__}"
            )
        _refuse_strangers(optimizer, module.module if isinstance(module, ParamManager) else module)
        # Optimizer.__init__ is not called: groups and state are the wrapped optimizer's own.
        self.optimizer = optimizer
        self.manager = module if isinstance(module, ParamManager) else ParamManager(module, **options)
        if isinstance(module, ParamManager) and options:
            raise TypeError(f"{', '.join(options)}: give these to the ParamManager itself")
        self.manager._trained_by(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does the wrapped optimizer's step, and exchanges when that is due; returns what it returns."""
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.manager.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, so that it loads into a plain one."""
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # before __init__
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"SharedOptimizer({self.optimizer!r})"
