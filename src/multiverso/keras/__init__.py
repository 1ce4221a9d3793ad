"""The binding for Keras 3, on any backend: ``import multiverso.keras as mvk``."""

# isort: off
from multiverso.keras import framework as _framework  # first: it says what to install

# isort: on
from multiverso.keras.callbacks import MVCallback
from multiverso.keras.embedding import Embedding
from multiverso.keras.param_manager import ParamManager

del _framework

__all__ = ["Embedding", "MVCallback", "ParamManager"]
