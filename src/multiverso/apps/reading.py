"""What these programs read: files in pieces, words of text, and sparse samples.

A piece is of whole lines: what one worker reads at a time. Samples are in the text format of SVMlight and LIBSVM:
``label id:value id:value ...`` on each line.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multiverso.files.opening import write_whole

_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class Piece:
    """The lines of a file that begin between two places."""

    path: Path
    start: int
    end: int

    def lines(self) -> bytes:
        """Reads them."""
        with open(self.path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)  # a line that begins right here is ours
                file.readline()
            left = self.end - file.tell()
            if left <= 0:
                return b""
            content = file.read(left)
            return content if content.endswith(b"\n") else content + file.readline()


def _text_files(source: Path) -> list[Path]:
    """Returns a file, or those of a folder, but none that is no text (a zero byte at its beginning) or empty."""
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    found = []
    for path in files:
        with open(path, "rb") as file:
            head = file.read(1024)
            if head and b"\0" not in head:
                found.append(path)
    if not found:
        raise FileNotFoundError(f"{source} holds no text")
    return found


def write_pieces(to: Path, source: Path, size: int = _PIECE_BYTES) -> None:
    """Writes a list of the pieces of a file, or of all text files of a folder.

    Raises:
        FileNotFoundError: there is no such file, or no text in it.
    """
    lines = []
    for path in _text_files(source):
        end = path.stat().st_size
        lines += [f"{at} {min(at + size, end)} {path.absolute()}" for at in range(0, end, size)]
    write_whole(to, "\n".join(lines).encode())


def read_pieces(path: Path) -> list[Piece]:
    """Returns the pieces that `write_pieces` has listed."""
    found = []
    for line in path.read_text().splitlines():
        start, end, name = line.split(" ", 2)
        found.append(Piece(Path(name), int(start), int(end)))
    return found


# A word, or what ends a sentence.
_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|[.!?](?=\s)|\n\s*\n")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts_of(source: str | Path) -> Iterator[str]:
    """Yields the text of each file of a folder, or of one file, in the order of their names.

    ``"python"`` is `python_texts`. Files that are not text are left out.

    Raises:
        FileNotFoundError: there is no such file or folder, or no text in it.
    """
    if str(source) == "python":
        yield from python_texts()
        return
    for path in _text_files(Path(source)):
        yield path.read_bytes().decode("utf-8", errors="ignore")


def python_texts() -> Iterator[str]:
    """Yields what this Python's standard library says about itself: docstrings, help topics, licences."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or "tests" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        documents = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        yield "\n\n".join(document for document in documents if document)
        if path.name == "topics.py":
            yield "\n\n".join(
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            )
    for path in sorted(root.glob("LICENSE*")):
        yield path.read_text(errors="ignore")


def sentences_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields each sentence's words, in lower case."""
    for text in texts:
        sentence: list[str] = []
        for token in _TOKEN.findall(text.lower()):
            if token[0].isalpha():
                sentence.append(token)
            elif sentence:
                yield sentence
                sentence = []
        if sentence:
            yield sentence


def key_of(word: str) -> int:
    """Returns a word's 64-bit key: the same in every process and on every machine."""
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)


Array = npt.NDArray[Any]
_LEFT_OUT = re.compile(rb"#[^\n]*|qid:\S+")
_EXACT = 1 << 53  # whole numbers below it are exact in float64


@dataclass(frozen=True)
class Samples:
    """Sparse rows.

    Attributes:
        labels: (n,) float64, as in the file.
        starts: (n + 1,) int64: the features of sample i are ``starts[i]:starts[i + 1]``.
        ids: (features,) int64.
        values: (features,) float64.
    """

    labels: Array
    starts: Array
    ids: Array
    values: Array

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, start: int, end: int) -> Samples:
        """Returns some of them."""
        begins = self.starts[start : end + 1]
        features = slice(begins[0], begins[-1])
        return Samples(self.labels[start:end], begins - begins[0], self.ids[features], self.values[features])

    def sample_of(self) -> Array:
        """Returns, for each feature, whose it is."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


def parse_samples(text: bytes) -> Samples:
    """Reads lines; comments (``#``) and query ids are left out.

    Raises:
        ValueError: a line that is not of this format, or an id of 2**53 or more.
    """
    if b"#" in text or b"qid:" in text:
        text = _LEFT_OUT.sub(b"", text)
    lines = [line for line in text.split(b"\n") if line.strip()]
    features = np.array([line.count(b":") for line in lines], np.int64)
    starts = np.concatenate([[0], np.cumsum(features)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            numbers = np.fromstring(b" ".join(lines).replace(b":", b" ").decode(), np.float64, sep=" ")
    except (DeprecationWarning, ValueError, UnicodeDecodeError):
        numbers = np.empty(0)
    if numbers.size != len(lines) + 2 * starts[-1]:
        raise ValueError(_what_is_wrong(lines))
    heads = starts[:-1] * 2 + np.arange(len(lines))
    pairs = np.delete(numbers, heads).reshape(-1, 2)
    ids = pairs[:, 0].astype(np.int64)
    if ids.size and (ids != pairs[:, 0]).any():
        raise ValueError("a feature's id is not a whole number")
    if ids.size and np.abs(pairs[:, 0]).max() >= _EXACT:
        raise ValueError("a feature's id is 2**53 or more: hash features to 52 bits")
    return Samples(numbers[heads], starts, ids, np.ascontiguousarray(pairs[:, 1]))


def _what_is_wrong(lines: list[bytes]) -> str:
    for line in lines:
        label, *features = line.split()
        try:
            float(label)
            for feature in features:
                identity, value = feature.split(b":")
                int(identity), float(value)
        except ValueError:
            return f"expected a label and id:value pairs; got {line[:80]!r}"
    return "expected lines of a label and id:value pairs"
