"""What all workers compute together: in shared memory and across hosts, or over torch.distributed."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np

from multiverso.errors import ShapeMismatchError
from multiverso.runtime import Session, all_reduce
from platoon.channel.wire import Array
from platoon.util import OPERATIONS, PlatoonError


class Collective:
    """This worker's part in the collectives.

    Args:
        session: the worker's session.
        info: what the controller answered when the worker came.

    Raises:
        PlatoonError: the number of workers is not fixed.
    """

    def __init__(self, session: Session, info: dict[str, Any]) -> None:
        size = info["global_size"]
        if size is None:
            raise PlatoonError(
                "all_reduce needs a fixed number of workers: give the controller its devices (-D cpu cpu)"
            )
        self._session = session
        self._size = int(size)
        self.shared_arrays: dict[int, Array] = {}

    def all_reduce(self, src: Any, op: str, dest: Any) -> Any:
        """See `Worker.all_reduce`."""
        try:
            operation = OPERATIONS[op]
        except KeyError:
            raise PlatoonError(f"op is one of {', '.join(OPERATIONS)}; got {op!r}") from None
        if sys.modules.get("torch") is not None:  # it is None where the program keeps it from being imported
            import torch

            if isinstance(src, torch.Tensor):
                return self._reduce_tensor(src, operation, dest)
        source = _array(src)
        into = copy.deepcopy(src) if dest is None and _is_variable(src) else dest
        if _is_variable(into):
            into.set_value(self._reduce(source, operation, _array(into)), borrow=True)
            return into if dest is None else None
        result = self._reduce(source, operation, dest)
        return result if dest is None else None

    def _reduce(self, array: Array, operation: str, out: Array | None = None) -> Array:
        return all_reduce(self._session, array, operation, out, size=self._size)

    def _reduce_tensor(self, src: Any, operation: str, dest: Any) -> Any:
        import torch

        if dest is not None and (
            not isinstance(dest, torch.Tensor) or dest.shape != src.shape or dest.dtype != src.dtype
        ):
            raise ShapeMismatchError(
                f"dest has to be a tensor like src: {tuple(src.shape)} {src.dtype}; got {dest!r:.80}"
            )
        with torch.no_grad():
            result = _by_torch(src, operation) if _torch_is_ready() else self._by_memory(src, operation, dest)
            if dest is None:
                return result
            if result is not dest:
                dest.copy_(result)
        return None

    def _by_memory(self, src: Any, operation: str, dest: Any) -> Any:
        """Reduces a tensor in shared memory; one on a GPU, or 16-bit, through a copy."""
        import torch

        source = src.detach().to("cpu")
        working = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
        array = source.to(working).contiguous().numpy()
        if dest is not None and dest.device.type == "cpu" and dest.dtype == working and dest.is_contiguous():
            self._reduce(array, operation, dest.detach().numpy())
            return dest
        return torch.from_numpy(self._reduce(array, operation)).to(src.device, src.dtype)

    def shared(self, array: Any) -> Array:
        """See `Worker.shared`."""
        like = _array(array)
        if like.dtype.hasobject or like.nbytes == 0:
            raise PlatoonError(f"an array of {like.shape} {like.dtype} cannot be shared: no plain memory of any size")
        if like.nbytes not in self.shared_arrays:
            name = f"platoon-shared-{like.nbytes}"
            memory = self._session.shared_memory(name, like.nbytes, on_this_host=True)
            flat = memory.view(like.dtype)
            fortran = like.flags.f_contiguous and not like.flags.c_contiguous
            self.shared_arrays[like.nbytes] = flat.reshape(like.shape, order="F" if fortran else "C")
        return self.shared_arrays[like.nbytes]


def _is_variable(given: Any) -> bool:
    """Whether it is a shared variable, of Theano or PyTensor or with the same methods."""
    return hasattr(given, "get_value") and hasattr(given, "set_value")


def _array(given: Any) -> Array:
    return np.asarray(given.get_value(borrow=True) if _is_variable(given) else given)


def _torch_is_ready() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _by_torch(src: Any, operation: str) -> Any:
    from torch import distributed

    name = "SUM" if operation == "average" else operation.upper()
    result = src.detach().clone()
    distributed.all_reduce(result, getattr(distributed.ReduceOp, name))
    if operation == "average":
        size = distributed.get_world_size()
        result = result / size if result.is_floating_point() else result.div(size, rounding_mode="floor")
    return result
