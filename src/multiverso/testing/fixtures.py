"""Fixtures for pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import multiverso
from multiverso.runtime import Session


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Gives the current session of a job of one worker, new for each test.

    Where what is tested calls ``init()`` itself, it gets this session; with other options it is refused, and needs a
    test without this fixture.

    What a test leaves open, or has left open before without this fixture, ends here: a forgotten ``shutdown()`` fails
    no other test.
    """
    multiverso.shutdown()
    monkeypatch.setitem(multiverso.init.__kwdefaults__ or {}, "exist_ok", True)  # for those who have imported it, too
    try:
        yield multiverso.init()
    finally:
        multiverso.shutdown()
