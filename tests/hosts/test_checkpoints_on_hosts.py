"""A checkpoint of a job on several hosts has what every host has added, also what it has not sent yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from core_support import wait_for
from rehearsing import rehearsal

import multiverso as mv
from multiverso.hosts.options import ExchangeOptions
from multiverso.runtime import Session


def test_what_has_not_travelled_yet_is_in_it(tmp_path: Path) -> None:
    added = threading.Barrier(3)

    def save(session: Session) -> None:
        table = mv.ArrayTableHandler(1000, dtype="int64", session=session)
        for place in ("first", "then"):  # another one in the same job gathers anew
            with mv.checkpoint(tmp_path / place, session=session) as checkpoint:
                table.add([session.worker_id + 1] * 1000)
                added.wait(30)
                wait_for(lambda: checkpoint.save({"me": session.worker_id}))
                wait_for(lambda: (tmp_path / place / "manifest.json").exists())  # noqa: B023

    def load(session: Session) -> Any:
        table = mv.ArrayTableHandler(1000, dtype="int64", session=session)
        with mv.checkpoint(tmp_path / "then", resume=True, session=session) as checkpoint:
            own = checkpoint.restore()
        session.barrier()
        return own, set(table.get().tolist())

    seldom = ExchangeOptions.of(every=3600)  # seconds: nothing travels by itself
    with rehearsal(1, 2) as job:
        job.run(save, exchange=seldom)
    with rehearsal(2, 1) as job:
        assert job.run(load) == [({"me": me}, {12}) for me in range(3)]
