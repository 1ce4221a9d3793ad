"""A keyed table's snapshots in a directory: one of everything, then increments with what has changed since.

    manifest.json
    snapshot-7.safetensors    everything: keys, rows, updater state
    snapshot-8.safetensors    what was changed since 7, and the keys that were removed
    snapshot-9.safetensors    since 8

Of a job on several hosts each writes such files in a folder of its own, ``host-1-of-3``, with the rows that live there.

``manifest.json`` is replaced last. It names the files in their order, each with its parent's number and the SHA-256 of
its bytes, so a file that is missing, damaged or another one is noticed before anything is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from multiverso.errors import SnapshotError
from multiverso.files import opening as files
from multiverso.files.parsing import Count, Number, Sha256, read_record
from multiverso.layout.keyed import MIXED
from multiverso.tables.keyed import saving
from multiverso.tables.keyed.saving import Content
from multiverso.tables.keyed.spec import KeyedSpec

_MANIFEST = "manifest.json"
_LOCK = ".lock"
_FORMAT = "multiverso keyed snapshots 1"
_LOCK_SECONDS = 600.0
_FILE = re.compile(r"snapshot-(\d+)\.safetensors")
_PART = re.compile(r"host-(\d+)-of-(\d+)")


class Snapshot(msgspec.Struct, frozen=True):
    """One file of a directory of snapshots.

    Attributes:
        number: counts up from 1.
        parent: the number of the snapshot that it is to be applied to; None: it holds everything.
        file: its name.
        sha256: of its bytes.
        run: the job, and what the table is called in it: the same on all of its hosts.
        table: the very memory that it is of; increments are of the same one.
        generation: the table's when it was made; what is stamped later is in the next one.
        removals: how many keys had been removed from the table by then.
        keys, removed: how many rows it has, and how many keys it removes.
        nbytes: of the file.
    """

    number: Number
    parent: Number | None
    file: Annotated[str, msgspec.Meta(pattern=rf"\A{_FILE.pattern}\Z")]
    sha256: Sha256
    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{14}\Z")]
    table: str
    generation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  # what a row's stamp can be
    removals: Count
    keys: Count
    removed: Count
    nbytes: Count


class _Manifest(msgspec.Struct):
    format: str
    snapshots: list[Snapshot]


def whole_in(directory: Path) -> Path:
    """Returns where a job on one host writes, in a directory in which no other has written.

    Raises:
        SnapshotError: one on several hosts has.
    """
    if found := _parts(directory):
        raise SnapshotError(f"{directory} holds {found[0]}, of a job on several hosts: use another directory")
    return directory


def part_of(directory: Path, host: int, hosts: int) -> Path:
    """Returns where a host of a job on several writes.

    Raises:
        SnapshotError: a job on another number of hosts has written in the directory.
    """
    others = [name for name in _parts(directory) if not name.endswith(f"-of-{hosts}")]
    others += [_MANIFEST] * os.path.lexists(directory / _MANIFEST)
    if others:
        raise SnapshotError(
            f"{directory} holds {others[0]}, of a job on another number of hosts: use another directory"
        )
    return directory / f"host-{host + 1}-of-{hosts}"


def parts_in(directory: Path) -> list[Path]:
    """Returns the folders whose snapshots make a table together: the directory, or one of each host.

    Raises:
        SnapshotError: some hosts' are missing.
    """
    names = _parts(directory)
    if not names:
        return [directory]
    whole = [f"host-{host + 1}-of-{len(names)}" for host in range(len(names))]
    if sorted(names) != sorted(whole) or os.path.lexists(directory / _MANIFEST):
        raise SnapshotError(
            f"{directory} does not hold the snapshots of all hosts of one job: there are {', '.join(names)}"
        )
    return [directory / name for name in whole]


def _parts(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("host-*") if _PART.fullmatch(path.name))


def chain(directory: Path) -> list[Snapshot]:
    """Returns the snapshots of a directory in the order in which they are applied; none where there is no manifest.

    Raises:
        SnapshotError: what is there is no such directory, or its snapshots do not follow one another.
    """
    path = directory / _MANIFEST
    if not os.path.lexists(path):
        return []
    found = read_record(path, _Manifest, "the manifest of a keyed table's snapshots", _FORMAT).snapshots
    before: int | None = None
    for snapshot in found:
        if snapshot.parent != before:
            raise SnapshotError(
                f"{path} has a gap: snapshot {snapshot.number} is to be applied to {snapshot.parent}, and {before} "
                "is what comes before it"
            )
        before = snapshot.number
    return found


def run_of(job: str, called: str) -> str:
    """Returns what snapshots of a table are told from those of others by, in other jobs too."""
    return hashlib.sha256(f"{job}\n{called}".encode()).hexdigest()[:14]


def run_in(path: Path) -> int:
    """Returns of which run a directory's snapshots are, as a number; MIXED: hosts' of different ones; 0: a file."""
    runs = {chain(part)[-1].run for part in parts_in(path)} if path.is_dir() else {"0"}
    return int(runs.pop(), 16) if len(runs) == 1 else MIXED


def read(directory: Path, spec: KeyedSpec) -> Content:
    """Returns what all snapshots of a directory make together, each file checked against its hash.

    Raises:
        SnapshotError: there are none; one is missing, damaged or another one; or they are of another table.
    """
    snapshots = chain(directory)
    if not snapshots:
        raise SnapshotError(f"{directory} holds no snapshots of a keyed table: there is no {_MANIFEST}")
    whole: Content | None = None
    for snapshot in snapshots:
        path = directory / snapshot.file
        try:
            digest = files.sha256_of(path)
        except OSError as error:
            raise SnapshotError(f"snapshot {snapshot.number} is missing: {error}") from error
        if digest != snapshot.sha256:
            raise SnapshotError(
                f"{path} is damaged, or another file: its SHA-256 is {digest}, the manifest's {snapshot.sha256}"
            )
        part = saving.load(path, spec)
        whole = part if whole is None else _applied(whole, part)
    assert whole is not None
    return whole


def _applied(whole: Content, part: Content) -> Content:
    """Returns a table's content after an increment."""
    stays = ~np.isin(whole.keys, np.concatenate([part.keys, part.removed]))
    keys = np.concatenate([whole.keys[stays], part.keys])
    order = np.argsort(keys, kind="stable")
    width = part.rows.shape[1] or whole.rows.shape[1]
    rows = [c.rows.reshape(-1, width) if width else c.rows for c in (whole, part)]
    uses = None
    if whole.uses is not None and part.uses is not None:
        uses = np.concatenate([whole.uses[stays], part.uses])[order]
    return Content(keys[order], np.concatenate([rows[0][stays], rows[1]])[order], uses, ticks=part.ticks)


