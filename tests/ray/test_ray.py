"""`multiverso.ray` on a real Ray cluster: two nodes of Ray on this machine are two hosts of a job.

One cluster, in a process of its own, does everything: it takes as long to start as all that is done on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; `make ray` installs it")
SECONDS = 480.0
pytestmark = pytest.mark.timeout(520)
PROGRAM = """
import contextlib
import io
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import multiverso as mv
import multiverso.ray
from multiverso.ray.train import MultiversoConfig

folder = Path(sys.argv[1])


def adding(base):
    import numpy as np
    import multiverso as mv
    from multiverso.runtime.session.current import current

    mv.init()
    me, n = mv.worker_id(), mv.workers_num()
    table = mv.ArrayTableHandler(5_000, np.full(5_000, 5.0), name="sums")
    for _ in range(10):
        table.add(np.full(5_000, me + 1))
    mv.barrier()
    value = table.get()
    hosts = [current().hosts.index(host) for host in current().control.places]
    return base + me, float(value.min()), float(value.max()), hosts, os.environ["MULTIVERSO_EVERY"]


def failing():
    mv.init()
    mv.barrier()
    if mv.worker_id() == 1:
        raise ValueError("this is what is wrong")
    mv.barrier()


def dying():
    mv.init()
    mv.barrier()
    if mv.worker_id() == 2 and "MULTIVERSO_RESTARTS" not in os.environ:
        os.kill(os.getpid(), 9)
    mv.barrier()
    return os.environ["MULTIVERSO_RESTARTS"]


def replaced():
    mv.init()
    me, life = mv.worker_id(), mv.incarnation()
    table = mv.ArrayTableHandler(50, [99.0 if life else 5.0] * 50)
    lives = mv.Counter("lives")
    mv.barrier()
    table.add([1.0] * 50)
    mv.barrier()
    lives.fetch_add()
    if me == 2 and life == 0:
        os.kill(os.getpid(), 9)
    while lives.value < 4:
        time.sleep(0.02)
    mv.barrier()
    return me, life, float(table.get()[0])


def failing_late(file):
    mv.init()
    mv.barrier()
    me = mv.worker_id()
    with open(file, "a") as starts:
        starts.write(f"{me}\\n")
    mv.barrier()
    mv.shutdown()
    if me == 1:
        raise ValueError("its part was done")
    return me


def tell(file):
    part = Path(f"{file}-{os.getpid()}")
    part.write_text(ray.get_runtime_context().get_node_id())
    part.rename(file)


def rehosted(file):
    from multiverso.runtime.session.current import current

    mv.init()
    me, life = mv.worker_id(), mv.incarnation()
    table = mv.ArrayTableHandler(50, [99.0 if life else 5.0] * 50)
    lives = mv.Counter("lives")
    mv.barrier()
    table.add([1.0] * 50)
    mv.barrier()
    lives.fetch_add()
    places = current().control.places
    if places[me] != places[0] and life == 0:
        tell(file)
        time.sleep(200)
    while lives.value < 6:
        time.sleep(0.02)
    mv.barrier()
    return me, life, float(table.get()[0])


def rehosted_in_rounds(file):
    import zlib
    import numpy as np
    from multiverso.runtime.session.current import current

    mv.init(sync=True)
    me, life = mv.worker_id(), mv.incarnation()
    table = mv.ArrayTableHandler(1000, np.full(1000, 7.0 if life else 0.1))
    trained = mv.ArrayTableHandler(1000, updater="momentum")
    counts = mv.ArrayTableHandler(2)  # rounds of worker 0, and those of workers that came again
    places = current().control.places
    while True:
        table.add(np.random.default_rng(me).standard_normal(1000))
        trained.add(np.ones(1000))
        table.get(), trained.get()
        counts.add([me == 0, life == 1])
        seen = counts.get()
        if seen[1] >= 20:
            break
        if places[me] != places[0] and life == 0 and seen[0] == 30:
            tell(file)
            time.sleep(200)
        time.sleep(0.005)
    mv.barrier()
    return life, counts.version, [zlib.crc32(t.snapshot().tobytes()) for t in (table, trained, counts)]


