"""What docs/security.md promises has the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_every_test_that_the_page_names_is_there() -> None:
    page = (TESTS.parent / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 20
    assert named <= there
