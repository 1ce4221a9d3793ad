"""Softmax regression on handwritten digits, trained by any number of workers on one shared table.

    python examples/logistic_regression.py                           # one worker
    multiverso run -n 4 examples/logistic_regression.py              # four, asynchronous
    multiverso run -n 4 examples/logistic_regression.py --sync       # four, in rounds: always the same bits
    mpirun -np 4 python examples/logistic_regression.py              # four, under MPI

The data is scikit-learn's bundled digits (1,797 images of 8 x 8), or MNIST when --data names a folder with
its four IDX files. Model and gradient are plain NumPy; lines marked "multiverso" are all that sharing takes.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np

import multiverso as mv

CLASSES = 10
MNIST_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def read_idx(folder: Path, name: str) -> np.ndarray:
    """One IDX file of bytes, plain or gzipped, as an array of the shape that its header gives."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise SystemExit(f"{folder} has neither {name} nor {name}.gz: --data needs MNIST's {', '.join(MNIST_FILES)}")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dimensions = content[3] if content[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(content, ">u4", count=dimensions, offset=4) if dimensions else ()
    if not dimensions or len(content) != 4 + 4 * dimensions + int(np.prod(shape)):
        raise SystemExit(f"{path} is not a complete IDX file of bytes")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape([int(n) for n in shape])


def load_data(folder: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images as float32 rows in [0, 1] with a 1 at the end and labels, for training, then for testing."""
    if folder is not None:
        images, labels, test_images, test_labels = (read_idx(folder, name) for name in MNIST_FILES)
        images, test_images = (x.reshape(len(x), -1) / np.float32(255) for x in (images, test_images))
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        train, test = order[:1437], order[1437:]
        images, test_images = (digits.data[rows].astype(np.float32) / 16 for rows in (train, test))
        labels, test_labels = digits.target[train], digits.target[test]
    images, test_images = (np.hstack([x, np.ones((len(x), 1), np.float32)]) for x in (images, test_images))
    return images, labels.astype(np.int64), test_images, test_labels.astype(np.int64)


def gradient(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy of softmax(images @ weights)."""
    scores = images @ weights
    scores -= scores.max(axis=1, keepdims=True)
    probabilities = np.exp(scores)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return images.T @ probabilities / np.float32(len(labels))


def accuracy(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> float:
    return float(((images @ weights).argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with MNIST's four IDX files (.gz or not)")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16, help="images in a minibatch of one worker")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate")
    parser.add_argument("--sync", action="store_true", help="synchronous rounds: reproducible bit for bit")
    parser.add_argument("--staleness", type=int, help="no worker more than this many exchanges ahead of the slowest")
    options = parser.parse_args()

    images, labels, test_images, test_labels = load_data(options.data)
    weights = np.random.default_rng(1).normal(0, 0.01, (images.shape[1], CLASSES)).astype(np.float32)
    rate = np.float32(options.rate)

    mv.init(sync=options.sync, staleness=options.staleness)  # multiverso: join the job, or start one
    table = mv.ArrayTableHandler(weights.size, init_value=weights)  # multiverso: the master's initial value counts
    mv.barrier()  # multiverso: all start together
    table.get(out=weights)  # multiverso: and from the same value
    started = time.perf_counter()
    exchanges = 0

    for epoch in range(1, options.epochs + 1):
        rows = mv.shard(len(images), epoch=epoch)  # multiverso: this worker's part of the images, equally long in all
        for batch in np.array_split(rows, max(1, len(rows) // options.batch)):
            table.add(-rate * gradient(weights, images[batch], labels[batch]))  # multiverso: push what was learned
            table.get(out=weights)  # multiverso: pull what all have learned
            exchanges += 1
        if mv.is_master_worker():  # multiverso: one of them speaks for all
            print(f"epoch={epoch} accuracy={accuracy(weights, test_images, test_labels):.3f}", flush=True)

    mv.barrier()  # multiverso: everyone has finished
    seconds = time.perf_counter() - started
    table.get(out=weights)  # multiverso: now the same in all workers
    if mv.is_master_worker():
        print(
            f"workers={mv.workers_num()} accuracy={accuracy(weights, test_images, test_labels):.3f} "
            f"seconds={seconds:.2f} exchanges_per_second={mv.workers_num() * exchanges / seconds:.0f}",
            flush=True,
        )
    mv.shutdown()  # multiverso: leave; nothing is left behind


if __name__ == "__main__":
    main()
