"""Fixtures for pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import multiverso
from multiverso.runtime import Session


@pytest.fixture
def session() -> Iterator[Session]:
    """Gives the current session of a job of one worker, new for each test.

    What a test leaves open, or has left open before without this fixture, ends here: a forgotten ``shutdown()`` fails
    no other test.
    """
    multiverso.shutdown()
    try:
        yield multiverso.init()
    finally:
        multiverso.shutdown()
