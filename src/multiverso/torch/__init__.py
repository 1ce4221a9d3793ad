"""The binding for PyTorch: ``import multiverso.torch as mvt``."""

# isort: off
from multiverso.torch import framework as _framework  # first: it says what to install

# isort: on
from multiverso.api import barrier, init, is_master_worker, num_workers, server_id, shutdown, worker_id
from multiverso.torch.embedding import Embedding, EmbeddingBag
from multiverso.torch.optimizer import SharedOptimizer
from multiverso.torch.param_manager import ParamManager
from multiverso.torch.sampler import BatchSampler
from multiverso.torch.tables import ArrayTableHandler, MatrixTableHandler

del _framework

__all__ = [
    "ArrayTableHandler",
    "BatchSampler",
    "Embedding",
    "EmbeddingBag",
    "MatrixTableHandler",
    "ParamManager",
    "SharedOptimizer",
    "barrier",
    "init",
    "is_master_worker",
    "num_workers",
    "server_id",
    "shutdown",
    "worker_id",
]
