"""The random numbers that a program draws without a generator of its own."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """Returns where this process's generators are: Python's, NumPy's, and torch's (all devices) where it is imported.

    Part of what a worker hands over as ``own``. Generators of your own, and JAX's keys, are yours to save.
    """
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        state["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return state


def set_random_state(state: dict[str, Any], apart: int | None = None) -> None:
    """Puts the generators back to where `random_state` found them.

    Args:
        state: what `random_state` returned.
        apart: a number that sets this worker apart from another one that resumes the same state; the same number and
            state always give the same random numbers.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(state["torch"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
    if apart is not None:
        words = np.random.SeedSequence([random.getrandbits(64), apart]).generate_state(6)
        random.seed(int(words[0]) << 32 | int(words[1]))
        np.random.seed(words[2:4])
        if "torch" in state:
            torch.manual_seed(int(words[4]) << 32 | int(words[5]))
