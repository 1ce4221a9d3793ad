"""What sharing costs a training step: ResNet-32 in PyTorch on the CPU, one worker, an exchange every minibatch.

    python benchmarks/torch_resnet32.py              # JSON on standard output

In one run, step by step in turn: the training step, the exchange after it, and a plain copy of the parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import multiverso as mv
from multiverso.torch import ParamManager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "torch"))
from resnet import ResNet


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--exchanges", type=int, default=20, help="exchanges and copies measured after each step")
    options = parser.parse_args()

    mv.init()
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(options.batch_size, 3, 32, 32), torch.randint(0, 10, (options.batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    unshared = [seconds(step) for _ in range(3)][1:]
    manager = ParamManager(model)
    source = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    target = np.zeros_like(source)  # NumPy copies on one thread, as the exchange does
    steps, first, exchanges, copies = [], [], [], []
    for _ in range(options.steps):
        steps.append(seconds(step))
        first.append(seconds(manager.sync_all_param))  # after a step: the caches hold other things
        for _ in range(options.exchanges):
            exchanges.append(seconds(manager.sync_all_param))
            copies.append(seconds(lambda: np.copyto(target, source)))
    mv.shutdown()

    median = statistics.median
    after_step, exchange, copy, whole = (median(first[1:]), median(exchanges), median(copies), median(steps[1:]))
    report = {
        "benchmark": "torch_resnet32",
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": options.batch_size,
        "torch_threads": torch.get_num_threads(),
        "step_ms": whole * 1e3,
        "step_before_sharing_ms": median(unshared) * 1e3,
        "exchange_after_step_ms": after_step * 1e3,
        "exchange_ms": exchange * 1e3,
        "copy_ms": copy * 1e3,
        "exchange_to_copy": exchange / copy,
        "share_of_step_percent": 100 * after_step / (whole + after_step),
        "goals": {"exchange_to_copy": 2.5, "share_of_step_percent": 1.0},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
