"""PyTorch is imported once for all tests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked_from_it(forked_from: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """In these tests the workers of `multiverso.run` are forks of an interpreter that has imported it."""
    with forked_from("torch"):
        yield
