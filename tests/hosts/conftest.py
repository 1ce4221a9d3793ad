"""Lets the tests of this folder import its `hosts_support`, and compiles what they need before the first deadline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    from multiverso.kernels.compiling import ensure
    from multiverso.spec import DTYPES

    ensure("module", "multiverso.kernels.agreeing", None)
    for dtype in DTYPES:
        ensure("module", "multiverso.kernels.agreeing", dtype)
