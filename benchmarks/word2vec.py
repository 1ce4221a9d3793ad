"""word2vec: words a second and quality, beside gensim with the same settings on the same text.

    python -m venv /tmp/gensim && /tmp/gensim/bin/pip install gensim
    python benchmarks/word2vec.py --gensim /tmp/gensim/bin/python       # some minutes; prints JSON

The text is generated, so that what vectors should know is known: 100 things with 4 kinds of words each, `thing-
kind`; a sentence names one of them among words of its thing, words of its kind, and others by Zipf's law. Quality
is the share of questions "a:b is as c:?" that are answered right (the nearest of all words but the three). Words a
second count what is read, before frequent words are thinned out, over the whole of training and not the reading of
the vocabulary; both sides have the text in memory. Words a processor second, of all workers together, say more on
a machine that is busy. gensim's one worker has a second thread that prepares its batches. *side by side* are two jobs
of one worker each, at once, which share nothing but the machine: what two workers could do at most.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

THINGS, KINDS, OTHERS = 100, 4, 20_000
DIM, WINDOW, NEGATIVE, EPOCHS, SAMPLE, ALPHA = 100, 5, 5, 2, 1e-3, 0.025


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def write_text(path: Path, sentences: int) -> None:
    random = np.random.default_rng(0)
    shares = 1 / np.arange(1, OTHERS + 1)
    others = random.choice(OTHERS, (sentences, 10), p=shares / shares.sum())
    things, kinds = random.integers(THINGS, size=sentences), random.integers(KINDS, size=sentences)
    about = random.integers(8, size=(sentences, 4))
    like = random.integers(8, size=(sentences, 4))
    with open(path, "w") as file:
        for t, k, o, a, w in zip(things, kinds, others, about, like, strict=True):
            words = [f"o{letters(x)}" for x in o]
            words += [f"t{letters(t)}x{letters(x)}" for x in a] + [f"k{letters(k)}x{letters(x)}" for x in w]
            words = [words[i] for i in random.permutation(len(words))]
            words.insert(len(words) // 2, f"w{letters(t)}y{letters(k)}")
            file.write(" ".join(words) + ".\n")


def right(names: list[str], vectors: Any, questions: int = 2000) -> float:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    place = {name: i for i, name in enumerate(names)}
    if sum(name.startswith("w") for name in place) < THINGS * KINDS:
        return 0.0  # the small text that warms up
    random = np.random.default_rng(1)
    good = 0
    for _ in range(questions):
        (t, u), (k, j) = random.choice(THINGS, 2, False), random.choice(KINDS, 2, False)
        a, b, c, d = (place[f"w{letters(x)}y{letters(y)}"] for x, y in ((t, k), (t, j), (u, k), (u, j)))
        scores = unit @ (unit[b] - unit[a] + unit[c])
        scores[[a, b, c]] = -np.inf
        good += int(scores.argmax()) == d
    return good / questions


def ours(run: str, text: str, hashed: bool) -> dict[str, Any]:
    import multiverso as mv
    from multiverso.apps import word2vec

    mv.init()
    settings = word2vec.Settings(
        text, Path(run), DIM, WINDOW, NEGATIVE, EPOCHS, 1, SAMPLE, ALPHA, hashed=hashed, save_seconds=1e9
    )
    mv.barrier()
    began, used = time.perf_counter(), time.process_time()
    names, vectors, words = word2vec.train(settings)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    result = {
        "words_a_second": words / seconds,
        "words": words,
        "cpu_seconds": used,
        "right": right(names, vectors) if mv.is_master_worker() else 0.0,
    }
    mv.barrier()
    mv.shutdown()
    return result


def theirs(text: str) -> None:
    """Run by the Python that has gensim."""
    from gensim.models import Word2Vec

    sentences = [line.rstrip(".").split() for line in Path(text).read_text().splitlines()]
    settings = {"vector_size": DIM, "window": WINDOW, "negative": NEGATIVE, "sample": SAMPLE, "alpha": ALPHA}
    model = Word2Vec(sg=1, hs=0, min_count=1, workers=1, **settings)
    model.build_vocab(sentences)
    began, used = time.perf_counter(), time.process_time()
    model.train(sentences, total_examples=len(sentences), epochs=EPOCHS)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    words = EPOCHS * sum(map(len, sentences))
    result = {"words_a_second": words / seconds, "words": words, "cpu_seconds": used}
    print(json.dumps(result | {"right": right(model.wv.index_to_key, model.wv.vectors)}))


def side_by_side(folder: Path, source: Path) -> dict[str, Any]:
    """Two jobs of one worker each, in processes of their own: their rates together."""
    from multiverso.apps import word2vec

    jobs = []
    for _ in range(2):
        place = Path(tempfile.mkdtemp(dir=folder))
        word2vec.encode(word2vec.Settings(str(source), place, min_count=1))
        command = [sys.executable, __file__, "--alone", str(place), str(source)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found = [json.loads(job.communicate()[0].splitlines()[-1]) for job in jobs]
    together: dict[str, Any] = {name: found[0][name] + found[1][name] for name in found[0]}
    return together | {"right": together["right"] / 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gensim", help="a Python that has gensim")
    parser.add_argument("--theirs", help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--sentences", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hashed", action="store_true", help="also with a growing table")
    options = parser.parse_args()
    if options.theirs:
        theirs(options.theirs)
        return
    import multiverso as mv

    if options.alone:
        print(json.dumps(mv.run(ours, 1, args=(*options.alone, False))[0]))
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text, small = Path(folder) / "text.txt", Path(folder) / "small.txt"
        write_text(text, options.sentences)
        write_text(small, 200)
        from multiverso.apps import word2vec

        def run(name: str, workers: int, hashed: bool = False, source: Path = text) -> None:
            place = Path(folder) / f"{name}-{len(found.get(name, []))}-{source.stem}"
            place.mkdir()
            if not hashed:
                word2vec.encode(word2vec.Settings(str(source), place, min_count=1))
            results = mv.run(ours, workers, args=(str(place), str(source), hashed))
            result = results[0] | {"cpu_seconds": sum(each["cpu_seconds"] for each in results)}
            if source is text:
                found.setdefault(name, []).append(result)

        run("warm", 1, source=small)  # Numba compiles the loop
        for _ in range(options.rounds):
            run("1 worker", 1)
            if options.gensim:
                output = subprocess.run(
                    [options.gensim, __file__, "--theirs", str(text)], check=True, capture_output=True, text=True
                ).stdout
                found.setdefault("gensim, 1 worker", []).append(json.loads(output.splitlines()[-1]))
            run("2 workers", 2)
            found.setdefault("2 jobs of 1 worker, side by side", []).append(side_by_side(Path(folder), text))
            if options.hashed:
                run("hashed, 1 worker", 1, hashed=True)
                run("hashed, 2 workers", 2, hashed=True)
        words = len(text.read_text().split())
    rates = {name: statistics.median(r["words_a_second"] for r in rows) for name, rows in found.items()}
    result = {
        "words_a_second": {name: round(rate) for name, rate in rates.items()},
        "words_a_cpu_second": {
            name: round(statistics.median(r["words"] / r["cpu_seconds"] for r in rows)) for name, rows in found.items()
        },
        "right": {name: round(statistics.median(r["right"] for r in rows), 4) for name, rows in found.items()},
        "words": words,
        "epochs": EPOCHS,
        "settings": {"dim": DIM, "window": WINDOW, "negative": NEGATIVE, "sample": SAMPLE, "alpha": ALPHA},
        "rounds": options.rounds,
        "machine": platform.machine(),
        "python": sys.version.split()[0],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
