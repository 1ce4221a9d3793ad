"""Saved keyed tables: a safetensors file with keys, rows, and a header that says what is in it."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from multiverso.errors import SnapshotError
from multiverso.files.opening import write_whole, writing_a_save
from multiverso.files.parsing import Count, tensors
from multiverso.spec.states import State
from multiverso.tables.convert import Array
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.keyed.spec import KeyedSpec

_FORMAT = "multiverso keyed table 1"


class Content(Struct, frozen=True):
    """A table's contents, or those that have changed.

    Attributes:
        keys: (n,), sorted.
        rows: (n, bytes): values and updater state.
        uses: (n,): what the index says of when and how often each was used; None: nothing.
        removed: keys that are to go.
        ticks: of the table.
    """

    keys: Keys
    rows: npt.NDArray[np.uint8]
    uses: Keys | None = None
    removed: Keys = field(default_factory=lambda: np.empty(0, np.int64))
    ticks: int = 0


class Copied(Struct, frozen=True):
    """A table as it was at a moment."""

    spec: KeyedSpec
    content: Content

    def save(self, path: str | os.PathLike[str], more: dict[str, str] | None = None) -> bytes:
        """Writes keys (n,), values (n, dim) and updater state to one file, whole or not at all; returns its bytes."""
        from safetensors.numpy import save as serialise

        content = self.content
        header = {"format": _FORMAT, "table": json.dumps(self.spec.as_message()), "ticks": str(content.ticks)}
        header |= more or {}
        arrays = {"keys": content.keys, **_columns(self.spec, content.rows)}
        if content.uses is not None:
            arrays["uses"] = (content.uses >> 32).astype(np.int32)
        if content.removed.size:
            arrays["removed"] = content.removed
        whole: bytes = serialise(arrays, metadata=header)
        with writing_a_save(path):
            write_whole(path, whole)
        return whole


def _widths(spec: KeyedSpec) -> dict[str, int]:
    """Returns the parts of a row by their names in a file, and how many numbers each has."""
    return dict(zip(["values", *(f"state.{state.name}" for state in spec.states)], spec.widths(), strict=True))


def _columns(spec: KeyedSpec, rows: npt.NDArray[np.uint8]) -> dict[str, Array]:
    """Takes rows apart: values and each of the updater's states."""
    numbers, end, found = rows.view(spec.dtype), 0, {}
    for name, width in _widths(spec).items():
        found[name] = np.ascontiguousarray(numbers[:, end : end + width])
        end += width
    return found


def load(path: str | os.PathLike[str], spec: KeyedSpec) -> Content:
    """Returns what `Copied.save` wrote, if it fits the table.

    Raises:
        SnapshotError: it does not, or this is not a saved keyed table.
    """
    with tensors(path, "a saved keyed table") as (header, read):
        if header.get("format") != _FORMAT:
            raise SnapshotError(f"{path} is a safetensors file, but not a saved keyed table of multiverso")
        saved = json.loads(header["table"])
        ticks = msgspec.convert(header.get("ticks", "0"), Count, strict=False)
        saved["states"] = [asdict(State(**state)) for state in saved["states"]]
        arrays = read()
    asked = json.loads(json.dumps(spec.as_message()))
    for what in ("dim", "dtype", "updater", "states"):
        if not isinstance(saved, dict) or saved.get(what) != asked[what]:
            raise SnapshotError(f"{path} holds a keyed table whose {what} is not {asked[what]!r}; nothing was changed")
    begins = [{what: of.get(what) for what in ("kind", "scale", "seed")} for of in (saved, asked)]
    if begins[0] != begins[1]:
        warnings.warn(
            f"keys without a row do not begin as they did in the table that is loaded: {begins[0]} there, {begins[1]} "
            "here (initial=, seed=)",
            stacklevel=2,
        )
    return replace(_content(path, spec, arrays), ticks=ticks)


def _content(path: str | os.PathLike[str], spec: KeyedSpec, arrays: dict[str, Array]) -> Content:
    none = np.empty(0, np.int64)
    keys, uses, removed = arrays.get("keys", none), arrays.get("uses"), arrays.get("removed", none)
    good = "keys" in arrays and all(a.dtype == np.int64 and a.ndim == 1 for a in (keys, removed))
    good = good and (uses is None or (uses.dtype == np.int32 and uses.shape == keys.shape))
    parts = []
    for name, width in _widths(spec).items():
        array = arrays.get(name)
        if array is None or array.shape != (keys.size, width) or array.dtype != spec.dtype:
            good = False
        else:
            parts.append(array)
    if not good:
        raise SnapshotError(f"{path} is damaged: keys, values or state missing, or of another shape or dtype")
    rows = np.concatenate(parts, axis=1).view(np.uint8) if keys.size else np.empty((0, 0), np.uint8)
    return Content(keys, rows, None if uses is None else uses.astype(np.int64) << 32, removed)
