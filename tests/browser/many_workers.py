"""A job of many workers, threads of this process; worker 2 is slow. Argument: how many. Ends with its input."""

import math
import sys
import threading
import time

import numpy as np

from multiverso.runtime import Node, Session
from multiverso.tables import ArrayTableHandler
from multiverso.tables.log import log_of


def work(node: Node, worker: int, over: threading.Event) -> None:
    with Session(node.address, worker, sync=True, timeout_seconds=100, start_timeout_seconds=100) as session:
        table, log = ArrayTableHandler(1000, session=session, name="weights"), log_of(session)
        step = 0
        while True:
            time.sleep(0.3 if worker == 2 else 0.02 + 0.05 * (worker * 7919 % 10) / 10)
            table.add(np.full(1000, -1e9 if worker == 0 and over.is_set() else 1.0))
            if table.get()[0] < 0:
                return
            step += 1
            log.write({"loss": 2 * math.exp(-step / 30) + 0.01 * (worker % 7)}, step)


def main(workers: int) -> None:
    over = threading.Event()
    with Node(workers) as node:
        print(node.address, flush=True)
        threads = [threading.Thread(target=work, args=(node, worker, over)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        over.set()
        for thread in threads:
            thread.join()


main(int(sys.argv[1]))
