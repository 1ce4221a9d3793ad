"""A job's state in a directory, in generations: the last whole one counts, whatever is killed when.

A generation is a folder. Every worker writes its part there, one of them the tables, too; ``manifest.json``, which
names the whole generations and the hash of each file, is replaced when all parts are on the disk, and what it does not
name any more is removed after that:

    manifest.json
    generation-7/table-0.safetensors    values and updater state
    generation-7/worker-0.safetensors   what is worker 0's own
    generation-7/common-<hash>.safetensors  what several workers have alike, once for each different content
    generation-7/worker-0/              files that a framework writes by itself
    generation-7/worker-0.json          the hashes of what worker 0 has written
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from multiverso.checkpoints.manifests import Generation, damage, read_generations, read_receipt, write_generations
from multiverso.checkpoints.stores import Store
from multiverso.errors import SnapshotError
from multiverso.files.opening import sha256_of
from multiverso.saying import say

_GENERATION = re.compile(r"generation-(\d+)")
_OURS = re.compile(r"(worker|common|table|manager|name|order|keyed)-.+|\..+")  # what lies in one


def commit_generation(store: Store, generation: Generation, older: list[Generation]) -> Generation:
    """Makes a generation count, beside older ones, once all of its workers have written their parts and said so.

    Raises:
        SnapshotError: one of them has not.
    """
    hashes: dict[str, str] = {}
    for worker in generation.workers:
        said = read_receipt(store, generation.folder, worker)
        if said is None:
            raise SnapshotError(f"{store}/{generation.folder}: worker {worker} has not said what it has written")
        hashes |= said.hashes
    linked = set(generation.common.values()) - {""} - hashes.keys()
    last = [g for g in read_generations(store, missing_ok=True) if g.number == generation.number - 1]
    for name in sorted(linked):
        known = last[0].hashes.get(name) if last else None  # and not what a disk has made of the file since
        if known is None:
            with store.file(f"{generation.folder}/{name}") as path:
                known = sha256_of(path)
        hashes[name] = known
    whole = Generation(generation.number, generation.tables, generation.common, hashes)
    store.sync(generation.folder)
    write_generations(store, [*older, whole])
    return whole


def newest_undamaged(store: Store, generations: list[Generation]) -> Generation:
    """Returns the newest generation that is as it was written.

    Raises:
        SnapshotError: none is.
    """
    wrong: list[str] = []
    for generation in reversed(generations):
        why = damage(store, generation)
        if not why:
            if wrong:
                say(f"{store}: {'; '.join(wrong)}; going back to {generation.folder}, which is whole")
            return generation
        wrong.append(why)
    raise SnapshotError(f"{store}: {'; '.join(wrong)}; nothing was changed")


def check_tables(store: Store, generations: list[Generation], tables: Iterable[str], what_then: str) -> None:
    """Raises SnapshotError where what is saved is of other tables."""
    for generation in generations[-1:]:
        if generation.tables != list(tables):
            raise SnapshotError(
                f"{store} holds the state of another model, with the tables {generation.tables} and not "
                f"{list(tables)} (make tables, models and managers before it is loaded); {what_then}"
            )


def numbers_in(store: Store) -> list[int]:
    """Returns the numbers of all generations that a store has a folder of, whole or not."""
    return sorted(int(found[1]) for name in store.names() if (found := _GENERATION.fullmatch(name)))


def refuse_strangers(store: Store, whole: list[Generation]) -> None:
    """Raises SnapshotError before a folder of another program is taken for what a crash in the first save has left."""
    for number in () if whole else numbers_in(store):
        strange = [name for name in store.names(f"generation-{number}") if not _OURS.fullmatch(name)]
        if strange:
            raise SnapshotError(
                f"{store}/generation-{number} holds {strange[0]!r}, which was not saved by multiverso: give a "
                "directory that is for this run alone; nothing was changed"
            )


def discard(store: Store, number: int) -> None:
    """Removes a generation that has failed, unless it counts: what failed may have come after that."""
    # whatever the file system raises; the next start looks again
    with contextlib.suppress(Exception):
        if number not in {generation.number for generation in read_generations(store, missing_ok=True)}:
            store.remove(f"generation-{number}")


def remove_others(store: Store, kept: list[Generation], above: int = 1 << 62) -> None:
    """Removes the generations before, and what a crash in the middle of one has left.

    Args:
        store: where.
        kept: these stay.
        above: later ones stay, too, which are being written.
    """
    numbers = {generation.number for generation in kept}
    for number in numbers_in(store):
        if number not in numbers and number <= above:
            store.remove(f"generation-{number}")
