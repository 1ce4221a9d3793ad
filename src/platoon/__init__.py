"""Platoon: workers train, a controller coordinates them, and their parameters live in shared memory.

`platoon.channel` has `Controller` and `Worker`; `platoon.param_sync` the rules by which a worker's parameters
are exchanged with the shared ones; `platoon.ops` and `platoon.training.global_dynamics` what all workers compute
together.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from multiverso.lazy_names import lazy_names
from platoon.util import PlatoonError, PlatoonWarning

if TYPE_CHECKING:
    from platoon.channel.controller import Controller
    from platoon.channel.worker import Worker

__all__ = ["Controller", "PlatoonError", "Worker"]


def _notice_the_other() -> None:
    """Warns when PyPI's project of the name `platoon`, which is not this one, was installed into this folder."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in os.listdir(folder):
        if name.lower().startswith("platoon-") and name.endswith((".dist-info", ".egg-info")):
            warnings.warn(
                PlatoonWarning(
                    f"{name} in {folder} is another project that installs a package named platoon; each has "
                    "overwritten files of the other. `pip uninstall platoon`, then install multiverso again: `pip "
                    "install --force-reinstall --no-deps` and what you gave pip then; or keep them in two environments"
                ),
                stacklevel=3,
            )


_notice_the_other()


if not TYPE_CHECKING:
    # On demand: the launcher and the start of a child do without NumPy.
    __getattr__, __dir__ = lazy_names(
        __name__, {"platoon.channel.controller": "Controller", "platoon.channel.worker": "Worker"}
    )
