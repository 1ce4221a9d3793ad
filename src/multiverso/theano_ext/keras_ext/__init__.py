"""Keras models: ``callbacks`` and ``param_manager``. Keras 1.2.2 or 2.3.1 over Theano, and Keras 3."""
