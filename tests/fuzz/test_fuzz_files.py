"""A little of the fuzzing with every run of the tests, and what it has found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_files import check, fuzz

import multiverso as mv
from multiverso.runtime import Node, Session
from multiverso.tables.save_all import save_all

FOUND = sorted(
    p for p in (Path(__file__).parent / "corpus").glob("*.*") if p.suffix != ".jsonl"
)  # the node has its own


def test_damaged_files_change_nothing() -> None:
    assert fuzz(2.0, seed=1) > 10


@pytest.mark.parametrize("found", FOUND, ids=lambda path: path.name)
def test_what_was_found_stays_found(tmp_path: Path, found: Path) -> None:
    with Node(1) as node, Session(node.address) as session:
        table = mv.MatrixTableHandler(2, 3, range(6), updater="nesterov", name="weights", session=session)
        save_all(session, tmp_path)
        place = next(tmp_path.glob(f"*{found.suffix}"))
        check(session, table, tmp_path, place, found.read_bytes())
