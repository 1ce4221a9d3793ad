"""A host that is stopped and goes on: nothing is lost, and who waits for it is told whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from core_support import outcome
from fabric_support import SECONDS, Adder, interrupt, new_shard

from multiverso.deadline import Deadline
from multiverso.errors import WaitTimeoutError
from multiverso.hosts.fabric import Fabric
from multiverso.hosts.transport.credentials import new_credentials
from multiverso.spec.table import TableSpec

OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from fabric_support import SECONDS, Adder, new_shard
from multiverso.deadline import Deadline
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.fabric import Fabric
from multiverso.spec.table import TableSpec

with Fabric(1, 2, Credentials.from_text(sys.stdin.readline()), share=0) as fabric:
    fabric.listen()
    fabric.connect(0, ("127.0.0.1", int(sys.argv[2])))
    shard = new_shard(TableSpec("array", 1, 700_000))
    fabric.attach(1, shard)
    adder = Adder(shard)
    for line in sys.stdin:
        if line == "add\\n":
            adder.add(np.ones(700_000))
        elif line in ("settle\\n", "take\\n"):
            getattr(fabric, line.strip())(Deadline.after(SECONDS))
        print(int(shard.values().min()), int(shard.values().max()), flush=True)
"""


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_stopped_host_is_waited_for_by_name_and_nothing_is_lost(encrypted: bool) -> None:
    job = new_credentials(encrypted)
    with Fabric(0, 2, job, share=0) as fabric:
        port = fabric.listen()[1]
        shard = new_shard(TableSpec("array", 1, 700_000))
        fabric.attach(1, shard)
        program = [sys.executable, "-c", OTHER, str(Path(__file__).parent), str(port)]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def other(word: str) -> list[int]:
                process.stdin.write(word + "\n")
                process.stdin.flush()
                return [int(number) for number in process.stdout.readline().split()]

            try:
                process.stdin.write(job.to_text() + "\n")
                other("add")
                adder, added = Adder(shard), 0
                for _ in range(5):
                    error = None
                    while error is None:  # `make pauses` may let it continue
                        os.kill(process.pid, signal.SIGSTOP)
                        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                        adder.add(np.ones(700_000))
                        added += 1
                        error = outcome(lambda: fabric.settle(Deadline.after(0.1)))
                    assert isinstance(error, WaitTimeoutError)
                    assert "host(s) 1" in str(error)
                    interrupt(fabric, 1)
                    os.kill(process.pid, signal.SIGCONT)
                fabric.settle(Deadline.after(SECONDS))
                other("settle")
                assert other("take") == [1 + added] * 2
                fabric.take(Deadline.after(SECONDS))
                assert np.all(shard.values() == 1 + added)
            finally:
                os.kill(process.pid, signal.SIGCONT)
                process.stdin.close()
