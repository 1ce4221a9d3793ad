"""Softmax regression in PyTorch, trained by any number of processes.

    multiverso run -n 4 examples/torch/logistic_regression.py

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that. It trains on scikit-learn's
digits, or on CIFAR-10's own files with --data FOLDER.
"""

import argparse

import numpy as np
import torch
from load_data import load
from torch import nn
from torch.nn import functional as F

import multiverso as mv  # multiverso
from multiverso.torch import ParamManager  # multiverso


def network(channels, side):
    """One linear layer; the softmax is in the loss."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.02)
    options = parser.parse_args()

    mv.init()  # multiverso
    torch.manual_seed(0)
    x_train, y_train, x_test, y_test = map(torch.from_numpy, load(options.data))
    model = network(x_train.shape[1], x_train.shape[2])
    optimizer = torch.optim.SGD(model.parameters(), options.rate, momentum=0.9)
    manager = ParamManager(model)  # multiverso
    for epoch in range(options.epochs):
        # multiverso, was: rows = np.random.default_rng([0, epoch]).permutation(len(x_train))
        rows = mv.shard(len(x_train), epoch)
        for batch in np.array_split(rows, max(1, len(rows) // options.batch_size)):
            optimizer.zero_grad()
            F.cross_entropy(model(x_train[batch]), y_train[batch]).backward()
            optimizer.step()
            manager.sync_all_param()  # multiverso
        mv.barrier()  # multiverso
        manager.sync_all_param()  # multiverso
        # multiverso, was: if True:
        if mv.is_master_worker():
            with torch.no_grad():
                accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)
    # multiverso, was: if True:
    if mv.is_master_worker():
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
