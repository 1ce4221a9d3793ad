"""JAX is imported once for all tests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def there_to_stay() -> None:
    """Lets JAX open what it keeps open: on a GPU, its driver's files, with the first computation."""
    jax.numpy.zeros(1).block_until_ready()


@pytest.fixture(scope="module", autouse=True)
def forked_from_it(there_to_stay: None, forked_from: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """In these tests the workers of `multiverso.run` are forks of an interpreter that has imported it."""
    with forked_from("jax"):
        yield
