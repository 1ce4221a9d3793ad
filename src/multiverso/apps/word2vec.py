"""word2vec: vectors of words from text, by skip-gram with negative sampling, trained by any number of processes.

    python -m multiverso.apps.word2vec corpus/ --run runs/corpus
    multiverso run -n 4 -m multiverso.apps.word2vec python --run runs/python    # what Python says about itself

A folder of text goes in; word vectors come out, in the text format that gensim and others read. Started again with
the same ``--run`` it continues after its last save.

Two ways to hold the rows:

- by default the corpus is read once for its vocabulary, and each word is a row of a `MatrixTableHandler`, on which all
  workers train in place, without locks (Hogwild: Recht et al. 2011), as gensim's threads do;
- ``--hashed`` reads text as it comes: a word is its 64-bit hash, a key of a growing `KeyedTable`. A worker pulls the
  rows of a few hundred words and of a pool of noise words, trains on them, and pushes the differences.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import multiverso as mv
from multiverso.apps import reading
from multiverso.apps.work import SHOWN, Work, once, start
from multiverso.files.opening import write_whole

Array = npt.NDArray[Any]
# words that a worker gets at a time: with five times as many the others wait longer for the last
_PIECE = 10_000
_BLOCK = 2_000  # words between two exchanges with a keyed table
_NOISE = 1 << 20
_ALL = (1 << 32) - 1


@dataclass(frozen=True)
class Settings:
    """What to train, by the names of the paper and of other implementations."""

    source: str
    run: Path
    dim: int = 100
    window: int = 5
    negative: int = 5
    epochs: int = 5
    min_count: int = 5
    sample: float = 1e-3
    alpha: float = 0.025
    min_alpha: float = 0.0001
    seed: int = 1
    hashed: bool = False
    save_seconds: float = 60.0

    def rate(self, fraction: float) -> np.float32:
        """The learning rate when so much of the work is done."""
        return np.float32(self.alpha - (self.alpha - self.min_alpha) * fraction)


def kept(counts: Array, sample: float) -> Array:
    """How likely an occurrence of each word is used, out of 2**32: frequent words are thinned out."""
    share = counts / max(counts.sum(), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.sqrt(sample / share) + sample / share if sample > 0 else np.ones(len(counts))
    return (np.nan_to_num(np.minimum(chance, 1), nan=1.0) * _ALL).astype(np.uint64)


def noise_of(counts: Array, size: int) -> Array:
    """Returns row numbers, each as often as it is to be drawn: in proportion to its count to the power 3/4."""
    ends = np.cumsum(counts.astype(np.float64) ** 0.75)
    places = np.floor(ends / ends[-1] * size + 0.5).astype(np.int64)  # where the next one's begin
    return np.repeat(np.arange(counts.size, dtype=np.int32), np.diff(places, prepend=0))


def work_of(settings: Settings, pieces: int, what: str) -> Work:
    """Returns the work on so many pieces."""
    return Work(settings.run, pieces, settings.epochs, save_seconds=settings.save_seconds, what=what, unit="words")


# -- with a vocabulary -----------------------------------------------------------------------------------------


def encode(settings: Settings) -> None:
    """Reads the corpus once: its vocabulary, most frequent words first, and its words as row numbers."""
    numbers: dict[str, int] = {}
    found = [
        np.array([numbers.setdefault(word, len(numbers)) for word in sentence] + [-1], np.int32)
        for sentence in reading.sentences_of(reading.texts_of(settings.source))
    ]
    words = np.concatenate([np.empty(0, np.int32), *found])
    counts = np.bincount(words[words >= 0], minlength=len(numbers))
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= settings.min_count]
    if not order.size:
        raise ValueError(f"no word of {settings.source} occurs {settings.min_count} times (--min-count)")
    rows = np.full(len(numbers) + 1, -2, np.int32)  # what is left out; the last is the end of a sentence
    rows[order] = np.arange(order.size)
    rows[-1] = -1
    words = rows[words]
    np.save(settings.run / "words.npy", words[words != -2])
    names = list(numbers)
    lines = "".join(f"{names[i]} {counts[i]}\n" for i in order)
    write_whole(settings.run / "vocabulary.txt", lines.encode())  # the last: it says that all is there


def vocabulary(settings: Settings) -> tuple[list[str], Array]:
    """Returns the words and how often they occur."""
    lines = (settings.run / "vocabulary.txt").read_text().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines]
    return [word for word, _ in pairs], np.array([int(count) for _, count in pairs])


def train_in_place(settings: Settings) -> tuple[list[str], Array, int]:
    """Trains rows of two matrices where they lie; returns words, vectors and how many words this job has read."""
    from multiverso.apps import skipgram

    once(settings.run, (settings.run / "vocabulary.txt").exists, lambda: encode(settings))
    names, counts = vocabulary(settings)
    words = np.load(settings.run / "words.npy", mmap_mode="r")
    # as gensim's
    start = (np.random.default_rng(settings.seed).random((len(names), settings.dim), np.float32) * 2 - 1) / settings.dim
    work = work_of(settings, -(-len(words) // _PIECE), "word2vec")
    inputs = mv.MatrixTableHandler(len(names), settings.dim, start, name="inputs")
    outputs = mv.MatrixTableHandler(len(names), settings.dim, name="outputs")
    del start
    work.resume()
    keep, noise = kept(counts, settings.sample), noise_of(counts, _NOISE)
    random = np.random.default_rng([settings.seed, mv.worker_id(), work.done])
    for piece in work:
        part = np.array(words[piece * _PIECE : (piece + 1) * _PIECE])
        seed = np.uint64(random.integers(1 << 62))
        rate = settings.rate(work.fraction)
        skipgram.train(
            inputs.memory(), outputs.memory(), part, keep, noise, settings.window, settings.negative, rate, seed
        )
        work.count(int((part >= 0).sum()))
    return names, inputs.get(), work.counted


# -- hashed, and growing ---------------------------------------------------------------------------------------


def cut(settings: Settings) -> None:
    """Lists the pieces of all files."""
    source = Path(settings.source)
    if settings.source == "python":
        source = settings.run / "python.txt"
        write_whole(source, "\n\n".join(reading.python_texts()).encode())
    reading.write_pieces(settings.run / "pieces.txt", source)


class Seen:
    """The words that this worker has met: their numbers here, their keys, and how often they occurred."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.keys: list[int] = []
        self.counts = np.zeros(1024, np.int64)
        self._named = 0

    def encode(self, sentences: Iterator[list[str]]) -> Array:
        """Returns the words' numbers here, -1 after each sentence."""
        numbers, found = self.numbers, []
        for sentence in sentences:
            for word in sentence:
                number = numbers.get(word)
                if number is None:
                    number = numbers[word] = len(numbers)
                    self.keys.append(reading.key_of(word))
                found.append(number)
            found.append(-1)
        words = np.array(found, np.int64)
        if len(numbers) > self.counts.size:
            self.counts = np.concatenate([self.counts, np.zeros(len(numbers), np.int64)])
        self.counts += np.bincount(words[words >= 0], minlength=self.counts.size)
        return words

    def new_names(self) -> Iterator[str]:
        """Yields a line for each word that was met since the last call: its key and itself."""
        first, self._named = self._named, len(self.keys)
        for key, word in zip(self.keys[first:], islice(self.numbers, first, None), strict=True):
            yield f"{key} {word}\n"


