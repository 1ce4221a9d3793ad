"""Random programs, in short; `make programs` runs many."""

from __future__ import annotations

import comparing
import pytest


@pytest.mark.parametrize("seed", [1, 2])
def test_a_program_that_is_killed_and_resumed_ends_with_the_same_bits(seed: int) -> None:
    comparing.compare(seed)
