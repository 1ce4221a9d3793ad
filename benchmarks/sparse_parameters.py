"""What sharing costs a model whose largest parameter is a sparse embedding.

    python benchmarks/sparse_parameters.py                 # half a minute; prints JSON
    python benchmarks/sparse_parameters.py --rows 2000000  # larger

An `EmbeddingBag` (sum) of 200,000 x 64 with ``sparse=True`` and a linear layer, plain SGD, minibatches of 256 bags of
8 ids.
One process, four models in turns: alone, shared whole at every step (``whole_every=1``), shared by rows (the default,
whole at every 100th step), and a `multiverso.torch.EmbeddingBag` over a table, which keeps no copy at all.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import torch

import multiverso as mv
import multiverso.torch as mvt

DIM, BAGS, IDS = 64, 256, 8


class Model(torch.nn.Module):  # type: ignore[misc]
    """Bags of ids, and one number for each."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags
        self.score = torch.nn.Linear(DIM, 1)

    def forward(self, ids: Any) -> Any:
        return self.score(self.bags(ids))[:, 0]


def prepared(how: str, rows: int) -> tuple[Any, Any]:
    if how == "over a table":
        bags: Any = mvt.EmbeddingBag(mv.KeyedTable(DIM, initial="normal", updater="sgd"), mode="sum", learning_rate=0.1)
    else:
        bags = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
    model = Model(bags)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if how in ("whole", "by rows"):
        optimizer = mvt.SharedOptimizer(optimizer, model, whole_every=1 if how == "whole" else 100)
    elif how == "over a table":
        optimizer = mvt.SharedOptimizer(optimizer, model.score)
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=100, help="of each model in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mv.init()
    models = {how: prepared(how, options.rows) for how in ("alone", "whole", "by rows", "over a table")}
    took: dict[str, list[float]] = {how: [] for how in models}
    for turn in range(options.rounds + 1):
        for how, (model, optimizer) in models.items():
            steps = options.steps if how != "whole" else max(options.steps // 5, 1)
            batches = [torch.randint(0, options.rows, (BAGS, IDS)) for _ in range(steps)]
            began = time.perf_counter()
            for ids in batches:
                optimizer.zero_grad()
                (model(ids) - 1).square().mean().backward()
                optimizer.step()
            if turn:
                took[how].append((time.perf_counter() - began) / steps * 1e3)
    mv.shutdown()
    result = {
        "milliseconds_a_step": {how: round(statistics.median(times), 3) for how, times in took.items()},
        "rows": options.rows,
        "dim": DIM,
        "ids_a_step": BAGS * IDS,
        "rounds": options.rounds,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
