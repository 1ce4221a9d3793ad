"""The examples, as their files say to run them, on less data."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warm import Warm

EXAMPLES = Path(__file__).parents[2] / "examples" / "platoon"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def warm(warm_torch: Warm) -> Warm:
    """Has imported what the LSTM's workers need."""
    return warm_torch


def run(experiment: Any, folder: str, name: str, *arguments: str) -> str:
    shutil.copytree(EXAMPLES, experiment.folder / "platoon", ignore=shutil.ignore_patterns("PLATOON_LOGS"))
    experiment.folder = experiment.folder / "platoon" / folder
    result = experiment.launch(name, *arguments)
    assert result.code == 0, result
    return str(result.logs["controller.out"])


def test_lstm_by_param_sync(experiment: Any) -> None:
    said = run(
        experiment,
        *("lstm", "lstm", "-D", "cpu", "cpu", "-c=--max-mb 120 --valid-freq 40 --patience 2"),
        "-w=--most 400",
    )
    assert re.search(r"minibatches=1\d\d seconds=\S+ per_second=\S+ best_valid_error=0\.\d+", said)


def test_lstm_by_all_reduce(experiment: Any, imdb: Path) -> None:
    said = run(
        experiment, "synchronous_lstm", "lstm", "-D", "cpu", "cpu", "-c=--epochs 2", f"-w=--epoch 10 --imdb {imdb}"
    )
    assert re.search(r"epochs=2 steps=20 seconds=\S+ best_valid_error=0\.\d+", said)


@pytest.mark.parametrize("workers", [1, 3])
def test_pixel_sum(experiment: Any, workers: int) -> None:
    said = run(experiment, *("simple_batched_pixel_sum", "batched_pixel_sum", "-D", *["cpu"] * workers, "-c=--turns 5"))
    assert re.search(r"minibatches=90 seconds=\S+ correct=True", said)


def test_the_docstrings_are_two_real_sources() -> None:
    import text_task

    data = text_task.load(most=500)
    for texts, labels in (data.train, data.valid, data.test):
        assert len(texts) == len(labels)
        assert set(labels) == {0, 1}
        assert all(1 <= word < data.words for text in texts for word in text)
    assert len(data.train[1]) > 500


@pytest.fixture
def imdb(tmp_path: Path) -> Path:
    """A file as the examples of the original take it, of random words."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 9000, 70).tolist() for _ in range(100)]
    file = tmp_path / "imdb.pkl"
    with file.open("wb") as out:
        pickle.dump((texts, [0, 1] * 50), out, protocol=2)
        pickle.dump((texts[:20], [0, 1] * 10), out, protocol=2)
    return file


def test_imdb_is_read_and_code_in_it_is_not_run(imdb: Path, tmp_path: Path) -> None:
    import text_task

    data = text_task.load(str(imdb))
    assert (len(data.train[1]), len(data.valid[1]), len(data.test[1])) == (95, 5, 20)
    assert max(map(len, data.train[0])) == 60
    assert max(word for text in data.train[0] for word in text) < 5000

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "run"),)

    imdb.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="wants to run"):
        text_task.load(str(imdb))
    assert not (tmp_path / "run").exists()
