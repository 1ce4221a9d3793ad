"""As many hosts as one process has room for: each has a connection to each other, in every role."""

from __future__ import annotations

from typing import Any

import numpy as np
from rehearsing import rehearsal

import multiverso as mv
from multiverso.runtime import Session

HOSTS = 16


def test_sixteen_hosts_add_up_exactly() -> None:
    keys = np.arange(100) * 7919

    def work(session: Session) -> Any:
        array = mv.ArrayTableHandler(1000, dtype="int64", session=session)
        rows = mv.KeyedTable(2, dtype="int64", session=session)
        for _ in range(3):
            array.add(np.full(1000, 1 + session.worker_id))
            rows.add(np.full((keys.size, 2), 1 + session.worker_id), keys)
        session.barrier()
        found = {*array.get().tolist(), *rows.get(keys).reshape(-1).tolist()}
        session.barrier()
        return found

    with rehearsal(*[1] * HOSTS) as job:
        assert job.run(work) == [{3 * HOSTS * (HOSTS + 1) // 2}] * HOSTS
