"""Saved tables: a safetensors file with a header that says what is in it."""

from __future__ import annotations

import json
import os

import numpy as np
from msgspec import Struct

from multiverso.errors import SnapshotError
from multiverso.files import opening as files
from multiverso.files.parsing import tensors
from multiverso.spec.states import states_of
from multiverso.spec.table import TableSpec
from multiverso.tables.convert import Array

_FORMAT = "multiverso table 1"
PathLike = str | os.PathLike[str]


class Copied(Struct, frozen=True):
    """A table's numbers at one moment: values (flat, in its dtype) and what its updater keeps."""

    spec: TableSpec
    version: int
    values: Array
    states: list[Array]

    def save(self, path: PathLike) -> None:
        """Writes them to one file, whole or not at all.

        A count of steps comes behind the arrays, as one of a single int64.
        """
        from safetensors.numpy import save as serialise

        spec = self.spec
        header = {"format": _FORMAT, "table": json.dumps(spec.as_message()), "version": str(self.version)}
        arrays = {"values": self.values.reshape(spec.shape)}
        arrays |= {
            f"state.{state.name}": np.asarray(array).reshape(spec.shape if state.per == "element" else (1,))
            for state, array in zip(states_of(spec.states), self.states, strict=True)
        }
        with files.writing_a_save(path):
            files.write_whole(path, serialise(arrays, metadata=header))


def load(path: PathLike, spec: TableSpec) -> tuple[Array, list[Array]]:
    """Returns the values and updater arrays that `Copied.save` wrote, flat, if they fit the table.

    Raises:
        SnapshotError: they do not, or this is not a saved table.
    """
    with tensors(path, "a saved table") as (header, read):
        if header.get("format") != _FORMAT:
            raise SnapshotError(f"{path} is a safetensors file, but not a saved table of multiverso")
        saved = TableSpec.from_message(json.loads(header["table"]))
        _check_fits(path, saved, spec)
        arrays = {name: array.reshape(-1) for name, array in read().items()}
    expected = {"values": (spec.elements, spec.dtype)}
    for state in states_of(saved.states):
        of_elements = state.per == "element"
        expected[f"state.{state.name}"] = (spec.elements, spec.dtype) if of_elements else (1, "int64")
    bad = [
        name
        for name, (size, dtype) in expected.items()
        if name not in arrays or arrays[name].size != size or arrays[name].dtype != dtype
    ]
    if bad:
        raise SnapshotError(f"{path} is damaged: {', '.join(bad)} missing, or of another size or dtype")
    return arrays["values"], [arrays[name] for name in expected if name != "values"]


def _check_fits(path: PathLike, saved: TableSpec, spec: TableSpec) -> None:
    for what in ("kind", "shape", "dtype", "updater", "step_count", "state_names"):
        if getattr(saved, what) != getattr(spec, what):
            raise SnapshotError(
                f"{path} holds a table of {what} {getattr(saved, what)!r}, but it is loaded into one of "
                f"{what} {getattr(spec, what)!r}; nothing was changed"
            )
