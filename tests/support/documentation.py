"""The documentation as it is built, and the programs on its pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def script_of(name: str) -> str:
    """The Python of a how-to page, after what it takes for given."""
    given = ROOT / "tests" / "pages" / name / "given.py"
    blocks = PYTHON.findall((ROOT / "docs" / "how-to" / f"{name}.md").read_text())
    assert blocks
    return "\n".join([given.read_text() if given.exists() else "", *blocks])


def run_page(name: str, folder: str) -> None:
    """Runs it in a folder."""
    os.chdir(folder)
    exec(compile(script_of(name), f"{name}.md", "exec"), {"__name__": "__main__"})


def build(target: Path) -> Path:
    """Builds it into a folder, which it returns; fails with what MkDocs complains about."""
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return target
