"""Keras models, shared: the original place of the callback, for the Keras that is installed."""

from multiverso.theano_ext.keras_ext.version import keras_major

if keras_major() >= 3:
    from multiverso.keras import MVCallback
else:
    from multiverso.theano_ext.keras_ext.keras1 import MVCallback  # type: ignore[assignment]

__all__ = ["MVCallback"]
