"""Saving a run: collective, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from multiverso.checkpoints.generations import check_tables, commit_generation, discard, refuse_strangers, remove_others
from multiverso.checkpoints.manifests import Generation, read_generations, write_receipt
from multiverso.checkpoints.parts import Packed, Parts, Table, write_part, write_tables
from multiverso.checkpoints.stores import PathLike, make_usable, open_store
from multiverso.errors import SnapshotError
from multiverso.files.opening import sha256_of, writing_a_save
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import Together


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
        SnapshotError: a worker could not write, or the directory holds something else. What was saved before is
            still there, and is what `load` finds.
        TypeError: there is something in a part that cannot be saved.
    """
    store, me = open_store(directory), session.worker_id
    task = Together(session, "save", lambda why: SnapshotError(f"{store} was not saved: {why}"))
    packed: list[Packed] = []

    def prepare() -> str:
        packed.append(Packed.of(collect()))
        return packed[0].common_name

    common = task.step(prepare)
    with contextlib.ExitStack() as stack:
        before: list[Generation] = []

        @writing_a_save(store)
        def begin() -> str:
            if not task.leads:
                return ""
            make_usable(store)
            stack.enter_context(store.alone())
            before.extend(read_generations(store, missing_ok=True))
            check_tables(store, before, tables, "save to another directory, or remove it")
            refuse_strangers(store, before)
            remove_others(store, before)
            number = (before[-1].number if before else 0) + 1
            store.make(f"generation-{number}")
            return str(number)

        generation = Generation(int(task.step(begin)[task.leader]), list(tables), common)
        written = False

        @writing_a_save(store)
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
            write_receipt(store, generation.folder, me, hashes, common[me])

        @writing_a_save(store)
        def finish() -> None:
            nonlocal written
            if task.leads:
                commit_generation(store, generation, [])
                written = True
                remove_others(store, [generation])
                stack.close()  # before any worker continues, and perhaps saves again

        try:
            task.step(write)
            task.step(finish)
        except BaseException:
            if task.leads and not written:
                discard(store, generation.number)
            raise
