"""A whole job's state in a directory or behind a URL: written by all workers, whole or not at all, and read by all."""

from __future__ import annotations

from multiverso.checkpoints.loading import load, worker_folder
from multiverso.checkpoints.parts import Parts, random_state, set_random_state
from multiverso.checkpoints.periodic import Checkpoint, checkpoint
from multiverso.checkpoints.saving import save
from multiverso.checkpoints.trees import read_tree, write_tree

__all__ = [
    "Checkpoint",
    "Parts",
    "checkpoint",
    "load",
    "random_state",
    "read_tree",
    "save",
    "set_random_state",
    "worker_folder",
    "write_tree",
]
