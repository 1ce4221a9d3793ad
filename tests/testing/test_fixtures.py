"""The fixture for tests of programs that use multiverso."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

import multiverso as mv
from multiverso import init
from multiverso.testing import session

def test_one(session):
    assert mv.current() is session
    mv.ArrayTableHandler(3).add(1)

def test_what_calls_init_itself(session):
    assert init() is mv.init() is session
    with pytest.raises(mv.errors.StartupError, match="other options: sync"):
        init(sync=True)

def test_that_forgets_to_shut_down():
    mv.init()

def test_another(session):
    assert mv.ArrayTableHandler(3).get().tolist() == [0, 0, 0]
    mv.shutdown()

def test_none_is_open():
    mv.init()
    with pytest.raises(mv.errors.StartupError, match="already initialised"):
        mv.init()
    mv.shutdown()
"""


def test_a_forgotten_shutdown_fails_no_other_test(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_theirs.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "5 passed" in done.stdout, done.stdout + done.stderr
