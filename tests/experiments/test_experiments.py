"""The experiment programs, run as a person runs them, at a small size."""

from __future__ import annotations

import csv
import functools
import importlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from frameworks import PROGRAMS, TORCH
from warm import Warm

ROOT = Path(__file__).resolve().parent.parent.parent
EXPERIMENTS = ROOT / "examples" / "experiments"
SECONDS = 580

pytestmark = pytest.mark.timeout(600)  # several processes, each of which imports PyTorch


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., str]]:
    """Runs a program and returns what it said; all, and their workers, are forked from one that has imported torch."""
    modules = (*TORCH, *PROGRAMS, "sklearn.datasets", "matplotlib.pyplot", "multiverso.torch")
    with Warm(*modules, forks=True) as warm:
        yield functools.partial(_start, warm)


def _start(warm: Warm, program: Path | str, *arguments: str, fails: bool = False) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = warm.run(str(program), *arguments, cwd=EXPERIMENTS, env=env, timeout=SECONDS)
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stderr if fails else result.stdout


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("plan")


def test_one_command_makes_tables_a_csv_and_three_pictures(tmp_path: Path, start: Callable[..., str]) -> None:
    configurations = ["0M-1G", "1M-2G-3S,rule=easgd:0.3,mode=sync,hosts=2"]
    size = ["--epochs", "2", "--width", "4", "--drops", "1"]
    said = start(EXPERIMENTS / "run.py", *configurations, *size, "--out", str(tmp_path))
    assert "sync-2H: epoch 2 of 2" in said, "no progress is shown"
    tables = (tmp_path / "tables.md").read_text()
    for title in ("Hardware", "Settings", "Model", "Results"):
        assert f"## {title}" in tables
    assert "| 1M-2G-3S-easgd:0.3-sync-2H | 2 | every 3 | easgd(0.3), sync |" in tables
    with (tmp_path / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["configuration"], row["epoch"]) for row in rows] == [
        (code, epoch) for code in ("0M-1G", "1M-2G-3S-easgd:0.3-sync-2H") for epoch in "12"
    ]
    assert all(0 <= float(row["accuracy"]) <= 1 and float(row["seconds"]) > 0 for row in rows)
    for name in ("accuracy_epoch", "accuracy_time", "time_epoch"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


@pytest.mark.parametrize(
    "text, words",
    [
        ("2M-1G", "a configuration is called"),
        ("1M-4G", "a configuration is called"),
        ("0M-4G", "there is one process"),
        ("1M-4G-0S", "are 1 or more"),
        ("1M-4G-1S,speed=9", "no 'speed'"),
        ("1M-2G-1S,hosts=3", "hosts= is from 1 to the 2 processes"),
        ("1M-4G-1S,mode=never", "mode= is async, sync, bounded"),
        ("1M-4G-1S,rule=magic", "no rule 'magic'"),
        ("1M-4G-1S,rule=easgd:7", "above 0 and at most 1"),
        ("1M-4G-1S,rule=averaging", "defined for mode=sync"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(text: str, words: str, plan: ModuleType) -> None:
    with pytest.raises(SystemExit, match=re.escape(words)):
        plan.parse_configuration(text)


def test_configurations_have_the_originals_names(plan: ModuleType) -> None:
    for text in (*plan.ORIGINAL, "1M-2G-10S"):
        assert plan.parse_configuration(text).code == text
    made = plan.parse_configuration("1M-8G-10S,rule=easgd:0.1,mode=bounded")
    assert (made.workers, made.every, made.code) == (8, 10, "1M-8G-10S-easgd:0.1-bounded")


def test_the_rate_drops_as_in_the_originals(plan: ModuleType) -> None:
    rates = [plan.CIFAR10.rate_at(epoch) for epoch in range(plan.CIFAR10.epochs)]
    assert len(rates) == 82
    assert (rates[0], rates[40]) == (0.1, 0.1)
    assert rates[41] == rates[60] == pytest.approx(0.01)
    assert rates[61] == rates[81] == pytest.approx(0.001)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["1M-4G-1S,rule=magic"], "no rule 'magic'"),
        (["1M-4G-1S", "--batch", "1000"], "a worker has 359 images only"),
        (["--dataset", "cifar10", "--folder", "/nowhere"], "has neither data_batch_1 nor cifar-10-python.tar.gz"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_started(
    arguments: list[str], words: str, tmp_path: Path, start: Callable[..., str]
) -> None:
    assert words in start(EXPERIMENTS / "run.py", *arguments, "--out", str(tmp_path / "out"), fails=True)
    assert not (tmp_path / "out").exists()


def test_resnet_32_has_the_size_of_the_originals(start: Callable[..., str]) -> None:
    program = "import models; print(models.parameters(models.resnet(3, 10)))"
    assert start("-c", program).strip() == "464154"


def test_cifar_10_is_read_from_its_files_and_other_pickles_are_not_run(
    tmp_path: Path, start: Callable[..., str]
) -> None:
    number = 60_000 // 6
    images = np.zeros((number, 3072), np.uint8)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        content = {b"data": images, b"labels": [3] * number}
        (tmp_path / name).write_bytes(pickle.dumps(content))
    read = f"x = data.cifar10(pathlib.Path({str(tmp_path)!r}))"
    program = f"import data, pathlib; {read}; print(x.train.shape, x.validation.shape)"
    assert start("-c", program).strip() == "(50000, 3, 32, 32) (10000, 3, 32, 32)"
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(os.system))
    assert "which no file of CIFAR-10 does" in start("-c", program, fails=True)


def test_the_loss_of_sharing_is_measured_in_pairs(tmp_path: Path, start: Callable[..., str]) -> None:
    few = ["--seeds", "100", "101", "--epochs", "2", "--ways", "0", "4"]
    start(EXPERIMENTS / "sharing_loss.py", *few, "--out", str(tmp_path))
    report = json.loads((tmp_path / "sharing_loss.json").read_text())
    assert [(result["rule"], result["every"]) for result in report["results"]] == [
        (rule, every) for rule in ("asgd (async)", "averaging (sync, rate x4)") for every in (1, 3, 10)
    ]
    with (tmp_path / "sharing_loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 2 * 5, "rules x intervals x seeds x folds"
    for result in report["results"]:
        mine = [row for row in rows if (row["rule"], int(row["every"])) == (result["rule"], result["every"])]
        points = np.mean([100 * (float(row["accuracy_4"]) - float(row["accuracy_1"])) for row in mine])
        assert result["points"] == pytest.approx(points, abs=1e-2)
        assert result["low"] <= result["points"] <= result["high"]
    with (tmp_path / "sharing_loss_epochs.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert [row["epoch"] for row in curves] == ["1", "2"] * (1 + 2 * 3), "one worker, and rules x intervals"
    ends = {(row["rule"], row["every"]): float(row["accuracy"]) for row in curves if row["epoch"] == "2"}
    assert ends["one worker", "1"] == pytest.approx(report["accuracy_of_one"], abs=1e-5)
    for result in report["results"]:
        end = ends[result["rule"], str(result["every"])]
        assert 100 * (end - ends["one worker", "1"]) == pytest.approx(result["points"], abs=1e-2)


def test_the_straggler_is_measured_in_every_consistency(tmp_path: Path, start: Callable[..., str]) -> None:
    quick = ["--repeat", "1", "--seconds", "0.001", "--target", "0.5", "--out", str(tmp_path / "out.json")]
    report = json.loads(start(ROOT / "benchmarks" / "straggler.py", *quick))
    assert report == json.loads((tmp_path / "out.json").read_text())
    modes = ["asynchronous", "staleness 16", "staleness 4", "synchronous", "quorum 3"]
    assert list(report["times_faster_than_synchronous"]) == modes
    assert report["times_faster_than_synchronous"]["synchronous"] == 1


def test_what_is_done_while_workers_are_killed_is_measured(tmp_path: Path, start: Callable[..., str]) -> None:
    few = [
        "--mode",
        "quorum 6",
        "--repeat",
        "1",
        "--seconds",
        "0.005",
        "--minibatches",
        "600",
        "--every",
        "0.5",
        "--run-seconds",
        "6",
    ]
    report = json.loads(start(ROOT / "benchmarks" / "goodput.py", *few, "--out", str(tmp_path / "out.json")))
    assert report == json.loads((tmp_path / "out.json").read_text())
    (mode,) = report["modes"].values()
    assert mode["of_the_first_mode"] == 1
    assert mode["minibatches_a_second"]["mean"] > 0
    assert mode["validation_accuracy"]["mean"] > 50
