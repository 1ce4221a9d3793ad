"""Imports the framework that is installed once, without the warnings that are its own."""

import gc
import warnings

from multiverso.theano.framework import framework

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    framework()
    gc.collect()
