"""The page on platforms says what docs/results/platforms.json does, and has each Python that the package names."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
specification = importlib.util.spec_from_file_location("platforms", ROOT / "scripts" / "platforms.py")
assert specification is not None
assert specification.loader is not None
platforms = importlib.util.module_from_spec(specification)
specification.loader.exec_module(platforms)


def test_the_table_is_made_of_the_results() -> None:
    runs = json.loads(platforms.RESULTS.read_text())
    shown = platforms.PAGE.read_text().partition(platforms.BEGIN)[2].partition(platforms.END)[0]
    assert shown == platforms.table(runs)


def test_every_python_that_the_package_names_has_been_run() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = {text.rpartition(" ")[2] for text in classifiers if text.startswith("Programming Language :: Python :: 3.")}
    runs = json.loads(platforms.RESULTS.read_text())
    assert named == {".".join(run["python"].split()[0].split(".")[:2]) for run in runs if run["machine"] == "x86_64"}


def test_a_later_run_takes_the_place_of_the_one_before() -> None:
    run = {"python": "3.12.1", "machine": "x86_64", "kernels": "x86-64-v3", "numpy": "2.4"}
    before = [{**run, "tests": "1 passed", "date": "then", "commit": "a"}]
    other = {**run, "python": "3.9.9", "tests": "3 passed in 7.00s"}
    wheel = {"tried": [{**run, "tests": "2 passed in 9.00s"}, other]}
    runs = platforms.added(before, wheel, {"date": "now", "commit": "b"})
    assert [(one["python"], one["tests"], one["date"]) for one in runs] == [
        ("3.9.9", "3 passed", "now"),
        ("3.12.1", "2 passed", "now"),
    ]
