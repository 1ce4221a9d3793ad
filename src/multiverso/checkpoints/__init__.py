"""A whole job's state in a directory: written by all workers, whole or not at all, and read again by all."""

from __future__ import annotations

from multiverso.checkpoints.generations import Parts, load, save, worker_folder

__all__ = ["Parts", "load", "save", "worker_folder"]
