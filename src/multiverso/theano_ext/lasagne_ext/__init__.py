"""Lasagne networks: ``param_manager``."""
