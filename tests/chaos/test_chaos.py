"""A short run of ``make chaos``: kills from a seed, in every consistency, of workers, nodes and a launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.parametrize("seed", [11])
def test_nothing_is_lost_and_nothing_is_left(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, CHAOS, "--seed", str(seed), "--kills", "20", "--launchers", "1", "--json", path],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["trouble"] == []
    assert result["kills"] >= 20
    assert result["interruptions"] > 0
    assert result["adds_lost"] == 0
    assert set(result["left_behind"].values()) == {0}
    assert set(result["waits"]) == {"continue", "stop", "node", "elastic", "launcher", "all"}
