"""Keyed tables as files that others read."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.files.opening import write_whole, writing_a_save

Batches = Iterable[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]
Name = Callable[[int], str]


def export(path: str | os.PathLike[str], batches: Batches, dim: int, name: Name | None) -> int:
    """Writes keys and rows in the format that the path's suffix names, whole or not at all; returns how many.

    Raises:
        ValueError: another suffix.
        SnapshotError: it cannot be written.
        ModuleNotFoundError: Parquet without pyarrow.
    """
    writer = _WRITERS.get(Path(path).suffix)
    if writer is None:
        raise ValueError(
            f"the suffix of {path} has to name the format: {', '.join(_WRITERS)}; got {Path(path).suffix!r}"
        )
    found = list(batches)
    keys = np.concatenate([k for k, _ in found]) if found else np.empty(0, np.int64)
    rows = np.concatenate([r for _, r in found]) if found else np.empty((0, dim))
    order = np.argsort(keys, kind="stable")
    with writing_a_save(path):
        write_whole(path, writer(keys[order], rows[order], name))
    return int(keys.size)


def _numpy(keys: npt.NDArray[np.int64], rows: npt.NDArray[Any], name: Name | None) -> Iterator[bytes]:
    import io

    file = io.BytesIO()
    named = {} if name is None else {"names": np.array([name(int(key)) for key in keys])}
    np.savez(file, keys=keys, values=rows, **named)  # type: ignore[arg-type]
    yield file.getvalue()


def _parquet(keys: npt.NDArray[np.int64], rows: npt.NDArray[Any], name: Name | None) -> Iterator[bytes]:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "export to Parquet needs pyarrow: pip install pyarrow, or export to .npz or .txt", name=error.name
        ) from error
    numbers = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
    columns = {"key": keys, "values": pyarrow.FixedSizeListArray.from_arrays(numbers, rows.shape[1])}
    if name is not None:
        columns["name"] = [name(int(key)) for key in keys]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    yield sink.getvalue().to_pybytes()


def _word2vec(keys: npt.NDArray[np.int64], rows: npt.NDArray[Any], name: Name | None) -> Iterator[bytes]:
    """The text format of the word2vec program: a line with numbers of rows and columns, then a name and a row each."""
    yield f"{keys.size} {rows.shape[1]}\n".encode()
    for key, row in zip(keys.tolist(), rows, strict=True):
        called = str(key) if name is None else name(key)
        if not called or any(c.isspace() for c in called):
            raise ValueError(f"a name in word2vec's text has no spaces and is not empty; got {called!r} for {key}")
        yield f"{called} {' '.join(map(str, row.tolist()))}\n".encode()


_WRITERS: dict[str, Callable[..., Iterator[bytes]]] = {
    ".npz": _numpy,
    ".parquet": _parquet,
    ".txt": _word2vec,
    ".vec": _word2vec,
}
