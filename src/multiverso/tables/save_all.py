"""All tables of a session: those that are open, by their kinds, and how they are saved and loaded together.

A directory holds a file for each table and ``manifest.json``, which is replaced last: until then a reader finds
the files of the save before. One worker at a time writes there; the others wait for it, and have nothing left to do
when what it wrote is as new as their own call.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from multiverso.errors import SnapshotError, WaitTimeoutError
from multiverso.files import opening as files
from multiverso.files.parsing import Count, read_record
from multiverso.runtime.session.replacing import leaves_values
from multiverso.runtime.session.session import Session
from multiverso.tables.handler import TableHandler
from multiverso.tables.keyed.table import KeyedTable

if TYPE_CHECKING:
    from multiverso.runtime.session.session import Session
    from multiverso.tables.handler import TableHandler
    from multiverso.tables.keyed.table import KeyedTable


def handlers(session: Session) -> list[TableHandler]:
    """Returns the handlers of a session's arrays and matrices, in the order in which the tables were made."""
    return [handle for handle in session.handles if isinstance(handle, TableHandler)]


def keyed_tables(session: Session) -> dict[str, KeyedTable]:
    """Returns the first open object of each keyed table, by what the job calls the table."""
    found: dict[str, KeyedTable] = {}
    for handle in session.handles:
        if isinstance(handle, KeyedTable):
            found.setdefault(handle._called, handle)
    return found


_MANIFEST = "manifest.json"
_LOCK = ".lock"
_FORMAT = "multiverso tables 1"
_TABLE = re.compile(r"table-\d+-[0-9a-f]{12}\.safetensors")
_TEMPORARY = re.compile(rf"\.({_TABLE.pattern}|manifest\.json)\.[0-9a-f]{{16}}\.tmp")
_LOAD_ATTEMPTS = 1000

Files = dict[str, str]
"""The file of each table, by the table's key."""


class _Saver(msgspec.Struct):
    """Which save of which job a manifest is of."""

    node: str
    began_ns: Count


class _Manifest(msgspec.Struct):
    format: str
    tables: dict[str, Annotated[str, msgspec.Meta(pattern=rf"\A{_TABLE.pattern}\Z")]]
    by: Any = None  # a `_Saver`; whatever else it is says nothing


def _tables(session: Session) -> dict[str, TableHandler | KeyedTable]:
    """The tables of a session by what a manifest calls them."""
    named = {_key_of(table): table for table in handlers(session)}
    return {**named, **{f"keyed:{called}": table for called, table in keyed_tables(session).items()}}


def _key_of(table: TableHandler) -> str:
    return f"name:{table.name}" if table.name is not None else f"order:{table.number}"


def save_all(session: Session, directory: str | os.PathLike[str]) -> None:
    """Writes every table of the session, unless another worker of the job has begun to do so since this call."""
    called_ns = time.monotonic_ns()
    session.check()
    session.flush()
    place = Path(directory)
    with files.writing_a_save(place):
        place.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            alone = stack.enter_context(files.locked(place / _LOCK, session.timeout_seconds))
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"gave up after {session.timeout_seconds:.1f} s waiting for the process or thread that saves to "
                f"{place}; a longer deadline: init(timeout_seconds=)"
            ) from error
        # another program's manifest is not replaced
        before = _read_manifest(place) if os.path.lexists(place / _MANIFEST) else None
        tables = _tables(session)
        if alone and before is not None and _is_saved(before, session, called_ns, tables):
            return
        by = _Saver(session.address, time.monotonic_ns())
        with files.writing_a_save(place):
            now = _write(place, by, tables)
            _remove_others(place, now, before.tables if before is not None else {}, alone)


def _is_saved(before: _Manifest, session: Session, called_ns: int, tables: dict[str, Any]) -> bool:
    """Returns whether a save that another worker of this job began after this one's call has these tables."""
    try:
        by = msgspec.convert(before.by, _Saver)
    except msgspec.ValidationError:
        return False
    return by.node == session.address and by.began_ns >= called_ns and before.tables.keys() == tables.keys()


def _write(place: Path, by: _Saver, tables: dict[str, TableHandler | KeyedTable]) -> Files:
    stamp = os.urandom(6).hex()
    now = {key: f"table-{number}-{stamp}.safetensors" for number, key in enumerate(tables, 1)}
    try:
        for key, table in tables.items():
            table.save(place / now[key])
        manifest = msgspec.json.encode(_Manifest(_FORMAT, now, by))
        files.write_whole(place / _MANIFEST, msgspec.json.format(manifest, indent=1))
    except BaseException:
        if not _counts(place, now):  # an interrupt may come when it already does
            for name in now.values():
                (place / name).unlink(missing_ok=True)
        raise
    return now


def _counts(place: Path, now: Files) -> bool:
    try:
        return bool(_read_manifest(place).tables == now)
    except SnapshotError:
        return False


def _remove_others(place: Path, now: Files, before: Files, alone: bool) -> None:
    """Removes the save before and, if no other process can be writing, what crashes in the middle of one have left."""
    for path in place.iterdir():
        if _TABLE.fullmatch(path.name) and path.name not in now.values():
            if alone or path.name in before.values():
                path.unlink(missing_ok=True)
        elif _TEMPORARY.fullmatch(path.name):
            files.remove_leftover(path)


def load_all(session: Session, directory: str | os.PathLike[str]) -> None:
    """Reads every table, and writes to the shared memory only when all of them fit."""
    place = Path(directory)
    tables = _tables(session)
    for table in handlers(session):
        for user in table._users:
            raise SnapshotError(
                f"{table!r} is moved by the rule {user.rule}, whose workers have parameters of their own that a load "
                "of the tables leaves as they are: what was loaded would be lost in the next exchange. Nothing was "
                "changed. Save with manager.save(directory) and load with manager.load(directory), in every worker"
            )
    read = _read_all(place, tables)
    steps = sum(table._steps_of_load for table in handlers(session))
    if leaves_values(session, "what is shared", steps):
        return
    for table in handlers(session):
        table._check_others(*read[_key_of(table)])  # of all, before the first is changed
    for key, saved in read.items():
        tables[key]._replace(*saved)


def _read_all(place: Path, tables: dict[str, TableHandler | KeyedTable]) -> dict[str, Any]:
    for _ in range(_LOAD_ATTEMPTS):
        manifest = _read_manifest(place)
        names = manifest.tables
        if names.keys() != tables.keys():
            raise SnapshotError(
                f"{place} holds the tables {sorted(names)}, this session has {sorted(tables)}; create the same "
                "tables in the same order, or by the same names, before loading"
            )
        try:
            return {key: table._read(place / names[key]) for key, table in tables.items()}
        except SnapshotError:
            if _read_manifest(place) == manifest:
                raise
    raise SnapshotError(f"{place} is being saved to while it is loaded, time after time; let the saving end first")


def _read_manifest(place: Path) -> _Manifest:
    if not os.path.lexists(place / _MANIFEST):
        raise SnapshotError(f"{place} holds no saved tables: there is no {_MANIFEST}")
    return read_record(place / _MANIFEST, _Manifest, "the manifest of saved tables", _FORMAT)
