"""A few seconds of the node's fuzzer, and the corpus of what it has found; ``make fuzz`` runs it for longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_node


@pytest.mark.parametrize("seed", [1, 5])
def test_a_node_survives_whatever_is_sent(seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert fuzz_node.run(1.5, seed) > 10
    assert "node: the connection of process" in capfd.readouterr().err  # what was wrong is in the log
