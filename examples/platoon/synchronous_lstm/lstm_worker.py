"""A worker: all workers train on equal parts of each step's data and average their gradients (all_reduce).

    platoon-launcher lstm -D cpu cpu

The same as training one network with minibatches as many times larger, so all workers have equal parameters
always.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from platoon.channel import Worker
from platoon.training.global_dynamics import AverageSGD

sys.path.insert(0, str(Path(__file__).parents[1]))
import text_task


def main() -> None:
    """Trains until the controller says stop."""
    parser = Worker.default_parser()
    parser.add_argument("--imdb", help="imdb.pkl; without it the docstrings are classified")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate of SGD")
    parser.add_argument("--most", type=int, default=6000, help="paragraphs of each source")
    parser.add_argument("--epoch", type=int, default=100, help="steps between two validations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    worker = Worker(**Worker.default_arguments(args))
    rank, size = worker.global_rank, worker.global_size
    data = text_task.load(args.imdb, most=args.most)
    torch.manual_seed(args.seed)  # the same first values in every worker
    model = text_task.Classifier(data.words)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)

    # All gradients in one array: one all_reduce for a step, and not one for each parameter.
    parameters = list(model.parameters())
    gradients = torch.zeros(sum(parameter.numel() for parameter in parameters))
    start = 0
    for parameter in parameters:
        parameter.grad = gradients[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    together = AverageSGD(worker)
    together.make_rule(gradients)

    rng = np.random.default_rng(args.seed)
    answer = None
    while answer != "stop":
        for _ in range(args.epoch):
            step = rng.integers(len(data.train[1]), size=size * args.batch_size)
            words, mask, labels = text_task.batch(data.train, step[rank::size])
            gradients.zero_()
            torch.nn.functional.cross_entropy(model(words, mask), labels).backward()
            together()
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            optimizer.step()
        mine = [(pairs[0][rank::size], pairs[1][rank::size]) for pairs in (data.valid, data.test)]
        errors = np.array([text_task.error(model, pairs) for pairs in mine])
        worker.all_reduce(errors, "average", errors)
        answer = worker.send_req("pred_errors", {"steps": args.epoch, "errors": errors})
    alike = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    assert torch.equal(worker.all_reduce(alike, "max"), worker.all_reduce(alike, "min")), "the workers differ"
    worker.close()


if __name__ == "__main__":
    main()
