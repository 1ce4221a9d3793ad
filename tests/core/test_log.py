"""mv.log: what a worker says is seen in the job's status, and written for TensorBoard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import together

import multiverso
from multiverso.layout.words import MAX_WORKERS
from multiverso.memory.segment import SharedMemory
from multiverso.runtime import Node, Session
from multiverso.runtime.collective.agreement import all_gather
from multiverso.runtime.job.logged import BYTES, Logged, read
from multiverso.tables.log import FOLDER, log_of


def test_the_last_values_of_each_worker_are_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")
    with Node(2) as node:

        def work(session: Session) -> Any:
            log = log_of(session)
            if session.worker_id:
                log.write({"loss": np.float32(0.5), "rate": 1}, None)
                log.write({"loss": np.array([0.25])[0]}, None)
                with pytest.raises(TypeError, match="loss is a number"):
                    log.write({"loss": "low"}, None)
            session.barrier()
            status = node.status()["workers"] if session.worker_id else None
            session.barrier()
            return status

        silent, speaks = together(work, 2, node=node)[1]
    assert silent["logged"] is None
    assert speaks["logged"] == {"step": 1, "values": {"rate": 1.0, "loss": 0.25}}


def test_what_is_logged_and_what_workers_tell_each_other_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "")

    def work(session: Session) -> Any:
        log, told = log_of(session), []
        for step in range(3):
            log.write({"loss": step}, step)
            told.append(all_gather(session, f"{session.worker_id} in {step}"))
        log.write({"loss": 3.0}, 3)
        session.barrier()
        return told

    with Node(2) as node:
        assert (
            together(work, 2, node=node)
            == [[{worker: f"{worker} in {step}" for worker in range(2)} for step in range(3)]] * 2
        )
        logged = [worker["logged"] for worker in node.status()["workers"]]
    assert logged == [{"step": 3, "values": {"loss": 3.0}}] * 2


def test_no_two_parts_share_their_memory_by_accident() -> None:
    source = Path(multiverso.__file__).parent
    names = [
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'(?:MEMORY = |shared_memory\(f?)"([^"{]+)', path.read_text())
    ]
    assert len(names) > 3
    assert len(set(names)) == len(names)


def test_the_newest_names_stay_when_there_is_no_more_room_and_half_written_ones_are_not_read() -> None:
    memory = np.zeros(BYTES, np.uint8)
    shared = SharedMemory("notes", -1, memory)
    notes = Logged(shared, MAX_WORKERS - 1)
    assert read(memory, MAX_WORKERS - 1) is None
    for i in range(100):
        notes.write(i, {f"a rather long name {i}": i})
    found = read(memory, MAX_WORKERS - 1)
    assert found is not None
    assert found["step"] == 99
    assert list(found["values"])[-1] == "a rather long name 99"
    assert 10 < len(found["values"]) < 40
    assert not memory[: BYTES - 1024].any()
    words = memory[-1024:-1008].view(np.int64)
    words[0] += 1  # its writer was killed
    assert read(memory, MAX_WORKERS - 1) is None
    words[:] = 2, 1  # nonsense
    memory[-1008] = ord("+")
    assert read(memory, MAX_WORKERS - 1) is None
    notes.write(100, {"x": 1.0})
    assert read(memory, MAX_WORKERS - 1) is not None


def test_tensorboard_gets_each_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not in this environment")
    script = tmp_path / "train.py"
    script.write_text(
        "import multiverso as mv\nmv.init()\nmv.log(loss=0.5, step=3)\nmv.log(loss=0.25)\nmv.shutdown()\n"
    )
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, timeout=120)
    assert not (tmp_path / "runs").exists()  # unless it is asked for
    env = {**os.environ, "MULTIVERSO_TENSORBOARD": "runs"}
    subprocess.run([sys.executable, script], cwd=tmp_path, check=True, timeout=120, env=env)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("train-")
    code = (
        "import sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
        "print([(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors('loss')])"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code, run / "worker-0"], check=True, timeout=120, capture_output=True, text=True
    )
    assert seen.stdout == "[(3, 0.5), (4, 0.25)]\n"
