"""Files and folders that the texts name in backticks are there, so that whoever follows a name finds something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*(?:/|\.py|\.md|\.toml))`")
BASES = ["src/multiverso", "src", "src/platoon", "docs", "tests", "."]


def _names(text: str) -> set[str]:
    return {name for name in NAMED.findall(text) if not re.match("[A-Z]+_", name)}  # one that users choose


@pytest.fixture(scope="module")
def files() -> set[str]:
    """The names of all files and folders, without the folders that they are in."""
    paths = [path for top in ("src", "tests", "docs") for path in (ROOT / top).rglob("*")]
    return {path.name if path.suffix else f"{path.name}/" for path in paths}


def _is_there(name: str, beside: Path, files: set[str]) -> bool:
    if name in files:  # of a folder that the sentence has named
        return True
    return any(any(base.glob(name)) for base in (beside, *(ROOT / base for base in BASES)))


def _texts() -> list[Path]:
    pages = set((ROOT / "docs" / "internals").glob("*.md"))
    pages -= {ROOT / "docs" / "internals" / "untested.md"}  # its names are those of blocks on other pages
    return [ROOT / "CONTRIBUTING.md", *pages, *(ROOT / "src").rglob("*.py")]


def test_paths_that_texts_name_exist(files: set[str]) -> None:
    named = {path: _names(path.read_text()) for path in _texts()}
    assert sum(map(len, named.values())) > 100  # it does find them
    missing = [
        f"{path.relative_to(ROOT)} names {name}"
        for path, names in named.items()
        for name in sorted(names)
        if not _is_there(name, path.parent, files)
    ]
    assert not missing, "\n".join(missing)
