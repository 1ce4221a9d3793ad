"""Several workers in one process: a node, and a session in a thread for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from multiverso.runtime import Node, Session

SECONDS = 280.0  # the first use of a dtype compiles its kernels


def together(workers: int, work: Callable[[Session], Any], **options: Any) -> list[Any]:
    """Returns what ``work(session)`` returned in each worker, in worker order."""

    def worker(address: str, number: int) -> Any:
        with Session(address, number, timeout_seconds=SECONDS, **options) as session:
            return work(session)

    with closing(Node(workers=workers)) as node, ThreadPoolExecutor(workers) as threads:
        futures = [threads.submit(worker, node.address, number) for number in range(workers)]
        return [future.result(SECONDS) for future in futures]
