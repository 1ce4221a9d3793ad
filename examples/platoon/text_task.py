"""The text that the LSTM examples classify, and the network that does it (torch).

Given ``imdb.pkl`` (two pickled pairs, training and test, of word-number lists and labels 0 or 1), reviews of
films are told apart by what they say. Without it the task is one that every installation brings along: does a
paragraph of documentation come from NumPy or from Python's standard library? Their docstrings are read from
the installed sources; code examples are left out, and no file has paragraphs in two of the three sets.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import pickle
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Pairs = tuple[list[list[int]], list[int]]
UNKNOWN = 1  # 0 fills up short paragraphs
SETS = ("train", "valid", "test")


@dataclass(frozen=True)
class Data:
    """Word numbers and labels of each set, and how many different words there are."""

    train: Pairs
    valid: Pairs
    test: Pairs
    words: int
    name: str


def load(imdb: str | None = None, words: int = 5000, longest: int = 60, most: int = 6000) -> Data:
    """Reads the task.

    Args:
        imdb: the file ``imdb.pkl``, or None for the docstrings.
        words: the rarer words are all one.
        longest: paragraphs are cut to this many words.
        most: paragraphs of each of the two sources, at most.
    """
    if imdb is not None:
        return _imdb(Path(imdb), words, longest)
    texts = {name: _paragraphs(folder, most + most // 4) for name, folder in _sources().items()}
    pairs: dict[str, list[tuple[list[str], int]]] = {name: [] for name in SETS}
    for label, found in enumerate(texts.values()):
        # in an order that is the same everywhere, but not that of the files
        chosen = sorted(found, key=lambda item: hashlib.sha256(" ".join(item[1]).encode()).digest())[:most]
        for part, text in chosen:
            pairs[part].append((text[:longest], label))
    counts = Counter(word for text, _ in pairs["train"] for word in text)
    number = {word: i for i, (word, _) in enumerate(counts.most_common(words - 2), start=2)}
    sets = {
        part: ([[number.get(word, UNKNOWN) for word in text] for text, _ in items], [label for _, label in items])
        for part, items in pairs.items()
    }
    return Data(**sets, words=words, name="docstrings of NumPy and of the standard library")


def _sources() -> dict[str, Path]:
    return {"numpy": Path(np.__file__).parent, "python": Path(sysconfig.get_paths()["stdlib"])}


def _paragraphs(folder: Path, enough: int) -> list[tuple[str, list[str]]]:
    """Returns the different paragraphs of the docstrings below a folder, each with its file's set."""
    found: dict[tuple[str, ...], str] = {}
    files = {hashlib.sha256(str(f.relative_to(folder)).encode()).digest(): f for f in _files(folder)}
    for digest, file in sorted(files.items()):
        if len(found) >= enough:
            break
        share = digest[-1] % 10
        part = "train" if share < 7 else "valid" if share == 7 else "test"
        for text in _docstrings(file):
            for paragraph in re.split(r"\n\s*\n", text):
                words = re.findall(r"[a-z]+|[.,;:?!()]", paragraph.lower())
                if ">>>" not in paragraph and sum(word.isalpha() for word in words) >= 8:
                    found.setdefault(tuple(words), part)
    return [(part, list(words)) for words, part in found.items()]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = {*folders} - {"site-packages", "test", "tests", "idlelib"}
        yield from (Path(place, name) for name in names if name.endswith(".py"))


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    inner: list[ast.AST] = [tree]
    while inner:  # statements only: ast.walk goes through every expression, too
        node = inner.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        inner += [below for name in ("body", "orelse", "finalbody") for below in _statements(node, name)]


def _statements(node: ast.AST, name: str) -> list[ast.AST]:
    found = getattr(node, name, [])
    return found if isinstance(found, list) else []  # a lambda's body is one expression


class _Plain(pickle.Unpickler):
    """Reads lists, tuples, numbers and strings; a pickle that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"this file wants to run {module}.{name}; it is not a list of words")


def _imdb(path: Path, words: int, longest: int) -> Data:
    with io.BytesIO(path.read_bytes()) as file:
        train, test = (_Plain(file, encoding="bytes").load() for _ in range(2))
    order = np.random.default_rng(1).permutation(len(train[0]))
    held = len(order) // 20

    def pick(pair: Any, chosen: Any) -> Pairs:
        texts = [[w if w < words else UNKNOWN for w in pair[0][i][:longest]] for i in chosen]
        return texts, [int(pair[1][i]) for i in chosen]

    return Data(pick(train, order[held:]), pick(train, order[:held]), pick(test, range(len(test[0]))), words, "IMDB")


def batch(pairs: Pairs, chosen: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns word numbers (time, batch), a mask of the same shape, and labels."""
    texts = [pairs[0][i] for i in chosen]
    length = max(map(len, texts))
    words = torch.zeros(length, len(texts), dtype=torch.long)
    for column, text in enumerate(texts):
        words[: len(text), column] = torch.tensor(text)
    return words, (words > 0).float(), torch.tensor([pairs[1][i] for i in chosen])


class Classifier(torch.nn.Module):
    """Embedding, LSTM, the mean over time, and a linear layer."""

    def __init__(self, words: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.lstm = torch.nn.LSTM(width, width)
        self.out = torch.nn.Linear(width, 2)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(words))
        mean = (states * mask[..., None]).sum(0) / mask.sum(0)[:, None]
        scores: torch.Tensor = self.out(mean)
        return scores


def error(model: Classifier, pairs: Pairs, size: int = 256) -> float:
    """Returns the share that the model gets wrong."""
    wrong = 0
    with torch.no_grad():
        for start in range(0, len(pairs[1]), size):
            words, mask, labels = batch(pairs, range(start, min(start + size, len(pairs[1]))))
            wrong += int((model(words, mask).argmax(1) != labels).sum())
    return wrong / len(pairs[1])
