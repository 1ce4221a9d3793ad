"""What the tests of a framework import once for all, in an interpreter that their workers are forked from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What a program or a worker of ours imports at the latest when it is at work.
PROGRAMS = (
    "multiverso.api",
    "multiverso.rules",
    "multiverso.launch.function",
    "multiverso.launch.local",
    "multiverso.launch.rehearsing",
    "multiverso.runtime.several_hosts.other_hosts",
    "llvmlite.binding",
)
# With what most files of tests import: a function of one is found there, by importing it.
OURS = (*PROGRAMS, "pytest")


@dataclass(frozen=True)
class Imported:
    """What an interpreter imports.

    Attributes:
        modules: their names.
        env: what its environment has besides ours meanwhile.
        without: what others import only because it is installed here.
    """

    modules: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()


def keras_on(backend: str) -> Imported:
    """Keras on a backend."""
    return Imported(
        (*OURS, "keras", "sklearn.datasets", "multiverso.keras"), {"KERAS_BACKEND": backend}, ("orbax", "matplotlib")
    )


# With the second, which the first optimizer of each process would import: that takes as long again.
TORCH = ("torch", "torch._dynamo")
TRAINERS = ("multiverso.torch.lightning", "multiverso.torch.huggingface", "transformers.models.bert.modeling_bert")
IMPORTED = {
    "multiverso": Imported(OURS),
    "jax": Imported((*OURS, "optax", "sklearn.datasets", "multiverso.jax")),
    "torch": Imported((*OURS, *TORCH, "multiverso.torch", "sklearn.datasets")),
    "trainers": Imported((*OURS, *TORCH, *TRAINERS, "sklearn.datasets")),
    "keras on torch": keras_on("torch"),
    "keras on jax": keras_on("jax"),
}
