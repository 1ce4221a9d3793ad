"""Tensors of one device and dtype, as one flat piece of host memory that is exchanged.

Two ways there. In place: a CPU tensor becomes a view of the flat memory, so that an exchange needs no copy.
Staged: everything else (CUDA, 16 bits, tensors that other things look at) is copied there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Array = Any

TABLE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


_address = torch.Tensor.data_ptr


def flatten(tensors: Sequence[Any]) -> Any:
    """Returns the values of all tensors, one after another, in a new one-dimensional tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_like(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """Returns parts of ``flat``, views of it, each of the shape of a tensor."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def can_move(tensor: Any) -> bool:
    """Returns whether nothing else looks at a tensor's memory, so that it may become a view of other memory."""
    covers = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return bool(
        tensor.device.type == "cpu"
        and TABLE_DTYPE[tensor.dtype] == tensor.dtype
        and tensor.is_contiguous()
        and covers
        and not tensor.is_shared()
    )


class InPlace:
    """CPU tensors that are views of the flat memory from here on."""

    def __init__(self, tensors: list[Any], averaged: bool) -> None:
        self.tensors = tensors
        self.averaged = averaged

    def initial(self) -> Array:
        """Returns the tensors' values, flat: a copy."""
        return flatten(self.tensors).numpy()

    def adopt(self, array: Array) -> None:
        """Makes the tensors views of the array, whose values they take."""
        # Two tensors on the same memory: share_memory_() would move the storage that the parameters use.
        self._staging = split_like(torch.from_numpy(array), self.tensors)
        for tensor, view in zip(self.tensors, split_like(torch.from_numpy(array), self.tensors), strict=True):
            tensor.data = view
        self._addresses = [view.data_ptr() for view in self._staging]

    def state(self) -> dict[str, Any]:
        """Brings values into the flat memory, and returns what else there is to save: nothing."""
        self.collect()
        return {}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Takes the values that are in the flat memory now."""
        for tensor, view in zip(self.tensors, self._staging, strict=True):
            if tensor.data_ptr() != view.data_ptr():
                tensor.copy_(view)

    def collect(self) -> Callable[[], None]:
        """Brings values into the flat memory; returns what waits until they are there."""
        self._moved: list[tuple[Any, Any]] = []  # tensors that were pointed elsewhere since
        if list(map(_address, self.tensors)) != self._addresses:
            rows = zip(self.tensors, self._staging, self._addresses, strict=True)
            self._moved = [(tensor, view) for tensor, view, address in rows if tensor.data_ptr() != address]
        for tensor, view in self._moved:
            _unchanged_kind(tensor, view.device, view.dtype)
            view.copy_(tensor.detach())
        return _nothing

    def publish(self) -> None:
        """Gives the tensors the exchanged values; those in place have them."""
        for tensor, view in self._moved:
            tensor.copy_(view)


class Staged:
    """Tensors that are copied to the flat memory and back.

    ``master`` holds this worker's values in the table's dtype: a 16-bit tensor is its rounding, and only what
    training changed beyond that rounding counts.
    """

    def __init__(self, tensors: list[Any], averaged: bool) -> None:
        self.tensors = tensors
        self.averaged = averaged
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype
        self._cuda = self.device.type == "cuda"
        self._wide = TABLE_DTYPE[self.dtype]
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None

    def initial(self) -> Array:
        """Returns the tensors' values, flat, in the table's dtype: a copy."""
        return flatten(self.tensors).to(self._wide).cpu().numpy()

    def adopt(self, array: Array) -> None:
        """Takes the array as the host's side of the copies, and the values in it."""
        self._host = torch.from_numpy(array)
        self._master = self._host.to(self.device, copy=True)
        self._views = split_like(self._master, self.tensors)
        self._sent: Any = None
        self._incoming: Any = None
        torch._foreach_copy_(self.tensors, self._views)

    def absorb(self) -> None:
        """Takes in what training has changed in the tensors."""
        for tensor in self.tensors:
            _unchanged_kind(tensor, self.device, self.dtype)
        flat = flatten(self.tensors)
        if self.dtype == self._wide:
            self._master.copy_(flat)
        else:
            self._master += flat.to(self._wide) - self._master.to(self.dtype).to(self._wide)

    def collect(self) -> Callable[[], None]:
        """Brings values into the flat memory; returns what waits until they are there."""
        self.absorb()
        return self._copy(self._master, self._host)

    def publish(self) -> None:
        """Gives the tensors the exchanged values."""
        self._copy(self._host, self._master)
        self._join()
        torch._foreach_copy_(self.tensors, self._views)

    def state(self) -> dict[str, Any]:
        """Brings this worker's values into the flat memory, and returns what else there is to save.

        An exchange during training has ended, but need not have been received.
        """
        self._join()
        flat = flatten(self.tensors)
        self._host.copy_(flat if self.dtype == self._wide else self._master)
        return {
            "rounded": None if self.dtype == self._wide else flat,
            "sent": self._sent,
            "incoming": None if self._sent is None else self._incoming,
        }

    def restore(self, state: dict[str, Any] | None) -> None:
        """Takes the values that are in the flat memory now, and the rest, if any, from what `state` returned."""
        state = state or {"rounded": None, "sent": None, "incoming": None}
        self._join()
        self._master.copy_(self._host)
        rounded = state["rounded"]
        values = self._views if rounded is None else split_like(rounded.to(self.device), self.tensors)
        torch._foreach_copy_(self.tensors, values)
        self._sent, self._incoming = (_moved_to(self.device, state[key]) for key in ("sent", "incoming"))

    # -- overlapped with training ------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether values have been sent whose exchange has not been received."""
        return self._sent is not None

    def send(self) -> Callable[[], None]:
        """Begins to copy this worker's values to the host; returns what waits for that (in any thread)."""
        if self._incoming is None:
            self._incoming = torch.empty_like(self._master)
        self._sent = self._master.clone()
        return self._copy(self._sent, self._host)

    def fetch(self) -> None:
        """Begins to copy the exchanged values from the host; may be called in any thread."""
        self._copy(self._host, self._incoming, after_current=False)

    def receive(self) -> None:
        """Adds what the exchange has brought to the values, which have been trained on meanwhile."""
        self._join()
        self.absorb()
        self._master += self._incoming - self._sent
        torch._foreach_copy_(self.tensors, self._views)
        self._sent = None

    def _copy(self, source: Any, target: Any, after_current: bool = True) -> Callable[[], None]:
        if self._stream is None:
            target.copy_(source)
            return _nothing
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            if source.is_cuda:
                source.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def _unchanged_kind(tensor: Any, device: Any, dtype: Any) -> None:
    if tensor.device != device or tensor.dtype != dtype:
        raise RuntimeError(
            f"a parameter or buffer of shape {tuple(tensor.shape)} is {tensor.dtype} on {tensor.device} now and "
            f"was {dtype} on {device} when its ParamManager was made; move or convert the module first"
        )


def _moved_to(device: Any, tensor: Any) -> Any:
    return None if tensor is None else tensor.to(device)


def _nothing() -> None:
    return None
