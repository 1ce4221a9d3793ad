"""The binding for PyTensor, and for Theano where it is installed: ``import multiverso.theano as mvt``."""

from multiverso.theano.param_manager import ParamManager
from multiverso.theano.sharedvar import MVSharedVariable, mv_shared, sync_all_mv_shared_vars

__all__ = ["MVSharedVariable", "ParamManager", "mv_shared", "sync_all_mv_shared_vars"]
