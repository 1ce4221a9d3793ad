"""Another name of `platoon.channel.worker`."""

from platoon.channel.worker import Worker

__all__ = ["Worker"]
