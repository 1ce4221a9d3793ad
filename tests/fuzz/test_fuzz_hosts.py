"""A second of the fuzzer of the ports between hosts; ``make fuzz`` runs it for longer."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_hosts


def test_strangers_change_nothing_and_any_frame_is_taken_or_refused() -> None:
    assert fuzz_hosts.run(0.5, 1) > 10 * 400  # so many in each of its least rounds
