"""Rows across hosts: only what somebody has changed is read again."""

from __future__ import annotations

from typing import Any

import numpy as np
from rehearsing import rehearsal

from multiverso.runtime import Session
from multiverso.tables import MatrixTableHandler


def test_only_rows_that_somebody_has_changed_are_read_again_after_an_exchange() -> None:
    rows, columns = 40_000, 16  # several chunks, some homes here and some there

    def work(session: Session) -> Any:
        me = session.worker_id
        table = MatrixTableHandler(rows, columns, session=session)
        session.barrier()
        everything, values = table.get(changed=True)
        assert everything.size == rows
        assert not values.any()
        session.barrier()  # nobody adds before
        seen = []
        for turn in range(3):
            mine = me * 20_000 + 7 + turn
            table.add(np.full((1, columns), turn + 1.0), row_ids=[mine])
            session.barrier()
            ids, values = table.get(changed=True)
            changed = {int(i): float(v) for i, v in zip(ids, values[:, 0], strict=True)}
            assert all(changed[worker * 20_000 + 7 + turn] == turn + 1 for worker in range(session.workers_num))
            seen.append(ids.size)
            session.barrier()
        assert table.get(changed=True)[0].size == 0
        return seen

    with rehearsal(1, 1) as job:
        for seen in job.run(work):
            assert max(seen) < rows // 20, seen
