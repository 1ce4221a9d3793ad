"""All tables of a session, saved and loaded together.

A directory holds a file for each table and ``manifest.json``, which is replaced last: until then a reader finds
the files of the save before.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiverso.errors import SnapshotError
from multiverso.files import write_whole
from multiverso.tables import saving

if TYPE_CHECKING:
    from multiverso.runtime.session import Session
    from multiverso.tables.handler import TableHandler

_MANIFEST = "manifest.json"
_FORMAT = "multiverso tables 1"
_OURS = re.compile(
    r"table-\d+-[0-9a-f]{12}\.safetensors|\.(table-\d+-[0-9a-f]{12}\.safetensors|manifest\.json)\.[0-9a-f]{16}\.tmp"
)


def _key(table: TableHandler) -> str:
    return f"name:{table.name}" if table.name is not None else f"order:{table.number}"


def save_all(session: Session, directory: str | os.PathLike[str]) -> None:
    """Writes every table of the session."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    if (place / _MANIFEST).exists():
        _manifest(place)  # somebody else's is not replaced
    stamp = os.urandom(6).hex()
    files: dict[str, str] = {}
    try:
        for table in session.handlers():
            files[_key(table)] = f"table-{table.number}-{stamp}.safetensors"
            table.save(place / files[_key(table)])
        manifest = json.dumps({"format": _FORMAT, "tables": files}, indent=1)
        write_whole(place / _MANIFEST, manifest.encode())
    except BaseException:
        for name in files.values():
            (place / name).unlink(missing_ok=True)
        raise
    # the save before, and what a crash in the middle of one has left
    for path in place.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in files.values():
            path.unlink(missing_ok=True)


def load_all(session: Session, directory: str | os.PathLike[str]) -> None:
    """Reads every table, and writes to the shared memory only when all of them fit."""
    place = Path(directory)
    files: dict[str, str] = _manifest(place)["tables"]
    tables = {_key(table): table for table in session.handlers()}
    for table in session.handlers():
        for user in table.users:
            raise SnapshotError(
                f"{table!r} is moved by the rule {user.rule}, whose workers have parameters of their own that a load "
                "of the tables leaves as they are: what was loaded would be lost in the next exchange. Nothing was "
                "changed. Save with manager.save(directory) and load with manager.load(directory), in every worker"
            )
    if set(files) != set(tables):
        raise SnapshotError(
            f"{place} holds the tables {sorted(files)}, this session has {sorted(tables)}; create the same "
            "tables in the same order, or by the same names, before loading"
        )
    read = {key: saving.load(place / files[key], table.spec) for key, table in tables.items()}
    for key, table in tables.items():
        table.replace(*read[key])


def _manifest(place: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((place / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{place} holds no saved tables: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise SnapshotError(f"{place / _MANIFEST} is not the manifest of saved tables")
    return manifest
