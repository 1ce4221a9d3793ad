"""Lets the tests of this folder import what helps them, and compiles what they need before the first deadline."""

from __future__ import annotations

import os
import random
import socket
import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "core"):
    sys.path.insert(0, str(folder))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    from multiverso.kernels.compiling import ensure
    from multiverso.spec import DTYPES

    ensure("module", "multiverso.kernels.agreeing", None)
    ensure("module", "multiverso.kernels.waits", None)
    for dtype in DTYPES:
        for group in ("agreeing", "dense", "rows"):
            ensure("module", f"multiverso.kernels.{group}", dtype)
    for dtype in (None, "float32"):
        for group in ("rounds", "chained"):
            ensure("module", f"multiverso.kernels.{group}", dtype)


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
