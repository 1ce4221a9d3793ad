"""Several controllers, started by the launcher or by mpiexec, each with workers of its own: one job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

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


WORKER_RULES = """
    import numpy as np
    from platoon import Worker
    from platoon.param_sync import ASGD, EASGD, ParamSyncRule

    class Adding(ParamSyncRule):
        def update_params(self, local, shared):
            for mine, everyones in zip(local, shared):
                everyones += 2
                mine[...] = everyones

    worker = Worker()
    rank = worker.global_rank
    assert (worker.local_rank, worker.local_size, worker.global_size, worker._multinode) == (rank % 2, 2, 4, True)

    def meet():
        worker.all_reduce(np.zeros(1))
        worker._attach().barrier()

    # what each has learnt is added, wherever it is
    params = [np.full(50_000, 5.0, np.float32), np.zeros((2, 3))]
    worker.init_shared_params(params, ASGD())
    worker.copy_to_local()
    meet()
    for _ in range(3):
        params[0] += rank + 1
        params[1] += 1
        worker.sync_params()
    meet()
    worker.copy_to_local()
    assert params[0].min() == params[0].max() == 5 + 3 * 10, params[0]
    assert params[1].tolist() == [[12.0] * 3] * 2
    meet()

    # a rule of one's own
    params = [np.zeros(50_000, np.float32), np.zeros((2, 3))]
    worker.init_shared_params(params, Adding())
    worker.sync_params()
    meet()
    worker.copy_to_local()
    assert params[0].min() == params[0].max() == 35 + 4 * 2, params[0]
    meet()

    # in place, under the lock of this host
    if rank == 3:
        worker.lock()
        worker.shared_params[1][...] = 1
        worker.unlock()
    meet()
    worker.copy_to_local()
    assert params[1].tolist() == [[1.0] * 3] * 2
    meet()

    # each is drawn to the shared parameters, and these to each
    params[1][...] = 9
    worker.init_shared_params(params, EASGD(0.1))
    meet()
    worker.sync_params()
    assert np.all((8 < params[1]) & (params[1] < 8.7)), params[1]
    meet()
    worker.copy_to_local()
    assert np.all((1.8 < params[1]) & (params[1] < 4.2)), params[1]
    for end in ("min", "max"):  # the same for all, whatever came when
        assert np.array_equal(worker.all_reduce(params[1], end), params[1])

    # this host's controller answers, and deals to its own workers
    assert worker.send_req("hello") == "HELLO"
    total = 0
    while batch := worker.recv_mb():
        total += len(batch[1])
    together = worker.all_reduce(np.array([total]))
    print("done", rank, *together)
"""

DEAL_CONTROLLER = """
    import sys, threading
    import numpy as np
    from platoon.channel import Controller

    class Mine(Controller):
        def handle_control(self, req, worker_id, info):
            return req.upper()

    args = Mine.default_parser().parse_args()
    controller = Mine(**{**Mine.default_arguments(args), "data_port": 0})

    def deal():
        for i in range(40):
            controller.send_mb([np.full((8, 2), i), np.arange(8)])
        controller.end_mb()

    threading.Thread(target=deal, daemon=True).start()
    sys.exit(controller.serve())
"""


def test_rules_and_minibatches_on_a_rehearsal_of_two_hosts(experiment: Any) -> None:
    experiment.write(hosts_worker=WORKER_RULES, hosts_controller=DEAL_CONTROLLER)
    result = experiment.launch("hosts", "-H", "2", "-D", "cpu", "cpu", PLATOON_HOSTS="not-asked")
    assert result.code == 0, result
    assert sorted(result.outputs()) == [f"done {rank} {2 * 40 * 8}\n" for rank in range(4)], result
    assert "hosts: 4 workers on host-0, host-1" in result.out
    assert "worker 3 ended: exit code 0" in result.out
    assert "success: 4 workers" in result.out


def test_a_failed_worker_ends_all_hosts_and_is_named(experiment: Any, port: int) -> None:
    """Over what stands in for ssh: it runs the command line here."""
    experiment.write(
        fails_worker="""
        import sys
        from platoon import Worker
        worker = Worker()
        if worker.global_rank == 1:
            sys.exit("the data is gone")
        worker.all_reduce([1.0])
        """
    )
    here = experiment.folder / "here.sh"
    here.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    here.chmod(0o755)
    ssh = ["--ssh", str(here), "--insecure-fabric", "--port", str(port)]
    result = experiment.launch("fails", "-D", "cpu", *ssh, PLATOON_HOSTS="127.0.0.1,localhost")
    assert result.code == 1, result
    assert "the controller on localhost" in result.err
    assert "the data is gone" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-H", "1", "-D", "cpu"), "a rehearsal has 2 to 64 hosts"),
        (("-H", "a", "b"), "no devices for a: name those of every host with -D"),
        (("-H", "a", "b", "-D", "cpu", "--ssh", "/no/ssh"), "--ssh /no/ssh: /no/ssh is not found"),
        (("-H", "-x", "b;c", "-D", "cpu"), ""),
    ],
)
def test_hosts_that_make_no_sense_are_refused(
    experiment: Any, capsys: Any, monkeypatch: Any, arguments: tuple[str, ...], said: str
) -> None:
    from platoon import launcher

    experiment.write(some_worker="pass")
    monkeypatch.chdir(experiment.folder)
    for name in ("PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(experiment.folder))
    try:
        code = launcher.main(["some", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (experiment.folder / "PLATOON_LOGS").exists()


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
