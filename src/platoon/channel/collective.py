"""What all workers compute together: in shared memory and across hosts, or over torch.distributed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from multiverso.errors import ShapeMismatchError
from multiverso.runtime import Session
from multiverso.runtime.collective import reducer
from platoon.channel.wire import Array
from platoon.util import OPERATIONS, PlatoonError


def all_reduce(session: Session, size: int, src: Any, op: str, dest: Any) -> Any:
    """See `Worker.all_reduce`; ``size``: of how many workers."""
    operation = OPERATIONS.get(op)
    if operation is None:
        raise PlatoonError(f"op is one of {', '.join(OPERATIONS)}; got {op!r}")

    def reduce(array: Array, out: Array | None = None) -> Array:
        return reducer.all_reduce(session, array, operation, out, size=size)

    if sys.modules.get("torch") is not None:  # it is None where the program keeps it from being imported
        import torch

        if isinstance(src, torch.Tensor):
            return _reduce_tensor(reduce, operation, src, dest)
    into = copy.deepcopy(src) if dest is None and _is_variable(src) else dest
    if _is_variable(into):
        into.set_value(reduce(_array(src), _array(into)), borrow=True)
        return into if dest is None else None
    result = reduce(_array(src), dest)
    return result if dest is None else None


def _reduce_tensor(reduce: Callable[..., Array], operation: str, src: Any, dest: Any) -> Any:
    import torch

    if dest is not None and (not isinstance(dest, torch.Tensor) or dest.shape != src.shape or dest.dtype != src.dtype):
        raise ShapeMismatchError(f"dest has to be a tensor like src: {tuple(src.shape)} {src.dtype}; got {dest!r:.80}")
    with torch.no_grad():
        result = _by_torch(src, operation) if _torch_is_ready() else _by_memory(reduce, src, dest)
        if dest is None:
            return result
        if result is not dest:
            dest.copy_(result)
    return None


def _by_memory(reduce: Callable[..., Array], src: Any, dest: Any) -> Any:
    """Reduces a tensor in shared memory; one on a GPU, or 16-bit, through a copy."""
    import torch

    source = src.detach().to("cpu")
    working = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    array = source.to(working).contiguous().numpy()
    if dest is not None and dest.device.type == "cpu" and dest.dtype == working and dest.is_contiguous():
        reduce(array, dest.detach().numpy())
        return dest
    return torch.from_numpy(reduce(array)).to(src.device, src.dtype)


def shared_array(session: Session, made: dict[int, Array], given: Any) -> Array:
    """See `Worker.shared`; ``made``: has those of all sizes so far."""
    like = _array(given)
    if like.dtype.hasobject or like.nbytes == 0:
        raise PlatoonError(f"an array of {like.shape} {like.dtype} cannot be shared: no plain memory of any size")
    if like.nbytes not in made:
        memory = session.shared_memory(f"platoon-shared-{like.nbytes}", like.nbytes, on_this_host=True)
        fortran = like.flags.f_contiguous and not like.flags.c_contiguous
        made[like.nbytes] = memory.view(like.dtype).reshape(like.shape, order="F" if fortran else "C")
    return made[like.nbytes]


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
