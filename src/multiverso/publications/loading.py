"""Copies of a version's tensors into a model's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import DtypeMismatchError
from multiverso.publications.attachment import is_read_only
from multiverso.publications.tensors import Layout, as_array, as_tensor, check_like, check_names, is_torch, named


def load_into(model: Any, layout: Layout, memory: npt.NDArray[np.uint8]) -> None:
    """Copies the tensors of a slot into a model, in place; nothing is changed where they do not fit."""
    targets = dict(named(model))
    check_names(targets, layout)
    by_name = layout.by_name
    for name, target in targets.items():
        if not (is_torch(target) or isinstance(target, np.ndarray) or hasattr(target, "assign")):
            raise TypeError(
                f"{name!r} is a {type(target).__name__}, which cannot be written to: take the arrays of the snapshot"
            )
        check_like(layout.tensors[by_name[name]], str(target.dtype).removeprefix("torch."), tuple(target.shape))
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise DtypeMismatchError(f"{name!r} is an array that cannot be written to")
        if is_torch(target) and is_read_only(target.data_ptr()):
            raise DtypeMismatchError(
                f"{name!r} is memory of a publication itself, by load_state_dict(snapshot.torch(), assign=True): do "
                "that with the next snapshot, too, or load into a model with memory of its own"
            )
    for name, target in targets.items():
        tensor = layout.tensors[by_name[name]]
        if is_torch(target):
            target.detach().copy_(as_tensor(memory, tensor))
        elif isinstance(target, np.ndarray):
            target[...] = as_array(memory, tensor)
        else:
            target.assign(as_array(memory, tensor))
