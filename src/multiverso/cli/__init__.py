"""The `multiverso` command."""

from multiverso.cli.main import main

__all__ = ["main"]
