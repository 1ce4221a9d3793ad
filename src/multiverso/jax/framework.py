"""Whether JAX is there, and what differs between its versions. The only module that knows."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

MISSING = 'multiverso.jax needs JAX and optax: pip install "multiverso[jax]"'

for _name in ("jax", "optax"):
    if find_spec(_name) is None:
        raise ImportError(MISSING, name=_name)


def placed_like(value: Any, leaf: Any) -> Any:
    """Returns a NumPy array's values as what ``leaf`` is: on the same devices, or in NumPy."""
    import jax

    if not isinstance(leaf, jax.Array):
        return value
    # An array without a placement stays free to go where others are.
    placed = getattr(leaf, "committed", True)
    return jax.device_put(value, leaf.sharding) if placed else jax.device_put(value)
