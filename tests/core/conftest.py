"""Lets the tests of this folder import its `core_support`, and gives them a job of one worker."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import core_support

from multiverso.runtime import Node, Session


@pytest.fixture(scope="session", autouse=True)
def interpreter(interpreters: Callable[[str], Any]) -> None:
    """What `core_support.Worker` is forked from."""
    core_support.interpreters.append(interpreters("multiverso"))


@pytest.fixture
def alone() -> Iterator[Session]:
    """The session of a job's only worker."""
    with Node(1) as node, Session(node.address, timeout_seconds=30) as session:
        # pytest keeps what it has given to a test; this lets the memory go all the same
        yield weakref.proxy(session)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles what the tests need before the first one's deadline begins: on a cold machine that takes minutes."""
    if session.config.option.collectonly:
        return
    from multiverso.cli.warmup import everything
    from multiverso.compiling.on_demand import ensure_all
    from multiverso.spec.table import DTYPES

    kernels = [f"multiverso.kernels.{name}" for name in ("dense", "rows", "rounds.calls")]
    ensure_all(everything(("float32",)) + [(name, dtype) for dtype in DTYPES for name in kernels])