def host_nodes():
    # the processes of hosts' nodes, and the inodes of their sockets
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::HostNode"):
                files = [os.readlink(file) for file in (process / "fd").iterdir()]
                found[int(process.name)] = {file[8:-1] for file in files if file.startswith("socket:[")}
    return found


def who_connects_to(first):
    # the nodes with a connection to a port at which the first one listens
    nodes = host_nodes()
    lines = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").readlines()[1:]]
    ports = {line[1].rpartition(":")[2] for line in lines if line[3] == "0A" and line[9] in nodes[first]}
    inodes = {line[9] for line in lines if line[2].rpartition(":")[2] in ports}
    return [pid for pid, sockets in nodes.items() if pid != first and sockets & inodes]


def wait_for(found):
    end = time.monotonic() + 100
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def surviving(file, until=None):
    from multiverso.runtime.session.current import current

    mv.init(on_lost="continue")
    mv.barrier()
    places = current().control.places
    if places[mv.worker_id()] == places[0]:
        while len(mv.live_workers()) > places.count(places[0]):
            time.sleep(0.05)
        while until is not None and not os.path.exists(until):
            time.sleep(0.05)
        mv.barrier()
        return "went on"
    tell(file)
    time.sleep(200)


def loop(options):
    mv.init()
    rank = ray.train.get_context().get_world_rank()
    table = mv.ArrayTableHandler(3)
    table.add([1.0 + rank] * 3)
    mv.barrier()
    found = [float(table.get()[0]), mv.worker_id() == rank, mv.workers_num()]
    mv.shutdown()
    Path(options["folder"], f"trained-{rank}").write_text(json.dumps(found))


def raised(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]


said = {}
cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000},
)
nodes = [cluster.add_node(num_cpus=2, object_store_memory=80_000_000) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)
try:
    said["sums"] = mv.ray.run(adding, workers=3, args=(10,), every=0.05)
    said["failing"] = raised(mv.ray.run, failing, workers=2)
    said["dying"] = raised(mv.ray.run, dying, workers=3, encrypted=False)
    said["restarted"] = mv.ray.run(dying, workers=3, encrypted=False, max_restarts=1)
    said["replaced"] = mv.ray.run(replaced, workers=3, encrypted=False, on_failure="continue", replace=1)
    results = mv.ray.run(failing_late, 2, (str(folder / "starts"),), on_failure="continue", replace=1)
    said["late"] = [r if isinstance(r, int) else str(r) for r in results]
    said["starts"] = sorted((folder / "starts").read_text().split())
    said["too many"] = raised(mv.ray.run, adding, workers=5, timeout_seconds=1.0)
    trainer = DataParallelTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        backend_config=MultiversoConfig(encrypted=False),
        scaling_config=ScalingConfig(num_workers=3),
        run_config=RunConfig(storage_path=str(folder / "train")),
    )
    trainer.fit()
    said["trained"] = [json.loads((folder / f"trained-{rank}").read_text()) for rank in range(3)]
    # last, as it takes a node away

    def lose(file):
        while not file.exists():
            time.sleep(0.02)
        node = next(node for node in nodes if node.node_id == file.read_text())
        cluster.remove_node(node, allow_graceful=False)
        nodes.remove(node)

    with ThreadPoolExecutor(1) as pool:  # Ray starts and ends its nodes in the main thread
        file = folder / "where"
        options = {"on_failure": "continue", "replace": 1, "host_grace": 10.0}
        job = pool.submit(mv.ray.run, rehosted, 4, (str(file),), **options)
        lose(file)
        nodes.append(cluster.add_node(num_cpus=2, object_store_memory=80_000_000))
        said["rehosted"] = job.result()
        file = folder / "in rounds"
        job = pool.submit(mv.ray.run, rehosted_in_rounds, 4, (str(file),), **options)
        lose(file)
        nodes.append(cluster.add_node(num_cpus=2, object_store_memory=80_000_000))
        said["in rounds"] = job.result()
        # in its beginning the node that takes a place is held up by the first one, which is stopped, and then killed
        file = folder / "beginning"
        until = folder / "until"
        job = pool.submit(mv.ray.run, surviving, 4, (str(file), str(until)), encrypted=False, **options)
        wait_for(file.exists)
        before = set(host_nodes())
        lose(file)
        wait_for(lambda: len(before & set(host_nodes())) == 1)
        (first,) = before & set(host_nodes())
        with contextlib.redirect_stderr(io.StringIO()) as words:
            os.kill(first, 19)
            try:
                nodes.append(cluster.add_node(num_cpus=2, object_store_memory=80_000_000))
                os.kill(wait_for(lambda: who_connects_to(first))[0], 9)
            finally:
                os.kill(first, 18)
            try:
                wait_for(lambda: "is not replaced" in words.getvalue())
            finally:
                until.touch()
        said["beginning words"] = words.getvalue()
        said["beginning"] = [r if isinstance(r, str) else type(r).__name__ for r in job.result()]
        file = folder / "there"
        job = pool.submit(mv.ray.run, surviving, 4, (str(file),), on_failure="continue", encrypted=False)
        lose(file)
        said["survived"] = [r if isinstance(r, str) else type(r).__name__ for r in job.result()]
