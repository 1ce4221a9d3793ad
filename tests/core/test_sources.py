"""What a group of kernels is compiled anew for: a change in its own sources, directly or not, and in no other."""

from __future__ import annotations

import ast
import contextlib
import gc
import re
import sys
import threading
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


KERNEL = """\"\"\"A module.\"\"\"
from multiverso.layout import words as at

STRIPE = 128 * 1024  # bytes


@inner
def add_into(table, delta):
    \"\"\"``table += delta``.\"\"\"
    for i in range(table.size):
        table[i] += delta[i]
"""


@pytest.mark.parametrize(
    "now, then",
    [
        ("``table += delta``.", "Adds."),
        ('    """``table += delta``."""\n', ""),
        ("# bytes", "# of an array"),
        ("  # bytes", ""),
        ("    for i", "    # one after another\n\n    for i"),
        ("128 * 1024", "(128 * 1024)"),
        ("A module.", "A module, and what it is for."),
    ],
)
def test_comments_docstrings_and_the_places_of_lines_change_no_digest(now: str, then: str) -> None:
    assert KERNEL.count(now) == 1
    assert sources.meaning_of(KERNEL.replace(now, then).encode()) == sources.meaning_of(KERNEL.encode())


@pytest.mark.parametrize(
    "now, then",
    [
        ("128 * 1024", "128 * 1025"),
        ("+= delta[", "-= delta["),
        ("@inner\n", ""),
        ("table, delta", "table, delta, extra"),
        ("words as at", "keyed as at"),
        ("        table[i] +=", "        if i:\n            table[i] +="),
    ],
)
def test_what_is_compiled_changes_the_digest(now: str, then: str) -> None:
    assert KERNEL.count(now) == 1
    assert sources.meaning_of(KERNEL.replace(now, then).encode()) != sources.meaning_of(KERNEL.encode())


def test_other_threads_parse_meanwhile() -> None:
    """Where CPython counts the depth of all threads' trees together, it raises SystemError: it must not be ours."""
    text = (PACKAGE / "layout/words.py").read_bytes()
    ended = threading.Event()

    def parse() -> None:
        while not ended.is_set():
            with contextlib.suppress(SystemError):
                ast.parse(text)

    def collected(phase: str, found: dict[str, int]) -> None:  # Python's code in the middle of a tree
        pass

    others = [threading.Thread(target=parse) for _ in range(2)]
    interval = sys.getswitchinterval()
    gc.callbacks.append(collected)
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        assert len({sources.meaning_of(text) for _ in range(30)}) == 1
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        gc.callbacks.remove(collected)
        for other in others:
            other.join()


def test_who_comes_in_the_middle_of_parsing_parses_too() -> None:
    """As a signal's handler that uses a table: it waited for a lock that its own thread had."""
    found: list[str] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        if not found:
            found.append("")  # it comes once
            found[0] = sources.meaning_of(KERNEL.encode())

    gc.callbacks.append(collected)
    try:
        whole = sources.meaning_of(20 * KERNEL.encode())
        gc.collect()  # where it does not come in the middle
    finally:
        gc.callbacks.remove(collected)
    assert found == [sources.meaning_of(KERNEL.encode())]
    assert whole == sources.meaning_of(20 * KERNEL.encode())


def test_each_offset_of_a_shared_word_counts() -> None:
    text = (PACKAGE / "layout/words.py").read_text()
    whole = sources.meaning_of(text.encode())
    words = [line for line in text.splitlines() if re.match(r"[A-Z_0-9]+ = [A-Z]+\.int(32|64)\(", line)]
    assert len(words) > 60
    for line in words[::10]:
        without = text.replace(f"\n{line}\n", "\n", 1)
        assert without != text
        assert sources.meaning_of(without.encode()) != whole, line


def test_what_a_text_means_is_found_out_once_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    monkeypatch.setattr(sources, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(sources, "_known", sources._kept_in)
    digest = sources.digest_of([file])
    monkeypatch.setattr(sources, "meaning_of", None)
    assert sources.digest_of([file]) == digest
    monkeypatch.undo()
    for damaged in ("", "[1]", '{"a": 1}'):
        (tmp_path / sources._KEPT).write_text(damaged)
        (tmp_path / sources._KEPT).chmod(0o600)
        assert sources._kept_in(tmp_path) == {}
