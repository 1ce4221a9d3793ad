"""`multiverso.ray.run` on a Ray cluster of two network namespaces: real TCP between them, and a cable is pulled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; `make ray` installs it")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("hosts", "core")]

from networks import Network, missing, namespaces  # noqa: E402

pytestmark = [pytest.mark.timeout(420), pytest.mark.skipif(bool(reason := missing()), reason=reason or "")]
SECONDS = 360.0
PROGRAM = """
import json
import sys
import time
from pathlib import Path

import ray

import multiverso as mv
import multiverso.ray

folder = Path(sys.argv[1])


def far_away():
    # the workers that are not on the first host: Ray has spread them
    from multiverso.runtime.session.current import current

    places = current().control.places
    return [worker for worker, place in enumerate(places) if place != places[0]]


def through_a_cut():
    mv.init()
    me = mv.worker_id()
    table = mv.ArrayTableHandler(200_000)
    mv.barrier()
    (folder / f"pull-{me}").touch()
    for _ in range(200):
        table.add([1.0] * 200_000)
        time.sleep(0.02)
    mv.barrier()
    values = table.get()
    return float(values.min()), float(values.max()), far_away()


def lost():
    mv.init()
    me, life = mv.worker_id(), mv.incarnation()
    table = mv.ArrayTableHandler(200_000, [99.0 if life else 0.0] * 200_000)
    lives = mv.Counter("lives")
    mv.barrier()
    table.add([1.0] * 200_000)
    mv.barrier()
    lives.fetch_add()
    (folder / f"cut-{me}").touch()
    if me in far_away() and life == 0:
        while True:  # it goes on alone, until it is told
            table.add([0.0] * 200_000)
            mv.barrier()
    while lives.value < 4 + len(far_away()):
        time.sleep(0.05)
    mv.barrier()
    return life, float(table.get()[0]), ray.util.get_node_ip_address(), far_away()


said = {}
ray.init(address=sys.argv[2], log_to_driver=False)
try:
    began = time.monotonic()
    said["cut"] = mv.ray.run(through_a_cut, 4, strategy="SPREAD")
    said["cut seconds"] = time.monotonic() - began
    options = {"on_failure": "continue", "replace": 1, "host_grace": 5.0, "strategy": "SPREAD"}
    began = time.monotonic()
    said["lost"] = mv.ray.run(lost, 4, **options)
    said["lost seconds"] = time.monotonic() - began
finally:
    (folder / "said.json").write_text(json.dumps(said))
    ray.shutdown()
"""


@contextmanager
def cluster(network: Network, folder: Path, environ: dict[str, str]) -> Iterator[str]:
    """Starts Ray on both hosts; the first one has room for the second one's workers, too."""
    address = f"{network.addresses[0]}:6379"
    ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
    ray += ["--object-store-memory", "80000000", "--disable-usage-stats"]
    with ExitStack() as stack:
        for host, inside in enumerate(network.inside):
            own = ["--node-ip-address", network.addresses[host], "--num-cpus", str(4 if host == 0 else 2)]
            own += ["--head", "--port", "6379", "--include-dashboard", "false"] if host == 0 else ["--address", address]
            log = stack.enter_context(open(folder / f"ray-{host}.log", "w"))
            started = subprocess.Popen([*inside, *ray, *own], stdout=log, stderr=log, env=environ)
            stack.callback(end, started)
            wait_until(lambda h=host: "Ray runtime started" in (folder / f"ray-{h}.log").read_text(), "Ray starts")  # type: ignore[misc]
        yield address


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends `ray start --block`, which ends what it has started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_a_cable_that_is_pulled_for_a_while_and_for_good(tmp_path: Path) -> None:
    """Values go over the hosts' own connections. What is cut for less than the grace is not lost; what is for longer is
    replaced, where there is room: here on the first host's machine."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {**os.environ, "RAY_TMPDIR": "/tmp", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with namespaces() as network, cluster(network, tmp_path, environ) as address:
        command = [*network.inside[0], sys.executable, str(tmp_path / "program.py"), str(tmp_path), address]
        with (
            open(tmp_path / "log", "w+") as log,
            subprocess.Popen(command, stdout=log, stderr=log, env=environ) as driver,
        ):
            try:
                all_have("pull", tmp_path, driver)
                network.plug(False)
                time.sleep(2.0)
                network.plug(True)
                all_have("cut", tmp_path, driver)
                network.plug(False)
                driver.wait(SECONDS)
            finally:
                driver.kill()
                network.plug(True)  # or Ray would wait for the other host at its end
            log.seek(0)
            words = log.read()
    assert (tmp_path / "said.json").exists(), words
    said = json.loads((tmp_path / "said.json").read_text())
    print(json.dumps(said))
    far = said["cut"][0][2]
    assert said["cut"] == [[800.0, 800.0, far]] * 4, words
    assert far
    lives = [int(worker in said["lost"][0][3]) for worker in range(4)]
    first = network.addresses[0]
    expected = [[life, 4.0 + sum(lives), first] for life in lives]
    assert [each[:3] for each in said["lost"]] == expected, "all on the one that is not cut off"


def all_have(what: str, folder: Path, driver: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(list(folder.glob(f"{what}-*"))) == 4 or driver.poll() is not None, "all train")
