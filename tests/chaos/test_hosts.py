"""A short run of benchmarks/chaos_hosts.py: a host and the coordinator are killed, and the job goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from chaos_hosts import episode


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The jobs' deadline is for what they do, not for a cold cache."""
    from multiverso.kernels.compiling import ensure

    for module, dtype in (("waits", None), ("agreeing", None), ("agreeing", "int64"), ("dense", "int64")):
        ensure("module", f"multiverso.kernels.{module}", dtype)


@pytest.mark.parametrize(("kind", "seed"), [("host", 3), ("coordinator", 4)])
def test_a_job_whose_host_is_killed_goes_on_from_its_checkpoint(kind: str, seed: int) -> None:
    found = episode(seed, kind, workers=2, steps=40)
    assert (found["processes_left"], found["files_left"]) == ([], [])
    assert abs(found["adds_lost"]) < 2 * 40
