"""What of a module is saved beside its shared parameters, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multiverso.checkpoints import Parts
from multiverso.errors import SnapshotError
from multiverso.torch.groups import InPlace, Staged


class ModuleState:
    """A module's state, in its groups of shared tensors and outside them.

    Integers and booleans (counters, masks) are this worker's own; frozen parameters and other floating buffers are
    most often alike in all workers, and are saved once.
    """

    def __init__(self, module: Any, groups: Sequence[InPlace | Staged]) -> None:
        self._module = module
        self._groups = groups
        self._shared = {id(tensor) for group in groups for tensor in group.tensors}

    def read(self) -> Parts:
        """Returns the module's state, without a copy where that is possible."""
        rest = self._rest()
        common = {name: value for name, value in rest.items() if _is_floating(value)}
        own = {name: value for name, value in rest.items() if name not in common}
        return Parts({"groups": [group.state() for group in self._groups], "rest": own}, common or None)

    def check(self, parts: Parts) -> None:
        """Raises SnapshotError unless `write` can take what `read` has returned."""
        saved = {**parts.own["rest"], **(parts.common or {})}
        expected = {name: _kind(value) for name, value in self._rest().items()}
        got = {name: _kind(value) for name, value in saved.items()}
        if got != expected or len(parts.own["groups"]) != len(self._groups):
            odd = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            raise SnapshotError(
                f"the module is not the one that was saved; {', '.join(odd) or 'its devices or dtypes'} differ. "
                "Nothing was changed"
            )

    def write(self, parts: Parts) -> None:
        """Gives the module its state back; the flat memory has its values already."""
        for group, state in zip(self._groups, parts.own["groups"], strict=True):
            group.restore(None if parts.newcomer else state)
        self._module.load_state_dict({**parts.own["rest"], **(parts.common or {})}, strict=False)

    def _rest(self) -> dict[str, Any]:
        state = self._module.state_dict(keep_vars=True)
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
            if id(value) not in self._shared
        }


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _kind(value: Any) -> Any:
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)