finally:
    ray.shutdown()
    cluster.shutdown()
(folder / "said.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "program.py").write_text(PROGRAM)
    environ = {
        **os.environ,
        "RAY_TMPDIR": "/tmp",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    done = subprocess.run(
        [sys.executable, folder / "program.py", folder],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return found


def test_workers_on_two_hosts_add_up_exactly(said: dict[str, Any]) -> None:
    hosts = said["sums"][0][3]
    assert sorted(set(hosts)) == [0, 1]
    assert said["sums"] == [[10 + i, 65.0, 65.0, hosts, "0.05"] for i in range(3)]


def test_what_a_worker_raises_is_raised(said: dict[str, Any]) -> None:
    kind, text, note = said["failing"]
    assert (kind, text) == ("ValueError", "this is what is wrong")
    assert note.startswith("In multiverso worker 1 (pid ")
    assert "in failing" in note


def test_who_dies_is_named(said: dict[str, Any]) -> None:
    kind, text = said["dying"][:2]
    assert kind == "WorkerLostError"
    assert text.startswith("Worker 2 (pid ")


def test_a_job_begins_again_without_the_dead(said: dict[str, Any]) -> None:
    assert said["restarted"] == ["1", "1", "1"]


def test_who_dies_is_replaced_while_the_others_go_on(said: dict[str, Any]) -> None:
    assert said["replaced"] == [[0, 0, 9.0], [1, 0, 9.0], [2, 1, 9.0]]


def test_who_fails_after_its_shutdown_is_not_started_again(said: dict[str, Any]) -> None:
    assert said["late"] == [0, "its part was done"]
    assert said["starts"] == ["0", "1"]


def test_a_lost_host_is_replaced_wherever_there_is_room(said: dict[str, Any]) -> None:
    """What the lost host's workers had added before the last barrier counts, and what the new ones add."""
    lives = [life for _, life, _ in said["rehosted"]]
    assert sorted(lives) == [0, 0, 1, 1]
    assert said["rehosted"] == [[worker, lives[worker], 11.0] for worker in range(4)]


def test_a_lost_host_of_a_synchronous_job_is_replaced_and_ends_with_everybodys_bits(said: dict[str, Any]) -> None:
    lives = [life for life, *_ in said["in rounds"]]
    assert sorted(lives) == [0, 0, 1, 1]
    assert said["in rounds"] == [[life, *said["in rounds"][0][1:]] for life in lives]


def test_a_host_whose_node_dies_while_it_takes_the_place_has_been_replaced(said: dict[str, Any]) -> None:
    """So often as `replace=` says, and no more: the others go on without it."""
    assert "its node died while it began), and is not replaced" in said["beginning words"]
    assert said["beginning"] == ["went on", "went on", "WorkerLostError", "WorkerLostError"]


def test_what_the_cluster_has_not_got_is_said(said: dict[str, Any]) -> None:
    kind, text = said["too many"][:2]
    assert kind == "StartupError"
    assert "does not have 5 times {'CPU': 1.0}" in text


def test_a_lost_host_is_gone_on_without(said: dict[str, Any]) -> None:
    assert said["survived"] == ["went on", "went on", "WorkerLostError", "WorkerLostError"]


def test_the_loop_of_a_trainer_uses_tables(said: dict[str, Any]) -> None:
    assert said["trained"] == [[6.0, True, 3]] * 3
