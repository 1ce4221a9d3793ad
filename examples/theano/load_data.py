"""Real images for the examples in this folder: MNIST or CIFAR-10 from their own files, or bundled digits.

The bundled ones are scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits": 1,797 images
of 8 x 8 pixels. Every function returns ``x_train, y_train, x_test, y_test``: float32 in [0, 1] of shape
(images, channels, height, width), and int32 labels.
"""

import gzip
import pickle
import sys
from pathlib import Path

import numpy as np

MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def load_digits():
    """scikit-learn's digits: the last 360 are for validation."""
    from sklearn.datasets import load_digits as bundled

    digits = bundled()
    x = (digits.images / 16).astype("float32").reshape(-1, 1, 8, 8)
    y = digits.target.astype("int32")
    order = np.random.RandomState(0).permutation(len(x))
    train, test = order[:-360], order[-360:]
    return x[train], y[train], x[test], y[test]


def load_mnist(folder):
    """MNIST's four IDX files, compressed with gzip or not."""
    paths = [_find(folder, name) for name in MNIST_FILES]
    _refuse_missing(folder, "MNIST", MNIST_FILES, paths, "https://yann.lecun.com/exdb/mnist/")
    x_train, y_train, x_test, y_test = (_read_idx(path) for path in paths)
    return _images(x_train, 1, 28), y_train.astype("int32"), _images(x_test, 1, 28), y_test.astype("int32")


def load_cifar10(folder):
    """CIFAR-10's "python version": a folder cifar-10-batches-py of six files."""
    inner = Path(folder) / "cifar-10-batches-py"
    folder = inner if inner.is_dir() else Path(folder)
    paths = [_find(folder, name) for name in CIFAR10_FILES]
    _refuse_missing(folder, "CIFAR-10", CIFAR10_FILES, paths, "https://www.cs.toronto.edu/~kriz/cifar.html")
    batches = []
    for path in paths:
        with open(path, "rb") as file:
            batches.append(pickle.load(file, encoding="bytes"))
    x = [_images(batch[b"data"], 3, 32) for batch in batches]
    y = [np.asarray(batch[b"labels"], "int32") for batch in batches]
    return np.concatenate(x[:5]), np.concatenate(y[:5]), x[5], y[5]


def _images(pixels, channels, side):
    return pixels.reshape(-1, channels, side, side).astype("float32") / np.float32(255)


def _find(folder, name):
    for path in (Path(folder) / name, Path(folder) / (name + ".gz")):
        if path.is_file():
            return path
    return None


def _refuse_missing(folder, data, names, paths, source):
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        sys.exit(
            f"{data} is not complete in {folder}: missing {', '.join(missing)}.\n"
            f"Get the files from {source}, or leave --data out to train on bundled digits."
        )


def _read_idx(path):
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, "u1", offset=4 + 4 * dimensions).reshape(shape)
