"""Controllers and the workers that talk to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from platoon.channel.controller import Controller
    from platoon.channel.worker import Worker

__all__ = ["Controller", "Worker"]


def __getattr__(name: str) -> Any:
    # On demand, so that `python -m platoon.channel.controller` is not imported twice.
    if name == "Controller":
        from platoon.channel.controller import Controller

        return Controller
    if name == "Worker":
        from platoon.channel.worker import Worker

        return Worker
    raise AttributeError(f"module 'platoon.channel' has no attribute {name!r}")
