"""Jobs on a Ray cluster: Ray starts the workers, places them and reports their ends; values never go through it."""

from multiverso.ray.running import run

__all__ = ["run"]
