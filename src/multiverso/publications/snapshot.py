"""One version of a publication, as a reader has it: read in place, and kept for as long as anything refers to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import ClosedError, DtypeMismatchError, SnapshotError
from multiverso.in_process import InProcess
from multiverso.kernels import publications as kernels
from multiverso.layout import publications as at
from multiverso.publications.attachment import Attachment, Pin, is_read_only
from multiverso.publications.slots import Note
from multiverso.publications.tensors import (
    Layout,
    Tensor,
    as_array,
    as_jax,
    as_tensor,
    check_dense,
    check_like,
    check_names,
    is_torch,
    named,
)

Array = npt.NDArray[Any]


class Snapshot(Mapping[str, Array], InProcess):
    """A whole version: a mapping from names to arrays that are the shared memory itself, and cannot be written to.

    Nothing is copied. As long as the snapshot or any array of it is referred to, its publisher does not overwrite this
    version and uses other slots: release it before you take the next one, best by ``with``.

    Attributes:
        version: its number, higher than those before.
    """

    def __init__(self, attachment: Attachment, pin: Pin) -> None:
        self._attachment, self._pin = attachment, pin
        self.version = pin.word >> at.SLOT_BITS
        self._memory: npt.NDArray[np.uint8] | None = None

    @property
    def step(self) -> int | None:
        """The training's step, if the publisher has passed one."""
        return self.note.step

    @property
    def time(self) -> float:
        """When it was published, in seconds since 1970."""
        return self.note.time

    @property
    def text(self) -> str:
        """The text that the publisher has passed."""
        return self.note.text

    @property
    def checksums(self) -> dict[str, int]:
        """The checksum of each tensor, below 2**64, computed by the publisher."""
        sums = self.sums.view(np.uint64)
        return {name: int(sums[number]) for name, number in self.layout.by_name.items()}

    @property
    def ticket(self) -> str:
        """An argument for another process's `Subscription.redeem`, which then reads this very version.

        Keep this snapshot until that process has released the version.
        """
        self._bytes()
        return f"{self._attachment.memory_id:x}-{self._pin.word:x}"

    def verify(self) -> None:
        """Reads all tensors and compares their checksums.

        Raises:
            SnapshotError: one differs, which only broken memory can cause.
        """
        base, add_up = self._bytes().__array_interface__["data"][0], kernels.summed.compiled()
        for tensor, checksum in zip(self.layout.tensors, self.sums, strict=True):
            if add_up(base + tensor.offset, tensor.words, 0) != checksum:
                raise SnapshotError(f"version {self.version} of {self._attachment.name!r}: {tensor} is damaged")

    def torch(self) -> dict[str, Any]:
        """Returns PyTorch tensors that are the shared memory itself.

        ``model.load_state_dict(snapshot.torch(), assign=True)`` makes them a model's parameters without a copy. The
        memory is mapped read-only: a write to it ends the process (SIGSEGV).
        """
        memory = self._bytes()
        return {name: as_tensor(memory, self.layout.tensors[number]) for name, number in self.layout.by_name.items()}

    def jax(self) -> dict[str, Any]:
        """Returns JAX arrays that are the shared memory itself; those of bfloat16 and its like are copies."""
        memory = self._bytes()
        return {name: as_jax(memory, self.layout.tensors[number]) for name, number in self.layout.by_name.items()}

    def load_into(self, model: Any) -> None:
        """Copies the tensors into a model's own, in place.

        Args:
            model: a PyTorch module, a Keras model, or writable arrays and tensors, named as in the publication.

        Raises:
            ShapeMismatchError, DtypeMismatchError: other names, shapes or dtypes, or tensors that are a publication's
                memory themselves. Nothing was changed.
            TypeError: a tensor that has no memory of its own, or cannot be written to. Nothing was changed.
        """
        targets, memory = dict(named(model)), self._bytes()
        check_names(targets, self.layout)
        tensors = [self.layout.tensors[self._attachment.by_name[name]] for name in targets]
        for (name, target), tensor in zip(targets.items(), tensors, strict=True):
            if not (is_torch(target) or isinstance(target, np.ndarray) or hasattr(target, "assign")):
                kind = type(target).__name__
                raise TypeError(f"{name!r} is a {kind}, which cannot be written to: take the arrays of the snapshot")
            check_like(tensor, str(target.dtype).removeprefix("torch."), tuple(target.shape))
            if isinstance(target, np.ndarray) and not target.flags.writeable:
                raise DtypeMismatchError(f"{name!r} is an array that cannot be written to")
            if is_torch(target):
                check_dense(name, target)
                if is_read_only(target.data_ptr()):
                    raise DtypeMismatchError(
                        f"{name!r} is memory of a publication itself, by load_state_dict(snapshot.torch(), assign=True)"
                        ": do that with the next snapshot, too, or load into a model with memory of its own"
                    )
        for target, tensor in zip(targets.values(), tensors, strict=True):
            if is_torch(target):
                target.detach().copy_(as_tensor(memory, tensor))
            elif isinstance(target, np.ndarray):
                target[...] = as_array(memory, tensor)
            else:
                target.assign(as_array(memory, tensor))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a safetensors file, whole or not at all; version, step, time and text go into its metadata.

        A tensor with several names is written under the first one; the metadata say which are the same.

        Raises:
            SnapshotError: it cannot be written.
        """
        from multiverso.publications.files import save

        meta = {"version": str(self.version), "time": str(self.time), "text": self.text}
        save(path, self._bytes(), self.layout, meta if self.step is None else {**meta, "step": str(self.step)})

    def release(self) -> None:
        """Releases it. Arrays that were taken from it stay valid, and keep this version until they are gone, too."""
        self._memory = None
        self._pin = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Array:
        number = self._attachment.by_name.get(name)
        if number is None:
            raise KeyError(
                f"{self!r} has no {name!r}: it has {len(self)} others, the first of them {next(iter(self), None)!r}"
            )
        return as_array(self._bytes(), self.layout.tensors[number])

    def __iter__(self) -> Iterator[str]:
        return iter(self._attachment.by_name)

    def __len__(self) -> int:
        return len(self._attachment.by_name)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Snapshot of {self._attachment.name!r}, version {self.version}>"

    # -- for who hands it on -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where each tensor lies."""
        return self._attachment.layout

    @property
    def note(self) -> Note:
        """What is said of it."""
        meta = self._bytes()[: at.META.size].view(at.META.dtype)[0]
        text = bytes(meta["TEXT"])[: int(meta["TEXT_BYTES"])].decode()
        return Note(int(meta["STEP"]) if meta["HAS_STEP"] else None, float(meta["TIME"]), text)

    @property
    def sums(self) -> npt.NDArray[np.int64]:
        """The checksum of each tensor, in their order, as an int64."""
        return self._bytes()[at.META.size :][: 8 * len(self.layout.tensors)].view(np.int64)

    def bytes_of(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """Returns the bytes of a tensor."""
        return self._bytes()[tensor.offset : tensor.offset + tensor.nbytes]

    def _bytes(self) -> npt.NDArray[np.uint8]:
        """Returns the slot; the arrays made of it keep the pin."""
        if self._memory is None:
            if self._pin is None:
                raise ClosedError(f"{self!r} has been released: take the next one")
            self._memory = np.asarray(self._pin)
        return self._memory
