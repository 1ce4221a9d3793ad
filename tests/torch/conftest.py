"""PyTorch is imported once for all tests."""

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from frameworks import TORCH


@pytest.fixture(scope="session", autouse=True)
def there_to_stay() -> None:
    """Imports what the first optimizer would, and takes its objects out of the garbage collector's sight."""
    for name in TORCH:
        importlib.import_module(name)
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():  # and what the first backward on a GPU opens
        torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def forked_from_it(there_to_stay: None, forked_from: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """In these tests the workers of `multiverso.run` are forks of an interpreter that has imported it."""
    with forked_from("torch"):
        yield
