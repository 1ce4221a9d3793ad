"""The manifest of a saved run: which generations are whole, what files each has, and their hashes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from multiverso.checkpoints.stores import Store, sha256_of
from multiverso.errors import SnapshotError

MANIFEST = "manifest.json"
_FORMAT = "multiverso checkpoint 2"
_FORMAT_BEFORE = "multiverso checkpoint 1"  # one generation, no hashes


@dataclass(frozen=True)
class Generation:
    """What is in one that is whole.

    Attributes:
        number: counts up from 1.
        tables: their names, which are file names.
        common: each worker's file of what is not its own alone, or "".
        hashes: the SHA-256 of each file, by its name in the generation's folder.
    """

    number: int
    tables: list[str]
    common: dict[int, str]
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"generation-{self.number}"

    @property
    def workers(self) -> list[int]:
        """The workers that have a part in it."""
        return sorted(self.common)


def read_generations(store: Store, missing_ok: bool = False) -> list[Generation]:
    """Returns the whole generations of a store, the newest one last.

    Raises:
        SnapshotError: there is no manifest (unless ``missing_ok``), or what is there is none.
    """
    errors: list[SnapshotError] = []
    for text in _texts(store):
        try:
            return _parsed(store, text)
        except SnapshotError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if missing_ok:
        return []
    raise SnapshotError(f"{store} holds no saved state: there is no {MANIFEST}")


def write_generations(store: Store, generations: list[Generation]) -> None:
    """Makes these the ones that count."""
    text = {
        "format": _FORMAT,
        "number": generations[-1].number,
        "generations": [asdict(generation) for generation in generations],
    }
    store.replace(MANIFEST, json.dumps(text, indent=1).encode())


def _texts(store: Store) -> list[bytes]:
    try:
        return list(store.versions(MANIFEST))
    except OSError as error:
        raise SnapshotError(f"{store}/{MANIFEST} cannot be read: {error}") from error


def _parsed(store: Store, content: bytes) -> list[Generation]:
    path = f"{store}/{MANIFEST}"
    try:
        text = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from error
    try:
        if text["format"] not in (_FORMAT, _FORMAT_BEFORE):
            raise SnapshotError(
                f"{path} says {text['format']!r}: expected {_FORMAT!r}, as manager.save() and "
                "multiverso.checkpoint() write"
            )
        found = text["generations"] if text["format"] == _FORMAT else [text]
        return [_generation(each) for each in found]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SnapshotError):
            raise
        raise SnapshotError(f"{path} is not the manifest of a saved state: {error!r}") from error


def _generation(text: dict[str, Any]) -> Generation:
    common = {int(worker): _name(name) for worker, name in text["common"].items()}
    hashes = {_name(name): str(digest) for name, digest in text.get("hashes", {}).items()}
    if not common:
        raise ValueError("a generation of no workers")
    return Generation(int(text["number"]), [_name(name) for name in text["tables"]], common, hashes)


def _name(name: Any) -> str:
    """Nothing but files below the generation's folder: a manifest may come from anywhere."""
    if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r:.80} is not a file's name")
    return name


def damage(store: Store, generation: Generation) -> str:
    """Returns what is wrong with a generation's files, in words; nothing where all have the hashes they should have."""
    for name, expected in generation.hashes.items():
        try:
            with store.file(f"{generation.folder}/{name}") as path:
                found = sha256_of(path)
        except OSError as error:
            return f"{generation.folder}/{name} cannot be read: {error}"
        if found != expected:
            return (
                f"{generation.folder}/{name} is damaged, or another file: its SHA-256 is {found}, "
                f"and the manifest's {expected}"
            )
    return ""


@dataclass(frozen=True)
class Receipt:
    """What a worker has written.

    Attributes:
        hashes: the SHA-256 of each file that it has written, by name.
        common: the file of what is not its own alone, whoever has written that; or "".
    """

    hashes: dict[str, str]
    common: str


class Receipts:
    """What each worker says of the files that it has written, beside them: ``worker-3.json``."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder

    def write(self, worker: int, hashes: dict[str, str], common: str) -> None:
        """Records which files a worker has written."""
        text = json.dumps(asdict(Receipt(hashes, common)))
        self._store.write(f"{self._folder}/worker-{worker}.json", text.encode())

    def read(self, worker: int) -> Receipt | None:
        """Returns which files a worker has written; None if it has not said."""
        with contextlib.suppress(OSError, ValueError):
            with self._store.file(f"{self._folder}/worker-{worker}.json") as path:
                found = json.loads(path.read_bytes())
            return Receipt(dict(found["hashes"]), str(found["common"]))
        return None


def inherit(store: Store, worker: int, before: Generation, generation: Generation) -> None:
    """Gives a generation the part that a worker has in another one."""
    common, own = before.common[worker], (f"worker-{worker}.safetensors", f"worker-{worker}/")
    hashes = {
        name: digest
        for name, digest in before.hashes.items()
        if name.startswith(own) or (common and name == common)
    }
    for name in hashes:
        to, where = f"{before.folder}/{name}", f"{generation.folder}/{name}"
        if not store.link(where, to):
            store.make(where.rpartition("/")[0])
            with store.file(to) as path:
                store.write(where, path.read_bytes())
    Receipts(store, generation.folder).write(worker, hashes, common)
