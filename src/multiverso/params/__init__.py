"""The arrays of a model, shared: what every binding needs once."""

from __future__ import annotations

from multiverso.params.resumable import Resumable
from multiverso.params.shared import Array, SharedParams
from multiverso.params.untrained import broadcast
from multiverso.params.values import Model, check_unshared, shared_dtype

__all__ = ["Array", "Model", "Resumable", "SharedParams", "broadcast", "check_unshared", "shared_dtype"]
