"""Ways to start the workers of a job from here."""

from multiverso.launch.function import run

__all__ = ["run"]
