"""The controller: says when to validate, keeps the best error, stops when it has not improved for long."""

from __future__ import annotations

import sys
import time
from typing import Any

from platoon.channel import Controller


class LSTMController(Controller):
    """Early stopping with patience.

    Args:
        max_mb: how many minibatches to train on at most, over all workers.
        patience: how many validations without a better error to bear.
        valid_freq: minibatches between two validations.
        settings: the arguments of `Controller`.
    """

    def __init__(self, max_mb: int, patience: int, valid_freq: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.max_mb, self.patience, self.valid_freq = max_mb, patience, valid_freq
        self.trained = self.next_validation = self.bad = 0
        self.errors: list[tuple[float, float]] = []
        self.started: float | None = None
        self.stopping = False

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Answers ``next`` with train, valid or stop; takes ``done`` and ``pred_errors``."""
        answer = None
        if req == "next":
            self.started = self.started or time.monotonic()
            answer = "stop" if self.stopping else self._next()
        elif req == "done":
            self.trained += req_info["train_len"]
        elif req == "pred_errors":
            answer = self._note(req_info["valid_err"], req_info["test_err"])
        else:
            return super().handle_control(req, worker_id, req_info)
        if not self.stopping and (self.trained >= self.max_mb or self.bad > self.patience):
            self.stopping = True
            seconds = time.monotonic() - (self.started or 0)
            valid, test = min(self.errors, default=(float("nan"), float("nan")))
            print(
                f"minibatches={self.trained} seconds={seconds:.1f} per_second={self.trained / seconds:.1f} "
                f"best_valid_error={valid:.4f} test_error={test:.4f}"
            )
        return answer

    def _next(self) -> str:
        if self.trained >= self.next_validation + self.valid_freq:
            self.next_validation += self.valid_freq
            return "valid"
        return "train"

    def _note(self, valid: float, test: float) -> str | None:
        better = valid <= min(self.errors, default=(1.0, 1.0))[0]
        self.errors.append((valid, test))
        self.bad = 0 if better else self.bad + 1
        print(f"after {self.trained} minibatches: valid error {valid:.4f}, test error {test:.4f}")
        return "best" if better else None


def main() -> int:
    """Runs the controller; returns its exit code."""
    parser = Controller.default_parser()
    parser.add_argument("--max-mb", type=int, default=3000, help="minibatches to train on in total")
    parser.add_argument("--patience", type=int, default=10, help="validations without improvement")
    parser.add_argument("--valid-freq", type=int, default=300, help="minibatches between validations")
    args = parser.parse_args()
    own = {"max_mb": args.max_mb, "patience": args.patience, "valid_freq": args.valid_freq}
    return LSTMController(**own, **Controller.default_arguments(args)).serve()


if __name__ == "__main__":
    sys.exit(main())
