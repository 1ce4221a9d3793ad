"""Real images for the examples of all frameworks: CIFAR-10 from its own files, or bundled digits.

The bundled ones are scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits": 1,797 images
of 8 x 8 pixels.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def load(folder=None):
    """Returns x_train, y_train, x_test, y_test: float32 in [0, 1], (images, channels, height, width), and int64."""
    return load_cifar10(Path(folder)) if folder else load_digits()


def load_digits():
    """scikit-learn's digits: the last 360 of a shuffle are for validation."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    x = (digits.images / 16).astype("float32")[:, None]
    y = digits.target.astype("int64")
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:-360], order[-360:]
    return x[train], y[train], x[test], y[test]


def load_cifar10(folder):
    """CIFAR-10's "python version": the folder cifar-10-batches-py of six files, or the one around it."""
    inner = folder / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else folder
    missing = [name for name in CIFAR10_FILES if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"CIFAR-10 is not complete in {folder}: missing {', '.join(missing)}.\n"
            "Get the files from https://www.cs.toronto.edu/~kriz/cifar.html, or leave --data out to train on "
            "bundled digits."
        )
    batches = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in CIFAR10_FILES]
    x = [batch[b"data"].reshape(-1, 3, 32, 32).astype("float32") / np.float32(255) for batch in batches]
    y = [np.asarray(batch[b"labels"], "int64") for batch in batches]
    return np.concatenate(x[:5]), np.concatenate(y[:5]), x[5], y[5]
