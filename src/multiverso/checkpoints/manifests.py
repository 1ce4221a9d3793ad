"""The manifest of a saved run: which generations are whole, what files each has, and their hashes."""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec

from multiverso.checkpoints.stores import Store
from multiverso.errors import SnapshotError
from multiverso.files.opening import open_plain, sha256_of
from multiverso.files.parsing import Count, FileName, FileNameOrNone, Number, Sha256, parse, read_record

MANIFEST = "manifest.json"
_FORMAT = "multiverso checkpoint 2"


class Generation(msgspec.Struct, frozen=True):
    """A generation that is whole: its files and their hashes.

    Attributes:
        number: counts up from 1.
        tables: their names, which are file names.
        common: each worker's file of what is not its own alone, or "".
        hashes: the SHA-256 of each file, by its name in the generation's folder.
    """

    number: Number
    tables: list[FileName]
    common: Annotated[dict[Count, FileNameOrNone], msgspec.Meta(min_length=1)]
    hashes: dict[FileName, Sha256] = {}

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
    try:
        texts = list(store.versions(MANIFEST))
    except OSError as error:
        raise SnapshotError(f"{store}/{MANIFEST} cannot be read: {error}") from error
    for text in texts:
        try:
            what = "the manifest of a saved state"
            return parse(text, _Manifest, f"{store}/{MANIFEST}", what, _FORMAT).generations
        except SnapshotError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    if missing_ok:
        return []
    raise SnapshotError(f"{store} holds no saved state: there is no {MANIFEST}")


def write_generations(store: Store, generations: list[Generation]) -> None:
    """Makes these the ones that count."""
    manifest = _Manifest(_FORMAT, generations[-1].number, generations)
    store.replace(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


class _Manifest(msgspec.Struct):
    format: str
    number: Number
    generations: Annotated[list[Generation], msgspec.Meta(min_length=1)]


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


class Receipt(msgspec.Struct, frozen=True):
    """A worker's list of the files that it has written.

    Attributes:
        hashes: the SHA-256 of each file that it has written, by name.
        common: the file of what all workers share, whichever of them wrote it; or "".
    """

    hashes: dict[FileName, Sha256]
    common: FileNameOrNone


def write_receipt(store: Store, folder: str, worker: int, hashes: dict[str, str], common: str) -> None:
    """Records beside the files which of them a worker has written: ``worker-3.json``."""
    store.write(f"{folder}/worker-{worker}.json", msgspec.json.encode(Receipt(hashes, common)))


def read_receipt(store: Store, folder: str, worker: int) -> Receipt | None:
    """Returns which files a worker has written; None if it has not said."""
    with contextlib.suppress(OSError, SnapshotError), store.file(f"{folder}/worker-{worker}.json") as path:
        return read_record(path, Receipt, "what a worker has written")
    return None


def inherit(store: Store, worker: int, before: Generation, generation: Generation) -> Receipt:
    """Gives a generation the part that a worker has in another one; returns what is said of it then."""
    common, own = before.common[worker], (f"worker-{worker}.safetensors", f"worker-{worker}/")
    hashes = {
        name: digest for name, digest in before.hashes.items() if name.startswith(own) or (common and name == common)
    }
    for name in hashes:
        to, where = f"{before.folder}/{name}", f"{generation.folder}/{name}"
        if not store.link(where, to):
            store.make(where.rpartition("/")[0])
            with store.file(to) as path, open_plain(path) as file:
                store.write(where, file.read())
    write_receipt(store, generation.folder, worker, hashes, common)
    return Receipt(hashes, common)