def write(directory: Path, spec: KeyedSpec, content: Content, before: list[Snapshot], **of: Any) -> Snapshot:
    """Writes the snapshot that follows ``before`` (none: it holds everything), and then the manifest.

    Args:
        of: the table, generation and removals of the snapshot.
    """
    number = 1 + max((s.number for s in (before or chain(directory))), default=0)
    parent = before[-1].number if before else None
    name = f"snapshot-{number}.safetensors"
    link = {"number": str(number), "parent": str(parent or "")}
    data = saving.Copied(spec, content).save(directory / name, link)
    snapshot = Snapshot(
        number,
        parent,
        name,
        hashlib.sha256(data).hexdigest(),
        keys=content.keys.size,
        removed=content.removed.size,
        nbytes=len(data),
        **of,
    )
    now = [*before, snapshot]
    text = msgspec.json.encode(_Manifest(_FORMAT, now))
    kept = {s.file for s in now}
    with files.writing_a_save(directory):
        files.write_whole(directory / _MANIFEST, msgspec.json.format(text, indent=1))
        for path in directory.iterdir():
            if _FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
    return snapshot


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[Path]:
    """Lets one process at a time write to a directory of snapshots, which is made.

    Yields:
        A path to it: of a host's folder one that leads there though others put a link in its place.
    """
    with contextlib.ExitStack() as stack:
        with files.writing_a_save(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if _PART.fullmatch(directory.name):
                directory = stack.enter_context(files.below(directory.parent, directory.name, opened=True))
        stack.enter_context(files.locked(directory / _LOCK, _LOCK_SECONDS))
        yield directory