def train_by_keys(settings: Settings) -> tuple[list[str], Array, int]:
    """Trains rows of two keyed tables; returns words, vectors and how many words this job has read."""
    # first: refused, they leave nothing behind
    inputs = mv.KeyedTable(settings.dim, initial=("uniform", 1 / settings.dim), seed=settings.seed, name="inputs")
    outputs = mv.KeyedTable(settings.dim, name="outputs")
    once(settings.run, (settings.run / "pieces.txt").exists, lambda: cut(settings))
    parts = reading.read_pieces(settings.run / "pieces.txt")
    work = work_of(settings, len(parts), "word2vec, hashed")
    work.resume()
    mine = settings.run / "names" / f"{mv.worker_id()}-{time.time_ns()}.txt"
    mine.parent.mkdir(exist_ok=True)
    seen, random = Seen(), np.random.default_rng([settings.seed, mv.worker_id(), work.done])
    for piece in work:
        words = seen.encode(reading.sentences_of([parts[piece].lines().decode(errors="ignore")]))
        counts = seen.counts[: len(seen.keys)]
        keep, keys = kept(counts, settings.sample), np.array(seen.keys, np.int64)
        ends = np.cumsum(counts**0.75)
        for at in range(0, words.size, _BLOCK):
            pool = np.searchsorted(ends, random.random(_BLOCK) * ends[-1], side="right")
            rate = settings.rate(work.fraction)
            _train_block(settings, words[at : at + _BLOCK], pool, keys, keep, inputs, outputs, rate, random)
        with open(mine, "a") as file:
            file.writelines(seen.new_names())
        work.count(int((words >= 0).sum()))
    names = _all_names(mine.parent)
    all_keys = np.array(sorted(names), np.int64)
    all_keys = all_keys[inputs.contains(all_keys)]
    return [names[key] for key in all_keys.tolist()], inputs.get(all_keys), work.counted


def _train_block(
    settings: Settings,
    words: Array,
    pool: Array,
    keys: Array,
    keep: Array,
    inputs: mv.KeyedTable,
    outputs: mv.KeyedTable,
    rate: np.float32,
    random: np.random.Generator,
) -> None:
    from multiverso.apps import skipgram

    ends = words < 0
    rows, places = np.unique(np.concatenate([words[~ends], pool]), return_inverse=True)
    local = np.full(words.size, -1, np.int32)
    local[~ends] = places[: words.size - np.count_nonzero(ends)]
    number = int(local.max()) + 1
    if number == 0:
        return
    both = [table.get(keys[rows]) for table in (inputs, outputs)]
    before = [values.copy() for values in both]
    noise = places[words.size - np.count_nonzero(ends) :].astype(np.int32)
    seed = np.uint64(random.integers(1 << 62))
    skipgram.train(*both, local, keep[rows], noise, settings.window, settings.negative, rate, seed)
    for table, values, old in zip((inputs, outputs), both, before, strict=True):
        changed = np.flatnonzero((values != old).any(axis=1))
        table.add(values[changed] - old[changed], keys[rows[changed]])


