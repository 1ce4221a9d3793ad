"""PyTorch, saved at the end of each epoch: started again, it goes on after the last one.

multiverso run -n 2 examples/resuming/with_torch.py --directory saved
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import multiverso as mv
from multiverso.checkpoints import random_state, set_random_state
from multiverso.torch import ParamManager


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    mv.init(sync=True)
    print(f"worker {mv.worker_id()} is process {os.getpid()}", flush=True)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    manager = ParamManager(model, every=5, rule=mv.rules.easgd(0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

    first = 0
    own = manager.load(options.directory, missing_ok=True)
    if own is not None:
        first = own["epoch"]
        optimizer.load_state_dict(own["optimizer"])
        set_random_state(own["random"])
        print(f"worker {mv.worker_id()} goes on after epoch {first}", flush=True)

    for epoch in range(first, options.epochs):
        print(f"epoch {epoch + 1} begins", flush=True)
        rows = torch.from_numpy(mv.shard(len(x), epoch))
        for batch in rows.split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            manager.step()
        own = {"epoch": epoch + 1, "optimizer": optimizer.state_dict(), "random": random_state()}
        manager.save(options.directory, own)

    if mv.is_master_worker():
        model.load_state_dict(manager.state_dict())
        accuracy = (model.eval()(x).argmax(1) == y).float().mean().item()
        print(f"epochs={options.epochs} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()


if __name__ == "__main__":
    main()
