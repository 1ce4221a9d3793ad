"""Fixtures of Platoon's tests, and more time for them: the first may compile kernels, on a busy machine."""

from __future__ import annotations

import os
import random
import socket
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


@pytest.fixture
def port() -> int:
    """A port that is free, and stays so: not one of those that the kernel gives out, nor another test process's."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(20_000 + number % 10, 32_000, 10)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
