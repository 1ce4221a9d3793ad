"""Sorts a module's tensors: shared, averaged, only alike at the beginning, or its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from operator import is_
from typing import Any

from multiverso.errors import DtypeMismatchError
from multiverso.torch.groups import TABLE_DTYPE


class Structure:
    """A module's tensors, sorted once; `check` finds out later whether they are still the same ones.

    Attributes:
        trained: parameters that require gradients; tied ones once.
        statistics: floating buffers that are averaged.
        twins: ids of trained parameters on whose memory others lie, so that they have to stay there.
        constant: frozen parameters and the other floating buffers: equal at the beginning, never exchanged.

    Raises:
        DtypeMismatchError: a trained parameter or a statistic of a dtype that has no table.
        ValueError: a parameter that has no memory of its own yet, or shares a part of another's.
        TypeError: a parameter that is not a plain tensor of this process.
    """

    def __init__(self, module: Any, statistics: Iterable[str] | None) -> None:
        parameters = dict(module.named_parameters())
        buffers = {name: b for name, b in module.named_buffers() if b is not None and b.is_floating_point()}
        averaged = _statistics_of(buffers, statistics)
        self.trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self.statistics = {name: b for name, b in buffers.items() if name in averaged}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.constant = self._frozen | {name: b for name, b in buffers.items() if name not in averaged}
        for name, tensor in chain(parameters.items(), buffers.items()):
            _refuse_unusable(name, tensor)
        for name, tensor in chain(self.trained.items(), self.statistics.items()):
            if tensor.dtype not in TABLE_DTYPE:
                raise DtypeMismatchError(
                    f"{name} is {tensor.dtype}; shared parameters are float16, bfloat16, float32 or float64. "
                    "Freeze it with requires_grad_(False) to keep it out"
                )
        every = self.trained
        self.trained = _once_each(every)
        twins = {_where(tensor) for name, tensor in every.items() if name not in self.trained}
        self.twins = {id(tensor) for tensor in self.trained.values() if _where(tensor) in twins}
        _refuse_overlap(self.trained | self.statistics)
        self._module = module
        tables = [table for m in module.modules() for table in (m._parameters, m._modules)]
        places = [table for table in tables if isinstance(table, dict)]  # those of TorchScript are fixed
        self._empty = [table for table in places if not table]
        self._places = [table for table in places if table]
        self._members = list(self._found())

    def _found(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._places))

    def check(self) -> None:
        """Raises RuntimeError when parameters were added, replaced or unfrozen since."""
        # before each exchange, so it is quick
        number = sum(map(len, self._places))
        if any(self._empty) or number != len(self._members) or not all(map(is_, self._found(), self._members)):
            raise RuntimeError(f"{self._difference()} Make a new ParamManager, in every worker, after such a change")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when its ParamManager was made and is trained now, so it would not be "
                    "shared. Make a new ParamManager, in every worker, after unfreezing"
                )

    def _difference(self) -> str:
        before = {id(member) for member in self._members}
        after = {name for name, p in self._module.named_parameters() if id(p) not in before}
        what = f": {', '.join(sorted(after))} came later." if after else "."
        return f"the module's parameters have changed since its ParamManager was made{what}"


def _statistics_of(buffers: dict[str, Any], wish: Iterable[str] | None) -> set[str]:
    if wish is None:
        return {name for name in buffers if name.rpartition(".")[2].startswith("running_")}
    names = {wish} if isinstance(wish, str) else set(wish)
    if unknown := sorted(names - buffers.keys()):
        raise ValueError(f"statistics= names {unknown}, and the module has the floating buffers {sorted(buffers)}")
    return names


def _refuse_unusable(name: str, tensor: Any) -> None:
    from torch.nn.parameter import is_lazy

    if is_lazy(tensor) or tensor.is_meta:
        raise ValueError(f"{name} has no memory yet: run a forward pass, or move it from the meta device, first")
    kind = type(tensor.data)
    if kind.__name__ != "Tensor" or tensor.layout.__repr__() != "torch.strided":
        raise TypeError(
            f"{name} is a {kind.__name__} ({tensor.layout}); a ParamManager shares plain dense tensors. Parameters "
            "that are already sharded (FSDP, DTensor) or sparse cannot be shared"
        )


def _where(tensor: Any) -> tuple[Any, int]:
    return tensor.device, tensor.data_ptr()


def _once_each(tensors: dict[str, Any]) -> dict[str, Any]:
    """Leaves out parameters whose memory is exactly another one's: tied by ``a.data = b.data``."""
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            seen.setdefault((*_where(tensor), tensor.shape, tensor.stride(), tensor.dtype), name)
    return {name: tensors[name] for name in seen.values()}


def _refuse_overlap(tensors: dict[str, Any]) -> None:
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            device, start = _where(tensor)
            spans.append((str(device), start, start + reach * tensor.element_size(), name))
    spans.sort()
    for (device, _, end, name), (device_after, start, _, name_after) in pairwise(spans):
        if device == device_after and start < end:
            raise ValueError(
                f"{name} and {name_after} share a part of their memory; what one worker changes in it would "
                "count twice. Give each a memory of its own, or tie them whole"
            )
