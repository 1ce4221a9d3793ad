"""Lets the tests of this folder import what helps them, and compiles what they need before the first deadline."""

from __future__ import annotations

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
