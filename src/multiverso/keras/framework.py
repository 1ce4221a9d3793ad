"""Which Keras, and what its backends need. The only module that knows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

MISSING = 'multiverso.keras needs Keras 3 and one of its backends: pip install "multiverso[keras,torch]"'

try:
    _MAJOR = int(version("keras").partition(".")[0])
except PackageNotFoundError:
    raise ImportError(MISSING, name="keras") from None
if _MAJOR < 3:
    raise ImportError(
        f"multiverso.keras needs Keras 3, and Keras {version('keras')} is installed: use "
        "multiverso.theano_ext.keras_ext there",
        name="keras",
    )


def settle(model: Any) -> None:
    """Brings a model's own variables up to date, where the backend keeps its state elsewhere during ``fit``.

    On JAX the variables are empty between the steps of ``fit``; reading them raises.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()
