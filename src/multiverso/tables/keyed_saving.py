"""Saved keyed tables: a safetensors file with keys, rows, and a header that says what is in it."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.errors import SnapshotError
from multiverso.files import write_whole
from multiverso.tables.keyed_memory import KeyedSpec

_FORMAT = "multiverso keyed table 1"
Array = npt.NDArray[Any]
Keys = npt.NDArray[np.int64]


def save(
    path: str | os.PathLike[str], spec: KeyedSpec, keys: Keys, values: Array, states: list[Array]
) -> None:
    """Writes a table's keys (n,), values (n, dim) and updater state (n, dim) to one file, whole or not at all."""
    from safetensors.numpy import save as serialise

    header = {"format": _FORMAT, "table": json.dumps(spec.as_message())}
    arrays = {"keys": keys, "values": values}
    arrays |= {f"state.{s.name}": np.ascontiguousarray(a) for s, a in zip(spec.states, states, strict=True)}
    write_whole(path, serialise(arrays, metadata=header))


def load(path: str | os.PathLike[str], spec: KeyedSpec) -> tuple[Keys, Array, list[Array]]:
    """Returns keys, values and updater state that :func:`save` wrote, if they fit the table.

    Raises:
        SnapshotError: they do not, or this is no saved keyed table.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise SnapshotError(
                    f"{path} is a safetensors file, but not a saved keyed table of multiverso"
                )
            saved = json.loads(header["table"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SnapshotError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path} cannot be read as a saved keyed table: {error}") from error
    asked = json.loads(json.dumps(spec.as_message()))
    for what in ("dim", "dtype", "updater", "states"):
        if not isinstance(saved, dict) or saved.get(what) != asked[what]:
            raise SnapshotError(
                f"{path} holds a keyed table whose {what} is another than {asked[what]!r}; nothing was changed"
            )
    keys = arrays.get("keys")
    names = ["values", *(f"state.{state.name}" for state in spec.states)]
    shape = (0 if keys is None else keys.size, spec.dim)
    good = keys is not None and keys.dtype == np.int64 and keys.ndim == 1
    for name in names:
        array = arrays.get(name)
        good = good and array is not None and array.shape == shape and array.dtype == spec.dtype
    if not good or keys is None:
        raise SnapshotError(f"{path} is damaged: keys, values or state missing, or of another shape or dtype")
    return keys, arrays["values"], [arrays[name] for name in names[1:]]
