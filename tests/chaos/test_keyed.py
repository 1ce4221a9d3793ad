"""Short runs of ``benchmarks/chaos_keyed.py``: workers are killed in the middle of adding and removing keys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos_keyed.py"


def chaos(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([sys.executable, CHAOS, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, result


def test_the_laws_of_keys_hold_whoever_is_killed() -> None:
    code, result = chaos("--seed", "11", "--kills", "6", "--stepped", "0.3")
    assert result["kills"] == 6
    assert not any(result["broken"].values()), result
    assert code == 0


def test_each_law_notices_when_it_is_broken() -> None:
    code, result = chaos("--seed", "12", "--kills", "8", "--break", "all")
    assert all(result["broken"].values()), result
    assert code == 1
