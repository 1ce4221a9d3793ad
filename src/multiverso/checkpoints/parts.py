"""What is in a saved run: the tables, and each worker's part, with where its random numbers are."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiverso.checkpoints.manifests import Generation
from multiverso.checkpoints.stores import Store
from multiverso.checkpoints.trees import Tree, as_bytes, digest, read_tree
from multiverso.files.opening import sha256_of
from multiverso.tables import KeyedTable, TableHandler

Table = TableHandler[Any] | KeyedTable[Any]


@dataclass(frozen=True)
class Parts:
    """One worker's part of a saved run.

    Attributes:
        own: this worker's alone.
        common: likely the same in several workers (frozen parameters): written once for each different content,
            and not at all where the generation before has it.
        newcomer: when loaded: this worker has nothing of its own there, and this is what another one resumes with.
        left: when loaded: ``own`` of workers whose state nobody resumes; between them the workers get each once.
    """

    own: Tree
    common: Tree = None
    newcomer: bool = False
    left: tuple[Tree, ...] = ()


def check_own(own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a user hands over to be saved.

    Raises:
        TypeError: no dictionary.
    """
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise TypeError(
            f"own is a dictionary of state, such as {{'optimizer': optimizer.state_dict()}}; got {type(own).__name__}"
        )
    return own


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


def write_tables(store: Store, generation: Generation, tables: Mapping[str, Any]) -> dict[str, str]:
    """Writes the tables as they are now; returns the hashes of the files."""
    hashes = {}
    for key, table in tables.items():
        name = f"{key}.safetensors"
        with store.folder(generation.folder, make=False) as folder:
            table.save(folder / name)
            hashes[name] = sha256_of(folder / name)
    return hashes


def read_part(store: Store, generation: Generation, worker: int) -> tuple[Tree, Tree | None]:
    """Returns a worker's own part, and what it has in common with others."""
    common = generation.common[worker]
    return (read_own(store, generation, worker), _tree(store, f"{generation.folder}/{common}") if common else None)


def read_own(store: Store, generation: Generation, worker: int) -> Tree:
    """Returns what is a worker's alone."""
    return _tree(store, f"{generation.folder}/worker-{worker}.safetensors")


def _tree(store: Store, name: str) -> Tree:
    with store.file(name) as path:
        return read_tree(path)


def random_state() -> dict[str, Any]:
    """Returns where this process's generators are: Python's, NumPy's, and torch's (all devices) where it is imported.

    Part of what a worker hands over as ``own``. Generators of your own, and JAX's keys, are yours to save.
    """
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        state["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return state


def set_random_state(state: dict[str, Any], apart: int | None = None) -> None:
    """Puts the generators back to where `random_state` found them.

    Args:
        state: what `random_state` returned.
        apart: a number that sets this worker apart from another one that resumes the same state; the same number and
            state always give the same random numbers.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
    if apart is not None:
        words = np.random.SeedSequence([random.getrandbits(64), apart]).generate_state(6)
        random.seed(int(words[0]) << 32 | int(words[1]))
        np.random.seed(words[2:4])
        if "torch" in state:
            torch.manual_seed(int(words[4]) << 32 | int(words[5]))
