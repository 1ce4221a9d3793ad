"""Platoon: workers train, a controller coordinates them, and their parameters live in shared memory.

`platoon.channel` has `Controller` and `Worker`; `platoon.param_sync` the rules by which a worker's parameters
and the shared ones meet; `platoon.ops` and `platoon.training.global_dynamics` what all workers compute
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from platoon.util import PlatoonError

if TYPE_CHECKING:
    from platoon.channel.controller import Controller
    from platoon.channel.worker import Worker

__all__ = ["Controller", "PlatoonError", "Worker"]


def __getattr__(name: str) -> Any:
    # On demand: the launcher and the start of a child need neither NumPy nor ZeroMQ.
    if name in ("Controller", "Worker"):
        from platoon import channel

        return getattr(channel, name)
    raise AttributeError(f"module 'platoon' has no attribute {name!r}")
