"""Lets the tests of this folder import its `core_support`, and gives them a job of one worker."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import core_support

from forked_workers import Interpreter
from multiverso.runtime import Node, Session


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    """What `core_support.Worker` is forked from."""
    with closing(Interpreter("multiverso", "llvmlite.binding")) as made:
        core_support.interpreters.append(made)
        yield
        core_support.interpreters.remove(made)


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
    from multiverso.kernels.compiling import ensure
    from multiverso.spec import DTYPES

    ensure("module", "multiverso.kernels.waits", None)
    for dtype in DTYPES:
        for group in ("dense", "rows", "rounds"):
            ensure("module", f"multiverso.kernels.{group}", dtype)
