"""Saved tables and manifests with random damage: a clear error that changes nothing, or what was saved.

    python tests/fuzz/fuzz_files.py --seconds 60 --seed 7

A failure is printed with the seed and the number of the try, which lead to it again.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.errors import SnapshotError
from multiverso.runtime import Node, Session
from multiverso.tables.save_all import load_all, save_all

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**63, 2**70, 1e308, "", "x", "\0", "float32", "f8", "matrix", "nesterov", [], [[]], [1], {},
    {"": {}}, [2**63, 2**63], [0, 2**64 - 1], "values", "../manifest.json", "a" * 5000,
)  # fmt: skip
_RAW = (b"", b"[" * 50_000, b"{" * 50_000, b'"' + b"\\u0000" * 1000, b"NaN", b"-Infinity", b"1" * 5000, b"\xff" * 9)


def fuzz(seconds: float, seed: int) -> int:
    """Loads damaged files for a time; returns how many.

    Raises:
        AssertionError: a load ended otherwise than in success or SnapshotError, or a refused one changed a table.
    """
    rng = random.Random(seed)
    tries, until = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as place, Node(1) as node, Session(node.address) as session:
        table = mv.MatrixTableHandler(2, 3, range(6), updater="nesterov", name="weights", session=session)
        directory = Path(place)
        save_all(session, directory)
        files = {path: path.read_bytes() for path in directory.iterdir()}
        while time.monotonic() < until:
            path = rng.choice(sorted(files))
            content = damaged(rng, files[path])
            try:
                check(session, table, directory, path, content)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, try {tries}: {error}: {content[:300]!r}") from error
            path.write_bytes(files[path])
            tries += 1
    return tries


def check(session: Session, table: Any, directory: Path, path: Path, content: bytes) -> None:
    """Puts ``content`` in a file's place and loads; a refusal leaves the table as it was."""
    path.write_bytes(content)
    before = np.full((2, 3), 9.0, "f4")
    table._replace(before.reshape(-1), [np.zeros(6, "f4")])
    refused = None
    try:
        load_all(session, directory)
    except SnapshotError as error:
        refused = str(error)
    except BaseException as error:
        raise AssertionError(repr(error)) from error
    if refused is not None:
        assert str(directory) in refused, f"the error does not say where: {refused}"
        assert (table.get() == before).all(), "refused, but the table was changed"


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Returns a file with some damage: to its bytes, or to the JSON in it."""
    kind = rng.randrange(4)
    if kind == 0:
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 9)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    if kind == 1:
        start = rng.randrange(len(content))
        return content[:start] + rng.choice(_RAW) + content[start + rng.randrange(40) :]
    if content[:1] == b"{":
        return _text(rng, json.loads(content))
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header["__metadata__"]
    if rng.random() < 0.5:
        metadata["table"] = _text(rng, json.loads(metadata["table"])).decode()
    else:
        _change(rng, header)
    text = json.dumps(header).encode()
    size = rng.choice((len(text),) * 8 + (0, 2**63, 2**64 - 1, len(text) + 1))
    return struct.pack("<Q", size) + text + rest


def _text(rng: random.Random, value: Any) -> bytes:
    _change(rng, value)
    return json.dumps(value).encode()


def _change(rng: random.Random, value: Any) -> None:
    """Changes, removes or adds something somewhere in a JSON object."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(value[key], (dict, list)) and value[key] and rng.random() < 0.7:
            value = value[key]
            continue
        if isinstance(value, dict) and rng.random() < 0.2:
            del value[key]
        elif isinstance(value, dict) and rng.random() < 0.2:
            value[rng.choice(("", "name:weights", "format", "rows", "x"))] = deepcopy(rng.choice(_VALUES))
        else:
            value[key] = deepcopy(rng.choice(_VALUES))
        if rng.random() < 0.6:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"saved files: {fuzz(given.seconds, given.seed)} tries, none of which broke anything (seed {given.seed})")
