"""Jobs on a Ray cluster: Ray starts the workers, places them and reports their ends; values never go through it."""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ImportError('multiverso.ray needs Ray: pip install "multiverso[ray]"', name="ray")

from multiverso.ray.running import run

__all__ = ["run"]
