"""Short runs of the benchmarks that kill among hosts: who is left goes on, or the job begins again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import chaos_between_hosts
import exact_between_hosts
from chaos_hosts import episode


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The jobs' deadline is for what they do, not for a cold cache."""
    chaos_between_hosts.compile_kernels()


@pytest.mark.timeout(600)  # with all of that to compile
def test_who_is_left_of_a_worker_a_node_a_host_or_the_coordinator_goes_on_or_is_told(tmp_path: Path) -> None:
    """In each phase, and with others in the places of some: the third is a host in rounds, which is lost twice."""
    path = tmp_path / "result.json"
    command = [sys.executable, chaos_between_hosts.__file__, "--seed", "2", "--kills", "8", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["trouble"] == []
    assert set(result["left_behind"].values()) == {0}
    assert set(result["kinds"]) == {"worker", "node", "host", "coordinator", "stall"}


def test_sums_and_bits_are_exact_through_connections_that_are_cut_at_any_byte(tmp_path: Path) -> None:
    """Of the synchronous job, in a second run with other faults, too; `make exact` cuts thousands."""
    path = tmp_path / "result.json"
    program = [sys.executable, exact_between_hosts.__file__, "--json", path]
    options = ["--seed", "2", "--cuts", "30", "--looks", "3"]
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["trouble"] == []
    assert result["cuts"] >= 30
    assert set(result["left_behind"].values()) == {0}


def test_a_job_whose_first_host_is_killed_goes_on_from_its_checkpoint() -> None:
    found = episode(4, "coordinator", workers=2, steps=40)
    assert (found["processes_left"], found["files_left"]) == ([], [])
    assert abs(found["adds_lost"]) < 2 * 40
