"""Several controllers under mpiexec, each with workers of its own: one all_reduce over all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

WORKER = """
    import numpy as np
    from platoon import Worker
    worker = Worker()
    rank, size = worker.global_rank, worker.global_size
    assert size == 5 and worker.local_size in (2, 3)
    assert rank == worker.local_rank + (0 if worker.local_size == 2 else 2)
    for dtype in ("float32", "float64", "float16", "int32", "int64"):
        for elements in (1, 1000, 70_001):
            arrays = [(np.arange(elements) % 50 + other).astype(dtype) for other in range(size)]
            for op, loop in (("sum", np.sum), ("max", np.max), ("min", np.min)):
                wanted = loop(np.array(arrays, "float64"), axis=0).astype(dtype)
                np.testing.assert_array_equal(worker.all_reduce(arrays[rank], op), wanted)
            inplace = arrays[rank].copy()
            worker.all_reduce(inplace, "average", inplace)
            wanted = np.sum(np.array(arrays, "float64"), axis=0) / size
            np.testing.assert_allclose(inplace, np.floor(wanted) if dtype[0] == "i" else wanted, rtol=1e-3)
    assert worker.all_reduce(np.full(3, 2.0), "product").tolist() == [32] * 3
    print(rank, "of", size)
"""


def test_two_controllers(experiment: Any) -> None:
    experiment.write(hosts_worker=WORKER)
    process = mpiexec(experiment, "hosts")
    experiment.finish(process)
    said = [file.read_text() for file in experiment.folder.glob("logs*/worker*.out")]
    assert sorted(said) == [f"{rank} of 5\n" for rank in range(5)]


def test_a_worker_that_is_killed_ends_both_hosts(experiment: Any) -> None:
    experiment.write(
        hosts_worker="""
        import os
        import numpy as np
        from platoon import Worker
        worker = Worker()
        worker.all_reduce(np.ones(3))
        if worker.global_rank == 3:
            os.kill(os.getpid(), 9)
        worker.all_reduce(np.ones(3))
        """
    )
    process = mpiexec(experiment, "hosts")
    said = experiment.finish(process, None)
    assert process.returncode != 0
    assert "ended with signal SIGKILL" in said


def test_without_mpi_it_is_an_error(experiment: Any) -> None:
    experiment.write(
        hosts_worker="pass",
        start="""
        import sys
        sys.modules["mpi4py"] = None
        from platoon.channel.controller import spawn_controller
        sys.exit(spawn_controller(["hosts", "logs", "--multi", "-D", "cpu"]))
        """,
    )
    assert "pip install mpi4py" in experiment.finish(experiment.start("start.py"), 2)


def mpiexec(experiment: Any, name: str) -> Any:
    """Starts two controllers, with two and with three workers."""
    launch = str(Path(sys.executable).with_name("mpiexec"))
    controller = [sys.executable, "-m", "platoon.channel.controller", name]
    parts = [["-n", "1", *controller, f"logs{n}", "--multi", "-D", *["cpu"] * n] for n in (2, 3)]
    code = f"import os; os.execv({launch!r}, {[launch, *parts[0], ':', *parts[1]]!r})"
    return experiment.start("-c", code)
