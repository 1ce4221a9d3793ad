"""Loading a run: collective, all of it in all workers, or nothing is changed in any.

Where more or fewer workers resume a run than saved it, each gets a role: whose saved state it resumes. A replacement
loads its own part of the newest checkpoint alone, while the others train on: nothing there waits for them, and no table
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiverso.checkpoints.generations import check_tables, newest_undamaged
from multiverso.checkpoints.manifests import Generation, read_generations
from multiverso.checkpoints.parts import Parts, Table, read_own, read_part
from multiverso.checkpoints.stores import PathLike, Store, open_store
from multiverso.errors import MultiversoError, SnapshotError
from multiverso.runtime import Session
from multiverso.runtime.collective.agreement import Together
from multiverso.saying import say


@dataclass(frozen=True)
class Role:
    """Says whose state a worker resumes: its own, or where it has none, one that no other worker takes.

    Attributes:
        saved_as: whose part it takes.
        newcomer: that worker's place has been taken already: there are more workers than were saved.
        left: whose part nobody takes, as there are fewer; each is in one worker's role.
    """

    saved_as: int
    newcomer: bool
    left: list[int]


def role_of(generation: Generation, live: list[int], me: int) -> Role:
    """Returns whose state a live worker resumes."""
    saved, place = generation.workers, live.index(me)
    role_of_live, left = _shared_out(saved, live)
    return Role(role_of_live.get(me, saved[place % len(saved)]), me not in role_of_live, left[place :: len(live)])


def _shared_out(saved: list[int], live: list[int]) -> tuple[dict[int, int], list[int]]:
    """Returns who resumes whose state, and whose nobody does."""
    without, unclaimed = [w for w in live if w not in saved], [w for w in saved if w not in live]
    return {w: w for w in live if w in saved} | dict(zip(without, unclaimed, strict=False)), unclaimed[len(without) :]


def tell(store: Store, generation: Generation, session: Session, live: list[int], leads: bool) -> None:
    """Prints which worker resumes whose state; nothing where as many resume as have saved."""
    role = role_of(generation, live, session.worker_id)
    by = f"{store} was saved by {count(generation.workers)}"
    if role.newcomer:
        say(
            f"{by}, so worker {session.worker_id} has nothing of its own there: it begins from the shared values, "
            f"and gets as own what worker {role.saved_as} had handed over"
        )
    elif leads and (left := _shared_out(generation.workers, live)[1]):
        gone = ", ".join(map(str, left))
        say(f"{by}, and {count(live)} resumed: what was worker {gone}'s own is left out")


def count(workers: list[int]) -> str:
    """Returns which workers, in words."""
    return f"{len(workers)} worker{'s' * (len(workers) != 1)} ({', '.join(map(str, workers))})"


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
    task = Together(session, "load", lambda why: SnapshotError(f"{store} was not loaded: {why}"))

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
        parts = Parts(
            *read_part(store, generation, role.saved_as),
            role.newcomer,
            tuple(read_own(store, generation, other) for other in role.left),
        )
        checked(store, check, parts)
        read.append(parts)
        return f"{generation.folder} for {count(live)}"

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


def checked(store: Store, check: Callable[[Parts], None], parts: Parts) -> None:
    """Calls a check that changes nothing; what does not have the shape that it looks for is damaged, or not ours.

    Raises:
        SnapshotError: it is, or the check has refused it.
    """
    try:
        check(parts)
    except MultiversoError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(
            f"{store}: a worker's state is not as it was saved ({type(error).__name__}: {error}); nothing was changed"
        ) from error


def worker_folder(session: Session, directory: PathLike) -> tuple[Path, bool] | None:
    """Returns where this worker's own files of the last whole generation are, or None if nothing was saved.

    A worker that has none, since fewer workers saved, gets those of one that has: the other result says so.

    Args:
        session: this worker's session.
        directory: as for `save`; its own files were written by ``files=`` there.

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
    return folder, role.newcomer


def load_own(
    session: Session, store: Store, check: Callable[[Parts], None], apply: Callable[[Parts], None], tries: int = 3
) -> tuple[dict[str, Any], bool] | None:
    """Reads what this worker's last process had handed over; its managers begin with the tables' values.

    Args:
        session: this worker's session.
        store: where.
        check: raises where it does not fit; changes nothing.
        apply: takes it over.
        tries: how often it is read, where others write meanwhile.

    Returns:
        what was saved, and whether it was this worker's: one that had saved nothing gets another's. None where nothing
        was saved.

    Raises:
        SnapshotError: all of it is damaged.
    """
    generations = read_generations(store, missing_ok=True)
    if not generations:
        return None
    try:
        generation = newest_undamaged(store, generations)
        saved_as = session.worker_id if session.worker_id in generation.common else generation.workers[0]
        own, common = read_part(store, generation, saved_as)
    except (SnapshotError, OSError):
        if tries == 1:
            raise
        return load_own(session, store, check, apply, tries - 1)  # it was replaced by a newer one meanwhile
    parts = Parts(own, common, newcomer=True)
    checked(store, check, parts)
    apply(parts)
    return own, saved_as == session.worker_id
