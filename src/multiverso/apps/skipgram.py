"""The loop of word2vec, compiled: skip-gram with negative sampling, over rows wherever they lie.

Mikolov et al. 2013, "Distributed Representations of Words and Phrases and their Compositionality", equation 4, with its
subsampling of frequent words and its noise distribution (frequency to the power 3/4).
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from multiverso.compiling.on_demand import require_numba

require_numba("multiverso.apps.skipgram: the loop of word2vec")
from numba import njit  # noqa: E402

from multiverso.compiling.native import prefetch_to_write  # noqa: E402

END = -1  # of a sentence, among the words
_LIMIT = 6.0  # beyond it the sigmoid is 0 or 1, and the pair teaches nothing
_STEPS = 1024
_X = (np.arange(_STEPS) + 0.5) / _STEPS * 2 * _LIMIT - _LIMIT
_SIGMOID = (1 / (1 + np.exp(-_X))).astype(np.float32)
# A sum may be taken in any order: that is what lets a dot product use vector instructions.
_OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}


@njit(**_OPTIONS)
def _send_for(rows, row):
    """Sends for the cache lines of a row that is going to be needed: most of the time goes into waiting for rows."""
    start = rows.ctypes.data + row * rows.strides[0]
    for line in range(0, 4 * rows.shape[1], 64):
        prefetch_to_write(start + line)


@njit(**_OPTIONS)
def _next(random):
    return random * np.uint64(25214903917) + np.uint64(11)


@njit(**_OPTIONS)
def _learn(hidden, output, error, label, rate):
    """One pair: moves ``output``, and adds to ``error`` what ``hidden`` is to be moved by."""
    dot = np.float32(0)
    for i in range(hidden.size):
        dot += hidden[i] * output[i]
    if dot >= _LIMIT or dot <= -_LIMIT:
        return
    step = rate * (label - _SIGMOID[int((dot + _LIMIT) * (_STEPS / (2 * _LIMIT)))])
    for i in range(hidden.size):
        value = output[i]
        error[i] += step * value
        output[i] = value + step * hidden[i]


@njit(**_OPTIONS)
def train(inputs, outputs, words, keep, noise, window, negative, rate, seed):
    """Trains on a piece of text, in place.

    Args:
        inputs, outputs: (rows, dim) float32.
        words: row numbers, one after another; `END` (any number below 0) between sentences.
        keep: for each row, how likely an occurrence of its word is to be used: 32-bit numbers out of 2**32.
        noise: row numbers, each as often as it is to be drawn.
        window: the most words on either side; how many is drawn for each word.
        negative: draws for each pair.
        rate: learning rate, a float32.
        seed: a uint64.

    Returns:
        How many occurrences were used.
    """
    random = seed
    error = np.empty(inputs.shape[1], np.float32)
    sentence = np.empty(words.size, np.int64)
    drawn = np.empty((2, negative), np.int64)  # for this pair, and on their way for the next
    for k in range(negative):
        drawn[0, k] = noise[k % noise.size]
    turn = used = at = 0
    while at < words.size:
        length = 0
        while at < words.size and words[at] >= 0:
            random = _next(random)
            if (random >> np.uint64(16)) & np.uint64(0xFFFFFFFF) <= keep[words[at]]:
                sentence[length] = words[at]
                length += 1
            at += 1
        at += 1
        used += length
        for i in range(length):
            random = _next(random)
            reach = 1 + int((random >> np.uint64(16)) % np.uint64(window))
            target = sentence[i]
            for j in range(max(0, i - reach), min(length, i + reach + 1)):
                if j == i:
                    continue
                for k in range(negative):
                    random = _next(random)
                    row = noise[int((random >> np.uint64(16)) % np.uint64(noise.size))]
                    drawn[1 - turn, k] = row
                    _send_for(outputs, row)
                hidden = inputs[sentence[j]]
                error[:] = np.float32(0)
                _learn(hidden, outputs[target], error, np.float32(1), rate)
                for k in range(negative):
                    if drawn[turn, k] != target:
                        _learn(hidden, outputs[drawn[turn, k]], error, np.float32(0), rate)
                for k in range(error.size):
                    hidden[k] += error[k]
                turn = 1 - turn
    return used
