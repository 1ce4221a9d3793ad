"""The weight-transfer engine of vLLM's workers (0.32): loads a version, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from multiverso.errors import SnapshotError
from multiverso.publications import Subscription, subscribe


@dataclass
class Source(WeightTransferInitInfo):  # type: ignore[misc]
    """What is followed; as for `multiverso.subscribe`."""

    publication: str
    job: str | None = None
    timeout_seconds: float = 120.0


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which version: `multiverso.Snapshot.ticket` of who asks for it. Without one, the newest."""

    ticket: str = ""


class Engine(WeightTransferEngine[Source, Update]):  # type: ignore[misc]
    """Owner: a worker of vLLM, which calls it between two steps of the model."""

    init_info_cls = Source
    update_info_cls = Update
    supports_draft_weight_update = False
    _subscription: Subscription | None = None
    _version = 0

    def init_transfer_engine(self, init_info: Source) -> None:
        """Subscribes.

        Raises:
            RuntimeError: the sampler has several workers, of which one could fail to load what the others have.
        """
        if (workers := self.parallel_config.world_size) > 1:
            raise RuntimeError(
                f"a sampler of {workers} workers (tensor_parallel_size, pipeline_parallel_size) cannot "
                "follow a publication: a version that one of them could not load would be in the others; start "
                "several samplers of one worker each, which all read the one copy of the publication"
            )
        self.shutdown()
        self._subscription = subscribe(init_info.publication, init_info.job, timeout_seconds=init_info.timeout_seconds)

    def start_weight_update(self) -> None:
        """Does nothing: the weights stay as they are until there are others."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, whose own one waits for an accelerator at the end."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Loads a version.

        Raises:
            RuntimeError: there was no ``init_weight_transfer_engine``.
            WaitTimeoutError: there is no version.
            SnapshotError: it does not fit. The weights are those of the version before.
        """
        if self._subscription is None:
            raise RuntimeError("which publication? Call init_weight_transfer_engine first")
        ticket = update_info.ticket
        with self._subscription.redeem(ticket) if ticket else self._subscription.latest() as snapshot:
            try:
                with _undone_if_it_fails(self.model):
                    self._load(snapshot.torch())
            except Exception as error:
                before = f"those of version {self._version}" if self._version else "what they were at first"
                raise SnapshotError(
                    f"version {snapshot.version} of {self._subscription.name!r} cannot be loaded into "
                    f"{type(self.model).__name__} ({error!r}); its weights are {before}"
                ) from error
            self._version = snapshot.version

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(tensors.items()))
        if loaded is not None and self.model_config.quantization is None and (missing := wanted - loaded):
            raise ValueError(f"it lacks {', '.join(sorted(missing)[:4])}")
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Does nothing: a version is loaded whole, in one call."""

    def shutdown(self) -> None:
        """Ends the subscription."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


@contextlib.contextmanager
def _undone_if_it_fails(model: torch.nn.Module) -> Iterator[None]:
    """Puts back what the layers of a model were.

    For as long as it lasts that takes the memory of the weights once more. Layers keep more than their tensors: on CPUs
    kernels that have packed the weights, which are new after each load.
    """
    layers = [
        (layer, {name: value.copy() if isinstance(value, dict | set) else value for name, value in vars(layer).items()})
        for layer in model.modules()
    ]
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        values = [tensor.clone() for tensor in tensors]
        try:
            yield
        except BaseException:
            for layer, attributes in layers:
                vars(layer).clear()
                vars(layer).update(attributes)
                get_layerwise_info(layer).reset()
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            raise
