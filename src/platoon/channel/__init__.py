"""Controllers and the workers that talk to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multiverso.lazy_names import lazy_names

if TYPE_CHECKING:
    from platoon.channel.controller import Controller
    from platoon.channel.worker import Worker

__all__ = ["Controller", "Worker"]


if not TYPE_CHECKING:
    # On demand, so that `python -m platoon.channel.controller` is not imported twice.
    __getattr__, __dir__ = lazy_names(
        __name__, {"platoon.channel.controller": "Controller", "platoon.channel.worker": "Worker"}
    )
