"""The original place of `multiverso.theano.sharedvar`."""

from multiverso.theano.sharedvar import MVSharedVariable, mv_shared, sync_all_mv_shared_vars

__all__ = ["MVSharedVariable", "mv_shared", "sync_all_mv_shared_vars"]
