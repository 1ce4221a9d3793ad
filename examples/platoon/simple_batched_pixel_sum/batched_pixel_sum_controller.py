"""The controller: deals out images of handwritten digits in minibatches while it answers requests.

    platoon-launcher batched_pixel_sum -D cpu cpu cpu

Any number of workers shares them; the sum of all pixels they find has to be the real one, exactly. The digits
are scikit-learn's (1,797 images of 8 x 8), gone through several times.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from platoon import PlatoonError
from platoon.channel import Controller


class PixelSumController(Controller):
    """Deals out a data set once.

    Args:
        dataset: the images, one a row.
        batch_size: images in a minibatch; the last may have fewer.
        settings: the arguments of `Controller`.
    """

    def __init__(self, dataset: np.ndarray, batch_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.dataset, self.batch_size = dataset, batch_size
        self.processed = 0
        self.finished: set[int] = set()
        self.correct = False
        self.started = time.monotonic()

    def deal(self) -> None:
        """Sends all minibatches; runs in a thread beside `serve`."""
        try:
            for start in range(0, len(self.dataset), self.batch_size):
                self.send_mb([self.dataset[start : start + self.batch_size]])
            self.end_mb()
        except PlatoonError as error:
            self.stop(str(error))

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Answers the workers."""
        if req == "get_data_shape":
            return self.dataset.shape[1:]
        if req == "done":
            self.processed += req_info["num_batches"]
            return None
        if req == "finished":
            self.finished.add(worker_id)
            return "last" if len(self.finished) == len(self._devices) else "wait"
        if req == "sum":
            self.correct = bool((np.array(req_info["sum"]) == self.dataset.sum(axis=0)).all())
            seconds = time.monotonic() - self.started
            print(f"minibatches={self.processed} seconds={seconds:.2f} correct={self.correct}")
            return None
        return super().handle_control(req, worker_id, req_info)


def main() -> int:
    """Runs the controller; returns its exit code."""
    parser = Controller.default_parser()
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--turns", type=int, default=20, help="how often to go through the digits")
    args = parser.parse_args()
    images = np.tile(load_digits().data, (args.turns, 1))
    settings = {**Controller.default_arguments(args), "data_port": args.data_port or 0}
    controller = PixelSumController(images, args.batch_size, **settings)
    threading.Thread(target=controller.deal, daemon=True).start()
    code = controller.serve()
    return code if controller.correct else 1


if __name__ == "__main__":
    sys.exit(main())
