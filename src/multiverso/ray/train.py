"""Tables in the training loops of Ray Train: a backend that gives its workers the nodes of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from multiverso.errors import StartupError
from multiverso.hosts.options import in_environment
from multiverso.ray.nodes import Nodes, hosts_of
from multiverso.runtime.discovery.restarts import RESTARTS_VARIABLE


@dataclass
class MultiversoConfig(BackendConfig):  # type: ignore[misc]
    """Lets the loop of a trainer call `multiverso.init()`: its workers are one job, their rank their number.

    Args:
        inner: another backend's configuration, which is set up first: ``TorchConfig()`` for a `TorchTrainer`.
        on_lost: what `init` is to do when a worker is lost. Ray Train itself ends all workers when one fails.
        wire: what travels between hosts, as in `init`.
        every: how often, as in `init`.
        between: what is made of it, as in `init`.
        encrypted: whether hosts encrypt what they send each other.
    """

    inner: BackendConfig | None = None
    on_lost: str = "stop"
    wire: str | None = None
    every: float | str | None = None
    between: str | None = None
    encrypted: bool = True
    environ: dict[str, str] = field(init=False)  # what workers find there for what they do not give to `init`

    def __post_init__(self) -> None:
        if self.on_lost not in ("stop", "continue"):
            raise StartupError(f"on_lost is 'stop' or 'continue'; got {self.on_lost!r}")
        self.environ = in_environment(self.wire, self.every, self.between)

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend, which is the inner one's too, where Ray Train asks about that."""
        inner = (self.inner or BackendConfig()).backend_cls
        said = {name: getattr(inner, name) for name in ("share_cuda_visible_devices", "has_replica_groups")}
        return type("MultiversoBackend", (_Backend,), said)

    @property
    def backend(self) -> str | None:
        """How PyTorch's process group talks, of an inner ``TorchConfig``: a `TorchTrainer` asks, and fills it in."""
        return getattr(self.inner, "backend", None)

    @backend.setter
    def backend(self, name: str) -> None:
        if self.inner is None:
            raise StartupError("a TorchTrainer needs MultiversoConfig(TorchConfig()), which says how PyTorch talks")
        self.inner.backend = name

    @property
    def train_func_context(self) -> Any:
        """What the loop runs in: the inner configuration's."""
        return (self.inner or BackendConfig()).train_func_context

    @property
    def framework(self) -> Any:
        """The inner configuration's."""
        return (self.inner or BackendConfig()).framework


class _Backend(Backend):  # type: ignore[misc]
    """Owner: Ray Train's controller, in whose process it lives."""

    def __init__(self) -> None:
        self._nodes: Nodes | None = None
        self._inner: Backend | None = None
        self._starts = 0

    def on_start(self, worker_group: Any, backend_config: MultiversoConfig) -> None:
        if backend_config.inner is not None:
            self._inner = backend_config.inner.backend_cls()
            self._inner.on_start(worker_group, backend_config.inner)
        self._end()
        hosts = hosts_of(worker_group.execute(_ray_node))
        self._nodes = Nodes(hosts, on_lost=backend_config.on_lost, encrypted=backend_config.encrypted)
        environ = dict(backend_config.environ)
        if self._starts:
            environ[RESTARTS_VARIABLE] = str(self._starts)
        self._starts += 1
        ray.get(
            [
                worker_group.execute_single_async(worker_id, _take, {**environ, **self._nodes.environ(worker_id)})
                for worker_id in range(len(worker_group))
            ]
        )

    def on_training_start(self, worker_group: Any, backend_config: MultiversoConfig) -> None:
        if self._inner is not None:
            self._inner.on_training_start(worker_group, backend_config.inner)

    def on_shutdown(self, worker_group: Any, backend_config: MultiversoConfig) -> None:
        try:
            if self._inner is not None:
                self._inner.on_shutdown(worker_group, backend_config.inner)
        finally:
            self._end()

    def _end(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
        self._nodes = None


def _ray_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _take(environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
