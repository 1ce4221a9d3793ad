"""Fixtures of Platoon's tests, and more time for them: the first may compile kernels, on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from platoon_support import SECONDS, Experiment, until

from warm import Warm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(2 * SECONDS))


@pytest.fixture
def experiment(tmp_path: Path, warm: Warm) -> Iterator[Experiment]:
    made = Experiment(tmp_path, warm)
    yield made
    made.end()


@pytest.fixture
def wait_until() -> Any:
    return until
