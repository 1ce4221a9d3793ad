"""A job's state in a directory, in generations: the last whole one counts, whatever is killed when.

A generation is a folder. Every worker writes its part there, one of them the tables, too; ``manifest.json``, which
names the generation, is replaced when all parts are on the disk, and the generation before is removed after that:

    manifest.json
    generation-7/table-0.safetensors    values and updater state
    generation-7/worker-0.safetensors   what is worker 0's own
    generation-7/common-<hash>.safetensors  what several workers have alike, once for each different content
    generation-7/worker-0/              files that a framework writes by itself
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiverso.checkpoints.trees import Tree, as_bytes, digest, read_tree, write_tree
from multiverso.errors import SnapshotError
from multiverso.files import locked, write_whole
from multiverso.runtime import Session
from multiverso.runtime.agreement import Together
from multiverso.tables import TableHandler, saving

PathLike = str | os.PathLike[str]
_MANIFEST = "manifest.json"
_FORMAT = "multiverso checkpoint 1"
_GENERATION = re.compile(r"generation-(\d+)")


@dataclass(frozen=True)
class Parts:
    """What one worker puts in.

    Attributes:
        own: this worker's alone.
        common: likely the same in several workers (frozen parameters): written once for each different content,
            and not at all where the generation before has it.
        newcomer: when loaded: this worker has nothing of its own there, and this is what another one goes on with.
        left: when loaded: ``own`` of workers that nobody goes on as; between them the workers get each once.
    """

    own: Tree
    common: Tree = None
    newcomer: bool = False
    left: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class _Manifest:
    """What is in a generation."""

    number: int
    tables: list[str]
    common: dict[int, str]  # each worker's file, or ""

    @property
    def folder(self) -> str:
        return f"generation-{self.number}"

    @property
    def workers(self) -> list[int]:
        return sorted(self.common)


@dataclass(frozen=True)
class _Role:
    """As whom a worker goes on: by its place among the live ones, as one may have been lost.

    Attributes:
        saved_as: whose part it takes.
        newcomer: that worker's place has been taken already: there are more workers than were saved.
        left: whose part nobody takes, as there are fewer; each is in one worker's role.
    """

    saved_as: int
    newcomer: bool
    left: list[int]


def save(
    session: Session,
    directory: PathLike,
    tables: Mapping[str, TableHandler],
    collect: Callable[[], Parts],
    files: Callable[[Path], None] | None = None,
) -> None:
    """Writes tables and every worker's part: collective, whole or not at all.

    Args:
        session: this worker's session.
        directory: where; the same in all workers. A folder that holds anything else is refused.
        tables: by names that are file names.
        collect: returns this worker's part.
        files: writes more files into the empty folder that it is given.

    Raises:
        SnapshotError: another worker failed, or the directory holds something else. What was saved before is
            still there, and is what `load` finds.
        TypeError: there is something in a part that cannot be saved.
    """
    place, me = Path(directory), session.worker_id
    task = Together(session, lambda why: SnapshotError(f"{place} was not saved: {why}"))
    own: list[bytes] = []
    collected: list[Tree] = []

    def prepare() -> str:
        parts = collect()
        collected.append(parts.common)
        own.append(as_bytes(parts.own))
        return f"common-{digest(parts.common)}.safetensors" if parts.common else ""

    common = task.step(prepare)
    with contextlib.ExitStack() as stack:
        before: list[_Manifest | None] = [None]

        def begin() -> str:
            if not task.leads:
                return ""
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_alone_in(place))
            before[0] = _read_manifest(place, missing_ok=True)
            if before[0] and before[0].tables != list(tables):
                raise SnapshotError(
                    f"{place} holds the state of another model, with the tables {before[0].tables} and not "
                    f"{list(tables)}; save to another directory, or remove it"
                )
            number = before[0].number if before[0] else 0
            _remove_all_but(place, before[0])
            (place / f"generation-{number + 1}").mkdir()
            return str(number + 1)

        manifest = _Manifest(int(task.step(begin)[task.leader]), list(tables), common)
        folder = place / manifest.folder
        written = False

        def write() -> None:
            write_whole(folder / f"worker-{me}.safetensors", own[0])
            name = common[me]
            if name and me == min(worker for worker, other in common.items() if other == name):
                _write_or_link(folder / name, collected[0], _previous(place, manifest))
            if task.leads:
                for key, table in tables.items():
                    table.save(folder / f"{key}.safetensors")
            if files is not None:
                (folder / f"worker-{me}").mkdir()
                files(folder / f"worker-{me}")
                _sync_files(folder / f"worker-{me}")

        def finish() -> None:
            nonlocal written
            if task.leads:
                _sync_directory(folder)
                text = {
                    "format": _FORMAT,
                    "number": manifest.number,
                    "tables": manifest.tables,
                    "common": common,
                }
                write_whole(place / _MANIFEST, json.dumps(text, indent=1).encode())
                written = True
                _remove_all_but(place, manifest)
                stack.close()  # before anybody is let go, who might save again

        try:
            task.step(write)
            task.step(finish)
        except BaseException:
            if task.leads and not written:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def load(
    session: Session,
    directory: PathLike,
    tables: Mapping[str, TableHandler],
    check: Callable[[Parts], None],
    apply: Callable[[Parts], None],
    missing_ok: bool = False,
) -> Parts | None:
    """Reads what `save` wrote: collective. All of it fits in all workers, or nothing is changed in any.

    Args:
        session: this worker's session.
        directory: where; the same in all workers.
        tables: by the same names as in `save`.
        check: raises where this worker's part does not fit; changes nothing.
        apply: takes over this worker's part, once the tables have their values.
        missing_ok: return None where nothing has been saved.

    Raises:
        SnapshotError: nothing is there; it is damaged; or it was saved of another model.
    """
    place = Path(directory)
    task = Together(session, lambda why: SnapshotError(f"{place} was not loaded: {why}"))
    found: list[tuple[_Manifest, Parts]] = []
    live: list[int] = []

    def read() -> str:
        manifest = _read_manifest(place, missing_ok)
        if manifest is None:
            return ""
        live.extend(session.live_workers())
        role = _role(manifest, live, session.worker_id)
        _check_fits(place, manifest, tables)
        folder = place / manifest.folder
        common = manifest.common[role.saved_as]
        parts = Parts(
            read_tree(folder / f"worker-{role.saved_as}.safetensors"),
            read_tree(folder / common) if common else None,
            role.newcomer,
            tuple(read_tree(folder / f"worker-{other}.safetensors") for other in role.left),
        )
        check(parts)
        found.append((manifest, parts))
        return f"{manifest.folder} for {_count(live)}"

    seen = set(task.step(read).values())
    if len(seen) > 1:
        raise SnapshotError(
            f"the workers see different generations in {place}, or one was lost: {sorted(seen)}; nothing was loaded"
        )
    if not found:
        return None
    manifest, parts = found[0]
    values: dict[str, Any] = {}

    def read_tables() -> None:
        if task.leads_host:
            folder = place / manifest.folder
            values.update({k: saving.load(folder / f"{k}.safetensors", t.spec) for k, t in tables.items()})

    task.step(read_tables)

    def put() -> None:
        for key, value in values.items():
            tables[key]._replace(*value)

    task.step(put)
    task.step(lambda: apply(parts))
    _tell(place, manifest, session, live, task.leads)
    return parts


def worker_folder(session: Session, directory: PathLike) -> Path | None:
    """Returns where this worker's own files of the last whole generation are, or None if nothing was saved.

    A worker that has none, since fewer workers saved, gets those of one that has; see `is_newcomer`.

    Raises:
        SnapshotError: there are none.
    """
    place = Path(directory)
    manifest = _read_manifest(place, missing_ok=True)
    if manifest is None:
        return None
    role = _role(manifest, session.live_workers(), session.worker_id)
    folder = place / manifest.folder / f"worker-{role.saved_as}"
    if not folder.is_dir():
        raise SnapshotError(f"{folder} is not there: it was saved without files of its own for each worker")
    return folder


def _check_fits(place: Path, manifest: _Manifest, tables: Mapping[str, TableHandler]) -> None:
    if manifest.tables != list(tables):
        raise SnapshotError(
            f"{place} holds the state of another model, with the tables {manifest.tables} and not {list(tables)}; "
            "nothing was changed"
        )


def is_newcomer(session: Session, directory: PathLike) -> bool:
    """Returns whether a run is saved in ``directory``, by so few workers that this one has nothing of its own there."""
    manifest = _read_manifest(Path(directory), missing_ok=True)
    return manifest is not None and _role(manifest, session.live_workers(), session.worker_id).newcomer


def _role(manifest: _Manifest, live: list[int], me: int) -> _Role:
    saved, place = manifest.workers, live.index(me)
    left = [worker for i, worker in enumerate(saved) if i >= len(live) and i % len(live) == place]
    return _Role(saved[place % len(saved)], place >= len(saved), left)


def _tell(place: Path, manifest: _Manifest, session: Session, live: list[int], leads: bool) -> None:
    """Says what has become of whom, where as many go on it is nothing."""
    role = _role(manifest, live, session.worker_id)
    by = f"{place} was saved by {_count(manifest.workers)}"
    line = ""
    if role.newcomer:
        line = (
            f"{by}, so worker {session.worker_id} has nothing of its own there: it begins from the shared values, "
            f"and gets as own what worker {role.saved_as} had handed over"
        )
    elif leads and len(live) < len(manifest.workers):
        gone = ", ".join(map(str, manifest.workers[len(live) :]))
        line = f"{by}, and {_count(live)} went on: what was worker {gone}'s own is left out"
    if line:
        print(f"multiverso: {line}", file=sys.stderr, flush=True)


def _count(workers: list[int]) -> str:
    return f"{len(workers)} worker{'s' * (len(workers) != 1)} ({', '.join(map(str, workers))})"


def _read_manifest(place: Path, missing_ok: bool = False) -> _Manifest | None:
    path = place / _MANIFEST
    try:
        text = json.loads(path.read_text())
    except FileNotFoundError:
        if missing_ok:
            return None
        raise SnapshotError(f"{place} holds no saved state: there is no {_MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    try:
        if text["format"] != _FORMAT:
            raise SnapshotError(
                f"{path} says {text['format']!r}: expected {_FORMAT!r}, as manager.save() writes"
            )
        common = {int(worker): str(name) for worker, name in text["common"].items()}
        return _Manifest(int(text["number"]), list(text["tables"]), common)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{path} is not the manifest of a saved state: {error!r}") from error


@contextlib.contextmanager
def _alone_in(place: Path) -> Iterator[None]:
    """Keeps other jobs from saving here meanwhile; the lock ends with its owner, however that ends."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(place / ".lock", 0.0))
        except TimeoutError:
            raise SnapshotError(
                f"another job is saving to {place}; give each job a directory of its own"
            ) from None
        yield


def _remove_all_but(place: Path, kept: _Manifest | None) -> None:
    """Removes the generations before, and what a crash in the middle of one has left."""
    for path in place.iterdir():
        if _GENERATION.fullmatch(path.name) and (kept is None or path.name != kept.folder):
            shutil.rmtree(path, ignore_errors=True)


def _previous(place: Path, manifest: _Manifest) -> Path:
    return place / f"generation-{manifest.number - 1}"


def _write_or_link(path: Path, tree: Tree, previous: Path) -> None:
    """Makes a file whose name is its content's hash, from the generation before where that has it."""
    try:
        os.link(previous / path.name, path)
    except OSError:
        write_tree(path, tree)


def _sync_files(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_directory(Path(parent))


def _sync_directory(place: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
