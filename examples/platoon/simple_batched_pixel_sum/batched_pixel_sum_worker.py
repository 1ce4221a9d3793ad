"""A worker: adds up the images that the controller deals out, and adds its sums to the shared one."""

from __future__ import annotations

import numpy as np

from platoon.channel import Worker
from platoon.param_sync import ParamSyncRule


class SumSync(ParamSyncRule):
    """Moves the worker's sum into the shared one."""

    def update_params(self, local_params: list[np.ndarray], master_params: list[np.ndarray]) -> None:
        """Adds, and begins anew."""
        master_params[0] += local_params[0]
        local_params[0].fill(0)


def main() -> None:
    """Works until there are no more minibatches."""
    parser = Worker.default_parser()
    parser.add_argument("--sync-every", type=int, default=10, help="minibatches between two synchronisations")
    args = parser.parse_args()
    worker = Worker(**Worker.default_arguments(args))
    worker.init_mb_sock()
    total = np.zeros(worker.send_req("get_data_shape"))
    worker.init_shared_params([total], SumSync())
    images = 0
    while True:
        batches = 0
        while batches < args.sync_every and (batch := worker.recv_mb()):
            total += batch[0].sum(axis=0)
            images += len(batch[0])
            batches += 1
        worker.sync_params()
        worker.send_req("done", {"num_batches": batches})
        if batches < args.sync_every:  # no more
            break
    print(f"worker {worker.local_rank}: {images} images")
    # The last to come here sees the whole sum, and has the controller compare it.
    if worker.send_req("finished") == "last":
        worker.send_req("sum", {"sum": worker.shared_params[0]})
    worker.close()


if __name__ == "__main__":
    main()
