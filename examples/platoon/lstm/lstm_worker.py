"""A worker: trains an LSTM, and every few minibatches lets its parameters and the shared ones meet (EASGD).

    platoon-launcher lstm -D cpu cpu

or, by hand, ``python lstm_controller.py`` in one terminal and ``python lstm_worker.py`` in some others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from platoon.channel import Worker
from platoon.param_sync import ASGD, EASGD

sys.path.insert(0, str(Path(__file__).parents[1]))
import text_task


def main() -> None:
    """Trains until the controller says stop."""
    parser = Worker.default_parser()
    parser.add_argument("--imdb", help="imdb.pkl; without it the docstrings are classified")
    parser.add_argument("--rule", choices=["easgd", "asgd"], default="easgd")
    parser.add_argument("--alpha", type=float, help="of EASGD (default: 0.9 / number of workers)")
    parser.add_argument("--sync-every", type=int, default=10, help="minibatches between two meetings")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate of SGD")
    parser.add_argument("--most", type=int, default=6000, help="paragraphs of each source")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # 1. the worker, before the main loop
    worker = Worker(**Worker.default_arguments(args))
    data = text_task.load(args.imdb, most=args.most)
    torch.manual_seed(args.seed)
    model = text_task.Classifier(data.words)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)

    # 2. the shared parameters, once the model is there: the first worker's values count, and all begin with
    # them
    alpha = 0.9 / worker.local_size if args.alpha is None else args.alpha
    worker.init_shared_params(list(model.parameters()), EASGD(alpha) if args.rule == "easgd" else ASGD())
    worker.copy_to_local()
    print(f"worker {worker.local_rank}: {data.name}, {len(data.train[1])} to train on, alpha={alpha:.3g}")

    # 3. the main loop: the controller says what to do next
    rng = np.random.default_rng([args.seed, worker.local_rank])
    while (step := worker.send_req("next")) != "stop":
        if step == "train":
            for _ in range(args.sync_every):
                chosen = rng.integers(len(data.train[1]), size=args.batch_size)
                words, mask, labels = text_task.batch(data.train, chosen)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(words, mask), labels).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
            worker.sync_params(synchronous=True)
            worker.send_req("done", {"train_len": args.sync_every})
        if step == "valid":
            worker.copy_to_local()
            valid, test = text_task.error(model, data.valid), text_task.error(model, data.test)
            worker.send_req("pred_errors", {"valid_err": valid, "test_err": test})
    worker.close()


if __name__ == "__main__":
    main()
