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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from multiverso.checkpoints.manifests import (
    Generation,
    Receipts,
    damage,
    read_generations,
    write_generations,
)
from multiverso.checkpoints.roles import count, role_of, say, tell
from multiverso.checkpoints.stores import PathLike, Store, open_store, sha256_of
from multiverso.checkpoints.trees import Tree, as_bytes, digest, read_tree
from multiverso.errors import SnapshotError
from multiverso.runtime import Session
from multiverso.runtime.agreement import Together

_GENERATION = re.compile(r"generation-(\d+)")
_OURS = re.compile(r"(worker|common|table|manager|name|order|keyed)-.+|\..+")  # what lies in one


class Table(Protocol):
    """What is saved of a table: `multiverso.tables.TableHandler`, `multiverso.KeyedTable`."""

    def save(self, path: PathLike) -> None:
        """Writes it to a file."""

    def _read(self, path: PathLike) -> tuple[Any, ...]: ...
    def _replace(self, *content: Any) -> None: ...


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


def save(
    session: Session,
    directory: PathLike,
    tables: Mapping[str, Table],
    collect: Callable[[], Parts],
    files: Callable[[Path], None] | None = None,
) -> None:
    """Writes tables and every worker's part: collective, whole or not at all.

    Args:
        session: this worker's session.
        directory: where, a directory or a URL; the same in all workers. One that holds anything else is refused.
        tables: by names that are file names.
        collect: returns this worker's part.
        files: writes more files into the empty folder that it is given.

    Raises:
        SnapshotError: another worker failed, or the directory holds something else. What was saved before is
            still there, and is what `load` finds.
        TypeError: there is something in a part that cannot be saved.
    """
    store, me = open_store(directory), session.worker_id
    task = Together(session, lambda why: SnapshotError(f"{store} was not saved: {why}"))
    packed: list[Packed] = []

    def prepare() -> str:
        packed.append(Packed.of(collect()))
        return packed[0].common_name

    common = task.step(prepare)
    with contextlib.ExitStack() as stack:
        before: list[Generation] = []

        def begin() -> str:
            if not task.leads:
                return ""
            store.make()
            stack.enter_context(store.alone())
            before.extend(read_generations(store, missing_ok=True))
            check_tables(store, before, tables, "save to another directory, or remove it")
            refuse_strangers(store, before)
            remove_others(store, before)
            number = (before[-1].number if before else 0) + 1
            store.make(f"generation-{number}")
            return str(number)

        generation = Generation(int(task.step(begin)[task.leader]), list(tables), common)
        receipts = Receipts(store, generation.folder)
        written = False

        def write() -> None:
            hashes = write_part(store, generation, me, packed[0], common)
            if task.leads:
                hashes |= write_tables(store, generation, tables)
            if files is not None:
                with store.folder(f"{generation.folder}/worker-{me}") as place:
                    files(place)
                    hashes |= {
                        f"worker-{me}/{path.relative_to(place).as_posix()}": sha256_of(path)
                        for path in place.rglob("*")
                        if path.is_file()
                    }
            receipts.write(me, hashes, common[me])

        def finish() -> None:
            nonlocal written
            if task.leads:
                commit_generation(store, generation, [])
                written = True
                remove_others(store, [generation])
                stack.close()  # before anybody is let go, who might save again

        try:
            task.step(write)
            task.step(finish)
        except BaseException:
            if task.leads and not written:
                discard(store, generation.number)
            raise


@dataclass(frozen=True)
class Packed:
    """A worker's part as bytes, so that it may change meanwhile; what is common is not copied."""

    own: bytes
    common: Tree
    common_name: str

    @classmethod
    def of(cls, parts: Parts) -> Packed:
        """Packs a part.

        Raises:
            TypeError: there is something in it that cannot be saved.
        """
        name = f"common-{digest(parts.common)}.safetensors" if parts.common else ""
        return cls(as_bytes(parts.own), parts.common, name)


def write_part(
    store: Store, generation: Generation, me: int, packed: Packed, common: Mapping[int, str]
) -> dict[str, str]:
    """Writes a worker's part, and as the lowest of those who have it what is common; returns the files' hashes."""
    name = f"worker-{me}.safetensors"
    hashes = {name: store.write(f"{generation.folder}/{name}", packed.own)}
    shared = packed.common_name
    if shared and me == min(worker for worker, other in common.items() if other == shared):
        where, last = f"{generation.folder}/{shared}", f"generation-{generation.number - 1}/{shared}"
        if not store.link(where, last):
            hashes[shared] = store.write(where, as_bytes(packed.common))
    return hashes


def write_tables(store: Store, generation: Generation, tables: Mapping[str, Table]) -> dict[str, str]:
    """Writes the tables as they are now; returns the hashes of the files."""
    hashes = {}
    for key, table in tables.items():
        name = f"{key}.safetensors"
        place = store.path(generation.folder)
        if place is not None:
            table.save(place / name)
            hashes[name] = sha256_of(place / name)
        else:
            with store.folder(generation.folder) as folder:
                table.save(folder / name)
                hashes[name] = sha256_of(folder / name)
    return hashes


def commit_generation(store: Store, generation: Generation, older: list[Generation]) -> Generation:
    """Makes a generation count, beside older ones, once all of its workers have written their parts and said so.

    Raises:
        SnapshotError: one of them has not.
    """
    hashes: dict[str, str] = {}
    for worker in generation.workers:
        said = Receipts(store, generation.folder).read(worker)
        if said is None:
            raise SnapshotError(
                f"{store}/{generation.folder}: worker {worker} has not said what it has written"
            )
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