def _all_names(folder: Path) -> dict[int, str]:
    """Returns the words of all keys, as all workers have noted them."""
    names: dict[int, str] = {}
    for file in sorted(folder.glob("*.txt")):
        for line in file.read_text().splitlines():
            key, _, word = line.partition(" ")
            if word and reading.key_of(word) == int(key):  # the last line of a worker that was killed may be cut
                names[int(key)] = word
    return names


# -- what comes out --------------------------------------------------------------------------------------------


def save_text(path: Path, names: list[str], vectors: Array) -> None:
    """Writes vectors in word2vec's text format: a line with both sizes, then a line for each word."""
    rows = (
        f"{name} {' '.join(f'{value:.6g}' for value in row)}\n".encode()
        for name, row in zip(names, vectors, strict=True)
    )
    write_whole(path, [f"{len(names)} {vectors.shape[1]}\n".encode(), *rows])


def neighbours(names: list[str], vectors: Array, word: str, most: int = 8) -> list[tuple[str, float]]:
    """Returns the words whose vectors point most nearly the same way, with the cosines."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit[names.index(word)]
    order = [int(i) for i in np.argsort(-cosines) if names[i] != word][:most]
    return [(names[i], float(cosines[i])) for i in order]


def draw(path: Path, names: list[str], vectors: Array, most: int = 120) -> None:
    """Draws the first words where their vectors' two principal components put them (needs matplotlib)."""
    from matplotlib.figure import Figure

    shown = vectors[:most] - vectors[:most].mean(axis=0)
    places = shown @ np.linalg.svd(shown, full_matrices=False)[2][:2].T
    figure = Figure(figsize=(9, 7), layout="tight")
    axes = figure.subplots()
    axes.scatter(*places.T, s=4, color="tab:orange")
    for name, (x, y) in zip(names, places, strict=False):
        axes.annotate(name, (x, y), fontsize=7)
    axes.set_axis_off()
    figure.savefig(path, dpi=120)


def train(settings: Settings) -> tuple[list[str], Array, int]:
    """Trains in all workers of the current job: collective; returns words, vectors, and the number of words read."""
    return (train_by_keys if settings.hashed else train_in_place)(settings)


@click.command(context_settings=SHOWN)
@click.argument("source")
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    default="word2vec-run",
    help="Folder of this run: saves, vocabulary, vectors.txt.",
)
@click.option("--dim", type=int, default=100, help="Numbers in a vector.")
@click.option("--window", type=int, default=5, help="The most words on either side.")
@click.option("--negative", type=int, default=5, help="Noise words for each pair.")
@click.option("--epochs", type=int, default=5, help="How often the text is read.")
@click.option("--min-count", type=int, default=5, help="Rarer words are left out (not with --hashed).")
@click.option("--sample", type=float, default=1e-3, help="Words above this share are thinned out; 0: none.")
@click.option("--alpha", type=float, default=0.025, help="Learning rate; it falls to 0.0001.")
@click.option("--seed", type=int, default=1, help="Of the first vectors.")
@click.option("--hashed", is_flag=True, help="No vocabulary: words are hashes, and the table grows.")
@click.option("--save-seconds", type=float, default=60.0, help="Save when the last save is so old.")
@click.option("--like", multiple=True, help="Show this word's neighbours at the end.")
@click.option("--picture", is_flag=True, help="Draw the most frequent words: words.png (matplotlib).")
def main(like: tuple[str, ...], picture: bool, **options: Any) -> None:
    """Vectors of words from SOURCE: a folder or file of text, or "python": Python's own documentation."""
    settings = Settings(**options)
    run = settings.run
    mv.init()
    began = time.perf_counter()
    names, vectors, words = train(settings)
    seconds = time.perf_counter() - began
    result = run / "vectors.txt"
    exported = mv.Counter("exported")

    def export() -> None:
        save_text(result, names, vectors)
        if picture:
            draw(run / "words.png", names, vectors)
        exported.fetch_add()

    once(run, lambda: exported.value > 0, export)
    if mv.is_master_worker():
        for word in like:
            near = neighbours(names, vectors, word) if word in names else []
            print(f"{word}: {', '.join(f'{name} {cosine:.2f}' for name, cosine in near) or 'not in the text'}")
        print(f"{len(names):,} words, {words:,} read in {seconds:.1f} s by {mv.num_workers()} workers: {result}")
    mv.shutdown()


if __name__ == "__main__":
    start(main)
