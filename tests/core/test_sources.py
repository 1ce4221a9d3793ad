"""What a group of kernels is compiled anew for: a change in its own sources, directly or not, and in no other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import multiverso
from multiverso.compiling import sources

PACKAGE = Path(multiverso.__file__).parent
GROUPS = ("dense", "rows", "rounds/calls", "reduce", "rules", "waits")


def imports(path: Path) -> set[Path]:
    """The files of ours that a module imports when it is imported, as Python's own parser sees them."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            file = PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("multiverso.") and file.is_file():
                found.add(file)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_a_groups_sources_are_all_that_it_imports(group: str) -> None:
    known = sources.sources_of(PACKAGE / "kernels" / f"{group}.py")
    assert {PACKAGE / "kernels" / f"{group}.py", PACKAGE / "layout/words.py"} <= set(known)
    for path in known:
        assert imports(path) <= set(known), path


def test_a_change_in_rounds_does_not_concern_whole_tables() -> None:
    dense = sources.sources_of(PACKAGE / "kernels" / "dense.py")
    assert PACKAGE / "kernels" / "rounds.py" not in dense
    assert PACKAGE / "compiling" / "atomics.py" in dense


def test_a_change_in_any_source_changes_the_digest(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("a = 1\n")
    second.write_text("a = 2\n")
    assert sources.digest_of([first]) != sources.digest_of([second])
    assert sources.digest_of([first], "numba 1") != sources.digest_of([first], "numba 2")
    assert sources.digest_of([first], "numba 1") == sources.digest_of([first], "numba 1")
