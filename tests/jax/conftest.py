"""JAX is imported once for all tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked_from_it(interpreters: Callable[..., Any]) -> Iterator[None]:
    """In these tests the workers of `multiverso.run` are forks of an interpreter that has imported it."""
    with interpreters("optax", "multiverso.jax", "llvmlite.binding").forking():
        yield
