"""Sparse samples in the text format of SVMlight and LIBSVM: ``label id:value id:value ...`` on each line."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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


def parse(text: bytes) -> Samples:
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
