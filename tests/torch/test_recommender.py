"""The recommender: the loss curve of PyTorch alone, and killed and started again."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frameworks import TORCH
from warm import Warm

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "examples/recommender/two_tower.py"
# torch's own, about the gradients of sparse embeddings
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the program here, and returns its losses."""
    import torch

    threads = torch.get_num_threads()

    def here(*options: str) -> list[float]:
        file = tmp_path / "curve.json"
        monkeypatch.setattr(sys, "argv", [str(PROGRAM), *options, "--json", str(file)])
        runpy.run_path(str(PROGRAM), run_name="__main__")
        losses: list[float] = json.loads(file.read_text())["losses"]
        return losses

    yield here
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of tqdm's that outlives the test."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


def test_one_worker_has_the_losses_of_pytorch_alone(run: Any) -> None:
    """Rows over tables with Adagrad there, beside sparse embeddings with PyTorch's own."""
    theirs = run("--steps", "120", "--alone")
    ours = run("--steps", "120")
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)


def test_it_goes_on_from_its_last_save(run: Any, tmp_path: Path) -> None:
    options = ["--directory", str(tmp_path / "saved"), "--save-every", "20", "--picture", str(tmp_path / "a.png")]
    first = run("--steps", "50", *options)
    again = run("--steps", "70", *options)
    assert again[:40] == first[:40]  # saved after 40 steps
    np.testing.assert_allclose(again[40:50], first[40:], rtol=1e-5)  # those are done again, to the same
    assert len(again) == 70
    assert (tmp_path / "a.png").stat().st_size > 0


def test_two_workers_train_together() -> None:
    with Warm(*TORCH, "multiverso.torch", "tqdm", "llvmlite.binding") as warm:
        first, second = warm.run_job(2, str(PROGRAM), "--steps", "60", cwd=ROOT, env=os.environ)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert " users, " in first.stdout
