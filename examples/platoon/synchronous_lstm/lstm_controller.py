"""The controller: takes the error of each epoch, and stops all workers at the same one."""

from __future__ import annotations

import sys
import time
from typing import Any

from platoon.channel import Controller


class LSTMController(Controller):
    """Early stopping with patience, for workers that go in step.

    Args:
        epochs: at most so many.
        patience: how many epochs without a better validation error to bear.
        settings: the arguments of `Controller`.
    """

    def __init__(self, epochs: int, patience: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.epochs, self.patience = epochs, patience
        self.answers: list[str] = []  # for each epoch: the first worker's report decides for all
        self.reported: dict[int, int] = {}  # worker: epochs
        self.errors: list[tuple[float, float]] = []
        self.started = time.monotonic()
        self.steps = 0

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Answers ``pred_errors`` with go or stop."""
        if req != "pred_errors":
            return super().handle_control(req, worker_id, req_info)
        epoch = self.reported[worker_id] = self.reported.get(worker_id, 0) + 1
        if epoch > len(self.answers):
            self.steps += req_info["steps"]
            self.errors.append(tuple(req_info["errors"]))
            valid, test = self.errors[-1]
            print(f"epoch {epoch}: valid error {valid:.4f}, test error {test:.4f}")
            best = min(range(epoch), key=lambda i: self.errors[i][0])
            stop = epoch >= self.epochs or epoch - 1 - best > self.patience
            self.answers.append("stop" if stop else "go")
            if stop:
                seconds = time.monotonic() - self.started
                valid, test = self.errors[best]
                print(
                    f"epochs={epoch} steps={self.steps} seconds={seconds:.1f} "
                    f"best_valid_error={valid:.4f} test_error={test:.4f}"
                )
        return self.answers[epoch - 1]


def main() -> int:
    """Runs the controller; returns its exit code."""
    parser = Controller.default_parser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--patience", type=int, default=3, help="epochs without improvement")
    args = parser.parse_args()
    return LSTMController(args.epochs, args.patience, **Controller.default_arguments(args)).serve()


if __name__ == "__main__":
    sys.exit(main())
