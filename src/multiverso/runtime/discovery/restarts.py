"""Whether this job was started again, and whether it is to continue from what it has saved: by the environment."""

from __future__ import annotations

import os

RESTARTS_VARIABLE = "MULTIVERSO_RESTARTS"
RESUME_VARIABLE = "MULTIVERSO_RESUME"
# ours, torchrun's agent, Slurm after a requeue
_COUNTS = (RESTARTS_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def restarts() -> int:
    """Returns how often the launcher has started this job again after a failure: 0 at its first start.

    As ``multiverso run --max-restarts`` and ``torchrun --max-restarts`` count, or Slurm after a requeue.
    """
    return max(int(text) for text in ("0", *map(os.environ.get, _COUNTS)) if text and text.isdecimal())


def may_resume() -> bool:
    """Returns whether this start is to continue from a run that is saved."""
    return restarts() > 0 or os.environ.get(RESUME_VARIABLE, "") not in ("", "0")
