"""Images for the experiments: scikit-learn's digits, or CIFAR-10 from its real files."""

from __future__ import annotations

import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
ARCHIVE = "cifar-10-python.tar.gz"


@dataclass(frozen=True)
class Images:
    """Images as float32 (number, channels, height, width) of mean 0, and labels; to train on and to validate."""

    train: np.ndarray
    train_labels: np.ndarray
    validation: np.ndarray
    validation_labels: np.ndarray
    classes: int
    padding: int  # how far an image may be shifted while training
    flip: bool  # whether it may be mirrored while training


def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 pixels, a fifth of them to validate on."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = (source.images.astype(np.float32) / 16)[:, None]
    labels = source.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    train, validation = order[:1437], order[1437:]
    images = images - images[train].mean(axis=0)
    return Images(images[train], labels[train], images[validation], labels[validation], 10, padding=1, flip=False)


def cifar10(folder: Path) -> Images:
    """60,000 photographs of 32 x 32 pixels, 10,000 of them to validate on."""
    parts = [_read(folder, name) for name in BATCHES]
    images = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32).astype(np.float32) / 255
    labels = np.concatenate([part[1] for part in parts]).astype(np.int64)
    if images.shape != (60_000, 3, 32, 32) or labels.shape != (60_000,):
        raise SystemExit(f"{folder} holds {len(images)} images and {len(labels)} labels; CIFAR-10 has 60,000")
    images -= images[:50_000].mean(axis=0)
    return Images(images[:50_000], labels[:50_000], images[50_000:], labels[50_000:], 10, padding=4, flip=True)


def load(name: str, folder: Path | None) -> Images:
    """Returns the data set of a name."""
    if name == "digits":
        return digits()
    if folder is None:
        raise SystemExit("CIFAR-10 is not part of this package: give --folder with its python version's files")
    return cifar10(folder)


def _read(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    loose = [place / name for place in (folder, folder / "cifar-10-batches-py") if (place / name).exists()]
    if loose:
        with loose[0].open("rb") as file:
            return _unpickle(file)
    if (folder / ARCHIVE).exists():
        with tarfile.open(folder / ARCHIVE) as archive:
            member = archive.extractfile(f"cifar-10-batches-py/{name}")
            assert member is not None, f"{name} is a folder in {ARCHIVE}"
            return _unpickle(member)
    raise SystemExit(
        f"{folder} has neither {name} nor {ARCHIVE}: --folder needs the python version of CIFAR-10, unpacked "
        "or not, from https://www.cs.toronto.edu/~kriz/cifar.html"
    )


class _ArraysOnly(pickle.Unpickler):
    """The files are pickles of arrays and lists; anything else in one is not CIFAR-10, and is not run."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] in ("numpy", "_codecs"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no file of CIFAR-10 does")


def _unpickle(file: IO[bytes]) -> tuple[np.ndarray, np.ndarray]:
    content = _ArraysOnly(file, encoding="bytes").load()
    return content[b"data"], np.asarray(content[b"labels"])
