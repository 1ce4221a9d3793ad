"""Lets the tests of this folder import its `security_support`, and gives them a place that all may look into."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may pass through: pytest's own are for one user only."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)
