"""The applications, small: what they learn, with killed workers and when they are started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiverso as mv
from multiverso.apps import ftrl, word2vec
from multiverso.errors import WorkerLostError

pytestmark = pytest.mark.usefixtures("forked_runs")
COLOURS, ANIMALS = ("red", "green", "blue", "white"), ("dog", "cat", "cow", "horse")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two kinds of words that never stand together."""
    random = np.random.default_rng(0)
    kinds = [(*COLOURS, "paint", "brush"), (*ANIMALS, "farm", "field")]
    lines = [" ".join(random.choice(kinds[i % 2], 8)) + ".\n" for i in range(6000)]
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(3):
        (folder / f"{part}.txt").write_text("".join(lines[part::3]))
    return folder


def settings(corpus: Path, run: Path, **others: Any) -> word2vec.Settings:
    return word2vec.Settings(str(corpus), run, dim=16, epochs=4, sample=0, save_seconds=0.0, **others)


def is_learnt(names: list[str], vectors: Any) -> None:
    for word in COLOURS:
        near = {name for name, _ in word2vec.neighbours(names, vectors, word, 5)}
        assert near == ({*COLOURS, "paint", "brush"} - {word}), word


@pytest.mark.parametrize("hashed", [False, True])
def test_word2vec_puts_words_together_that_stand_together(
    hashed: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on after the last save when it is started again."""
    monkeypatch.setattr(word2vec, "_PIECE", 10_000)
    monkeypatch.setattr("multiverso.apps.reading._PIECE_BYTES", 1 << 16)
    run = tmp_path / "run"
    counted = []
    for _ in range(2):
        mv.init()
        names, vectors, words = word2vec.train(settings(corpus, run, hashed=hashed))
        counted.append(words)
        is_learnt(names, vectors)
        mv.shutdown()
    assert counted == [4 * 6000 * 8, 0]  # the second has nothing left to do
    assert (run / "saved" / "manifest.json").exists()
    word2vec.save_text(run / "vectors.txt", names, vectors)
    first, line, *_ = (run / "vectors.txt").read_text().splitlines()
    assert first == "12 16"
    np.testing.assert_allclose([float(x) for x in line.split()[1:]], vectors[0], rtol=1e-5)


def test_a_run_that_is_continued_in_its_job_is_saved_at_its_end_again(corpus: Path, tmp_path: Path) -> None:
    def words_read(epochs: int) -> int:
        given = word2vec.Settings(str(corpus), tmp_path / "run", dim=4, epochs=epochs, save_seconds=1e9)
        return word2vec.train(given)[2]

    with mv.init():
        assert [words_read(1), words_read(2)] == [6000 * 8, 2 * 6000 * 8]  # since the job began
    with mv.init():
        assert words_read(2) == 0


def killed_in(me: int, call: int, where: Any, name: str) -> None:
    """Worker ``me`` is killed at the ``call``-th call of a function."""
    function, calls = getattr(where, name), [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        if mv.worker_id() == me and calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    setattr(where, name, counted)


def train_and_die(given: word2vec.Settings, victim: int, call: int) -> Any:
    """In a worker of its own."""
    from multiverso.apps import reading, skipgram

    word2vec._PIECE, reading._PIECE_BYTES = 5_000, 1 << 14
    killed_in(victim, call, word2vec if given.hashed else skipgram, "_train_block" if given.hashed else "train")
    mv.init()
    return word2vec.train(given)


@pytest.mark.parametrize("hashed", [False, True])
def test_without_a_killed_worker_the_others_do_all(hashed: bool, corpus: Path, tmp_path: Path) -> None:
    given = settings(corpus, tmp_path / "run", hashed=hashed)
    results = mv.run(train_and_die, 2, args=(given, 1, 2), on_failure="continue", timeout_seconds=200)
    names, vectors, words = results[0]
    is_learnt(names, vectors)
    assert words >= 4 * 6000 * 8 - 3 * 5_000  # what it had read and not counted is read again, and counted once
    assert len(list((tmp_path / "run" / "saved").glob("table-*"))) == 3  # those of one save alone


def test_when_all_are_killed_the_run_goes_on_where_it_was_saved(corpus: Path, tmp_path: Path) -> None:
    given = settings(corpus, tmp_path / "run")
    with pytest.raises(WorkerLostError):
        mv.run(train_and_die, 1, args=(given, 0, 22), timeout_seconds=200)
    names, vectors, words = mv.run(train_and_die, 1, args=(given, 1, 1), timeout_seconds=200)[0]
    is_learnt(names, vectors)
    assert 0 < words < 4 * 6000 * 8 - 15 * 5_000  # 21 pieces were saved; a piece has ends of sentences, too


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """1,200 samples whose labels two of forty features decide, with noise."""
    random = np.random.default_rng(3)
    lines = []
    for _ in range(1200):
        ids = np.sort(random.choice(np.arange(1, 41), 6, replace=False))
        values = random.normal(size=6).round(3)
        margin = 3 * values[ids == 7].sum() - 4 * values[ids == 21].sum() + 0.3
        label = 1 if random.random() < 1 / (1 + np.exp(-margin)) else -1
        lines.append(f"{label} " + " ".join(f"{i}:{v}" for i, v in zip(ids, values, strict=True)) + "\n")
    path = tmp_path / "clicks.svm"
    path.write_text("".join(lines))
    return path


def reference(path: Path, alpha: float, beta: float, l1: float, l2: float) -> dict[int, float]:
    """Algorithm 1 of the paper, in float64, sample by sample."""
    z: dict[int, float] = {}
    n: dict[int, float] = {}

    def weight(i: int) -> float:
        if abs(z.get(i, 0.0)) <= l1:
            return 0.0
        return -(z[i] - np.sign(z[i]) * l1) / ((beta + np.sqrt(n[i])) / alpha + l2)

    for line in path.read_text().splitlines():
        label, *pairs = line.split()
        features = [(int(i), float(v)) for i, v in (pair.split(":") for pair in pairs)] + [(ftrl.BIAS, 1.0)]
        weights = {i: weight(i) for i, _ in features}
        chance = 1 / (1 + np.exp(-sum(weights[i] * v for i, v in features)))
        for i, v in features:
            g = (chance - (label == "1")) * v
            before = n.get(i, 0.0)
            n[i] = before + g * g
            z[i] = z.get(i, 0.0) + g - (np.sqrt(n[i]) - np.sqrt(before)) / alpha * weights[i]
    return {i: weight(i) for i in z}


def test_ftrl_is_the_paper_s_algorithm(clicks: Path, tmp_path: Path) -> None:
    mv.init()
    given = ftrl.Settings(clicks, tmp_path / "run", alpha=0.3, beta=1.0, l1=0.5, l2=0.1, batch=1)
    result = ftrl.train(given)
    expected = reference(clicks, 0.3, 1.0, 0.5, 0.1)
    assert len(result.table) == len(expected) == 41
    got = result.table.get(list(expected))[:, 0]
    np.testing.assert_allclose(got, list(expected.values()), rtol=2e-4, atol=2e-5)
    assert 0 < sum(value == 0 for value in expected.values()) == int((got == 0).sum())  # what L1 is for
    found = ftrl.test(result.table, clicks)
    assert found["auc"] > 0.68
    assert found["loss"] < result.curve[0, 1]
    kept = ftrl.save_text(tmp_path / "weights.txt", result.table)
    assert kept == len((tmp_path / "weights.txt").read_text().splitlines()) == int((got != 0).sum())
    mv.shutdown()


def learn_and_die(given: ftrl.Settings, victim: int, call: int) -> Any:
    """In a worker of its own."""
    from multiverso.apps import reading

    reading._PIECE_BYTES = 1 << 12
    killed_in(victim, call, ftrl, "gradient")
    mv.init()
    result = ftrl.train(given)
    return ftrl.test(result.table, given.source)["auc"], result.samples


def test_ftrl_goes_on_without_a_killed_worker_and_after_all_were(clicks: Path, tmp_path: Path) -> None:
    given = ftrl.Settings(clicks, tmp_path / "run", l1=0.1, epochs=3, save_seconds=0.0)
    results = mv.run(learn_and_die, 2, args=(given, 1, 5), on_failure="continue", timeout_seconds=100)
    assert results[0][0] > 0.68
    again = ftrl.Settings(clicks, tmp_path / "again", l1=0.1, epochs=3, save_seconds=0.0)
    with pytest.raises(WorkerLostError):
        mv.run(learn_and_die, 1, args=(again, 0, 40), timeout_seconds=100)
    auc, samples = mv.run(learn_and_die, 1, args=(again, 1, 1), timeout_seconds=100)[0]
    assert auc > 0.68
    assert 0 < samples < 3 * 1200


def word2vec_on_hosts(given: word2vec.Settings) -> Any:
    """In a worker of its own."""
    mv.init()
    return word2vec.train(given)


@pytest.mark.parametrize("hashed", [False, True])
def test_on_two_hosts_words_are_learnt(hashed: bool, corpus: Path, tmp_path: Path) -> None:
    given = settings(corpus, tmp_path / "run", hashed=hashed)
    (names, vectors, _), other = mv.run(word2vec_on_hosts, 2, args=(given,), hosts=2, timeout_seconds=200)
    is_learnt(names, vectors)
    assert names == other[0]  # whoever asks, wherever the rows live
    np.testing.assert_array_equal(vectors, other[1])


def ftrl_on_hosts(given: ftrl.Settings) -> Any:
    """In a worker of its own."""
    mv.init()
    table = ftrl.train(given).table
    return ftrl.test(table, given.source), len(table)


def test_on_two_hosts_clicks_are_learnt(clicks: Path, tmp_path: Path) -> None:
    given = ftrl.Settings(clicks, tmp_path / "run", l1=0.1, epochs=3)
    (seen, keys), other = mv.run(ftrl_on_hosts, 2, args=(given,), hosts=2, timeout_seconds=200)
    assert seen["auc"] > 0.68
    assert (seen, keys) == other


@pytest.mark.parametrize("module", ["word2vec", "ftrl"])
def test_the_commands_do_as_they_say(module: str, corpus: Path, clicks: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = {
        "word2vec": [str(corpus), "--dim", "8", "--epochs", "1", "--like", "dog", "--picture"],
        "ftrl": [str(clicks), "--test", str(clicks), "--picture"],
    }[module]
    done = subprocess.run(
        [sys.executable, "-m", f"multiverso.apps.{module}", *arguments, "--run", str(run)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{module}: 100%" in done.stderr
    results = {"word2vec": ("vectors.txt", "words.png"), "ftrl": ("weights.txt", "loss.png")}[module]
    assert all((run / name).stat().st_size > 0 for name in results)
    assert re.search({"word2vec": r"^dog: \w+ 0?\.?-?\d", "ftrl": r"auc 0\.\d+"}[module], done.stdout, re.M)