STEPS_OF_LOAD = 6  # that all workers do together


def load(
    session: Session,
    directory: PathLike,
    tables: Mapping[str, Table],
    check: Callable[[Parts], None],
    apply: Callable[[Parts], None],
    missing_ok: bool = False,
) -> Parts | None:
    """Reads what `save` wrote: collective. All of it fits in all workers, or nothing is changed in any.

    The newest generation whose files all have their hashes is taken; a line on standard error says where that is not
    the newest.

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
    store = open_store(directory)
    task = Together(session, lambda why: SnapshotError(f"{store} was not loaded: {why}"))

    def choose() -> str:
        if not task.leads:
            return ""
        found = read_generations(store, missing_ok)
        check_tables(store, found, tables, "nothing was changed")
        return str(newest_undamaged(store, found).number) if found else ""

    task.step()  # who leads is settled first: nothing chosen means that nothing is there, and not that it died
    chosen = "".join(task.step(choose).values())
    if not chosen:
        return None
    read: list[Parts] = []
    live: list[int] = []

    def read_parts() -> str:
        live.extend(session.live_workers())
        generation = next((g for g in read_generations(store) if str(g.number) == chosen), None)
        if generation is None:
            return "another one"
        role = role_of(generation, live, session.worker_id)
        folder = generation.folder
        parts = Parts(
            *read_part(store, generation, role.saved_as),
            role.newcomer,
            tuple(_tree(store, f"{folder}/worker-{other}.safetensors") for other in role.left),
        )
        check(parts)
        read.append(parts)
        return f"{folder} for {count(live)}"

    seen = set(task.step(read_parts).values())
    if len(seen) > 1 or not read:
        raise SnapshotError(
            f"the workers see different generations in {store}, or one was lost: {sorted(seen)}; nothing was loaded"
        )
    generation = next(g for g in read_generations(store) if str(g.number) == chosen)
    values: dict[str, tuple[Any, ...]] = {}

    def read_tables() -> None:
        if task.leads_host:
            for key, table in tables.items():
                with store.file(f"{generation.folder}/{key}.safetensors") as path:
                    values[key] = table._read(path)

    task.step(read_tables)

    def put() -> None:
        for key, value in values.items():
            tables[key]._replace(*value)

    task.step(put)
    task.step(lambda: apply(read[0]))
    tell(store, generation, session, live, task.leads)
    return read[0]


def read_part(store: Store, generation: Generation, worker: int) -> tuple[Tree, Tree | None]:
    """Returns a worker's own part, and what it has in common with others."""
    folder, common = generation.folder, generation.common[worker]
    return (
        _tree(store, f"{folder}/worker-{worker}.safetensors"),
        _tree(store, f"{folder}/{common}") if common else None,
    )


def _tree(store: Store, name: str) -> Tree:
    with store.file(name) as path:
        return read_tree(path)


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


def worker_folder(session: Session, directory: PathLike) -> Path | None:
    """Returns where this worker's own files of the last whole generation are, or None if nothing was saved.

    A worker that has none, since fewer workers saved, gets those of one that has; see `is_newcomer`.

    Raises:
        SnapshotError: there are none; or they are behind a URL.
    """
    store = open_store(directory)
    generations = read_generations(store, missing_ok=True)
    if not generations:
        return None
    role = role_of(generations[-1], session.live_workers(), session.worker_id)
    folder = store.path(f"{generations[-1].folder}/worker-{role.saved_as}")
    if folder is None:
        raise SnapshotError(f"{store}: a worker's own files are read from a directory only")
    if not folder.is_dir():
        raise SnapshotError(f"{folder} does not exist: it was saved without files of its own for each worker")
    return folder


def check_tables(store: Store, generations: list[Generation], tables: Iterable[str], what_then: str) -> None:
    """Raises SnapshotError where what is saved is of other tables."""
    for generation in generations[-1:]:
        if generation.tables != list(tables):
            raise SnapshotError(
                f"{store} holds the state of another model, with the tables {generation.tables} and not "
                f"{list(tables)}; {what_then}"
            )


def is_newcomer(session: Session, directory: PathLike) -> bool:
    """Returns whether a run is saved in ``directory``, by so few workers that this one has nothing of its own there."""
    generations = read_generations(open_store(directory), missing_ok=True)
    return bool(generations) and role_of(generations[-1], session.live_workers(), session.worker_id).newcomer


def numbers_in(store: Store) -> list[int]:
    """Returns the numbers of all generations that a store has a folder of, whole or not."""
    return sorted(int(found[1]) for name in store.names() if (found := _GENERATION.fullmatch(name)))


def refuse_strangers(store: Store, whole: list[Generation]) -> None:
    """Raises SnapshotError before a folder of somebody else's is taken for what a crash in the first save has left."""
    for number in () if whole else numbers_in(store):
        strange = [name for name in store.names(f"generation-{number}") if not _OURS.fullmatch(name)]
        if strange:
            raise SnapshotError(
                f"{store}/generation-{number} holds {strange[0]!r}, which nobody has saved here: give a directory that "
                "is for this run alone; nothing was changed"
            )


def discard(store: Store, number: int) -> None:
    """Removes a generation that has failed, unless it counts: what failed may have come after that."""
    # whatever somebody else's file system raises; the next start looks again
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
