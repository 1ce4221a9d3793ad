"""The pages on Lasagne and Keras 1, run by two workers; the pages say that they are tested here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", ["lasagne", "keras1"])
def test_what_the_page_shows_runs(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks) + "\nprint('done')\n")
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
