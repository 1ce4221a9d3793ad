"""The pages on Lasagne and Keras 1, run by two workers; the pages say that they are tested here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from documentation import script_of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["lasagne", "keras1"])
def test_what_the_page_shows_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(f"{script_of(page)}\nprint('done')\n")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    result = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-W", "ignore", script],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["done", "done"]
