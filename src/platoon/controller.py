"""Another name of `platoon.channel.controller`."""

from platoon.channel.controller import Controller, spawn_controller

__all__ = ["Controller", "spawn_controller"]
