"""Lets the tests of this folder import `page_support`, and gives that what its jobs are forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import page_support

from forked_workers import Interpreter
from frameworks import PROGRAMS


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """What `page_support` forks a job's launcher from, and that its workers."""
    modules = (*PROGRAMS, "multiverso.cli.main", "multiverso.launch.watched", "multiverso.page.feed")
    made = Interpreter(*modules, forks=True)
    page_support.interpreters.append(made)
    yield
    made.close()
