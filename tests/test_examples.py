"""The examples do what their first lines say, on real data."""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from frameworks import PROGRAMS
from warm import Warm

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = "examples/logistic_regression.py"
LAST_LINE = r"workers={} accuracy=(0\.9\d\d) seconds=\d+\.\d\d exchanges_per_second=\d+"


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Has imported what the example does: for runs that are about what it learns, and not about how it starts."""
    with Warm(*PROGRAMS, "multiverso.cli.main", "sklearn.datasets", forks=True) as made:
        yield made


def start(warm: Warm, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(EXAMPLE, *arguments, cwd=ROOT, env=os.environ)


def train(warm: Warm, workers: int, *options: str, hosts: int = 1) -> list[str]:
    """The master's lines: the others say nothing."""
    results = warm.run_job(workers, EXAMPLE, *options, cwd=ROOT, env=os.environ, hosts=hosts)
    assert [result.returncode for result in results] == [0] * workers, results
    assert [result.stdout for result in results[1:]] == [""] * (workers - 1)
    return results[0].stdout.splitlines()


@pytest.mark.parametrize(("hosts", "options"), [(1, ["--staleness", "3"]), (2, [])])
def test_it_learns_the_digits_without_rounds(warm: Warm, hosts: int, options: list[str]) -> None:
    lines = train(warm, 2, "--epochs", "12", *options, hosts=hosts)
    assert [re.match(r"epoch=(\d+) accuracy=", line)[1] for line in lines[:-1]] == [str(n) for n in range(1, 13)]  # type: ignore[index]
    assert re.fullmatch(LAST_LINE.format(2), lines[-1])


def test_synchronous_runs_are_the_same_on_one_host_and_on_two(warm: Warm) -> None:
    first, second = (train(warm, 2, "--sync", "--epochs", "5", hosts=hosts) for hosts in (1, 2))
    assert first[:-1] == second[:-1]
    assert first[-1].split()[:2] == second[-1].split()[:2]


def write_idx(path: Path, values: np.ndarray) -> None:
    content = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled digits in MNIST's four files, two of them compressed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order] * 15).astype(np.uint8), digits.target[order].astype(np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images[:1500])
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels[:1500])
    write_idx(tmp_path / "t10k-images-idx3-ubyte", images[1500:])
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels[1500:])
    return tmp_path


def test_it_reads_idx_files(folder: Path, warm: Warm) -> None:
    result = start(warm, "--data", str(folder), "--epochs", "12")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.fullmatch(LAST_LINE.format(1), result.stdout.splitlines()[-1])


def test_it_names_the_file_that_is_missing_or_cut(folder: Path, warm: Warm) -> None:
    (folder / "train-labels-idx1-ubyte").unlink()
    result = start(warm, "--data", str(folder))
    assert result.returncode == 1
    assert "neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz" in result.stderr
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(10, np.uint8))
    cut = (folder / "train-labels-idx1-ubyte").read_bytes()[:-1]
    (folder / "train-labels-idx1-ubyte").write_bytes(cut)
    result = start(warm, "--data", str(folder))
    assert result.returncode == 1
    assert "train-labels-idx1-ubyte is not a complete IDX file" in result.stderr


def test_the_demo_shows_one_and_four_workers_side_by_side(warm: Warm, tmp_path: Path) -> None:
    result = warm.run_whole(tmp_path, "scripts/demo.py", cwd=ROOT, env=os.environ)
    assert result.returncode == 0, result.stdout + result.stderr
    table = result.stdout.splitlines()[-10:]
    assert re.search(r"1 worker +4 workers$", "\n".join(table), re.M)
    assert re.search(r"^accuracy at the end +0\.9\d\d +0\.9\d\d$", "\n".join(table), re.M)


def test_every_example_is_run_by_some_test() -> None:
    """By its name, or, where several scripts make one example, by its folder's."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    scripts = [path for path in (ROOT / "examples").rglob("*.py") if "__main__" in path.read_text()]
    assert scripts
    named = [path for path in scripts if path.name in tests or f'"{path.parent.name}"' in tests]
    assert sorted(set(scripts) - set(named)) == []
