"""Timing that forgives a busy machine: alternating calls, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

_SHORT_SECONDS = 20e-6


def alternate(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Times calls against each other, one after another, repeatedly.

    A disturbance then hits all of them alike. Calls shorter than a few microseconds are timed in batches, or
    the clock would be part of the figure.

    Args:
        calls: what to time, by name.
        seconds: how long to measure, about; at least 7 times each.

    Returns:
        The median of each, in microseconds a call.
    """
    batches = {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        once = time.perf_counter() - began
        batches[name] = max(1, int(_SHORT_SECONDS * 10 / max(once, 1e-7))) if once < _SHORT_SECONDS else 1
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < 7:
        for name, call in calls.items():
            batch = range(batches[name])
            began = time.perf_counter()
            for _ in batch:
                call()
            samples[name].append((time.perf_counter() - began) / len(batch))
    return {name: statistics.median(times) * 1e6 for name, times in samples.items()}


def per_call(call: Callable[[], object], times: int) -> float:
    """Returns microseconds a call over a fixed number of calls (all workers have to make equally many)."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6
