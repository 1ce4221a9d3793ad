"""A short run of ``benchmarks/chaos_rows.py``: workers are killed in the middle of adds and exchanges of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos_rows.py"


def test_killed_calls_are_prefixes_of_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, CHAOS, "--seed", "7", "--kills", "16", "--stepped", "0.3", "--json", path],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["kills"] >= 16
    assert (result["wrong"], result["torn"], result["held"]) == (0, 0, 0)
