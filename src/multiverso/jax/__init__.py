"""The binding for JAX: ``import multiverso.jax as mvj``. Pytrees in, pytrees out."""

# isort: off
from multiverso.jax import framework as _framework  # first: it says what to install

# isort: on
from multiverso.jax.embedding import Rows, pull_rows, push_rows
from multiverso.jax.param_manager import ParamManager

del _framework

__all__ = ["ParamManager", "Rows", "pull_rows", "push_rows"]
