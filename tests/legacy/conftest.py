"""Imports the old frameworks once, without their warnings: files left open, escapes and comparisons of their time."""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import keras
    import lasagne
    import theano

    gc.collect()

__all__ = ["keras", "lasagne", "theano"]
