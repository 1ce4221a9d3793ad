"""Real limits of the operating system: the table is refused in words, and the job goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from core_support import in_threads, outcome

from multiverso.errors import NodeLostError, WorkerLostError
from multiverso.memory.heap import left_in_groups
from multiverso.runtime import Node, Session

HEAD = """
import resource, sys
import numpy as np
import multiverso as mv
from multiverso.errors import MultiversoError
from multiverso.runtime import Node, Session

def limit(what, least):
    resource.setrlimit(getattr(resource, what), (least, resource.getrlimit(getattr(resource, what))[1]))

def refused(make):
    try:
        make()
    except MultiversoError as error:
        print(type(error).__name__, "|", error)
    else:
        print("no error")

node = Node(1)
session = Session(node.address)
kept = mv.ArrayTableHandler(10, np.arange(10), session=session)
"""
TAIL = """
kept.add(np.ones(10))
assert kept.get().tolist() == list(range(1, 11))
assert mv.ArrayTableHandler(5, session=session).number == NUMBER
session.barrier()
session.shutdown()
node.close()
print("went on")
"""


def said(body: str, number: int = 2) -> list[str]:
    """What a program of one worker prints."""
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + f"NUMBER = {number}\n" + body + TAIL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout.splitlines()


def test_address_space() -> None:
    """`ulimit -v`: in the worker that maps the table, and nobody else waits for it."""
    lines = said(
        "size = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "limit('RLIMIT_AS', size + 50_000_000)\n"
        "refused(lambda: mv.ArrayTableHandler(50_000_000, session=session))\n"
        "limit('RLIMIT_AS', resource.RLIM_INFINITY)\n"
    )
    assert lines[0].startswith("OutOfMemoryError | ")
    assert "ulimit -v" in lines[0]
    assert lines[1:] == ["went on"]


def test_file_size() -> None:
    """`ulimit -f` counts for shared memory, too."""
    lines = said(
        "limit('RLIMIT_FSIZE', 30_000_000)\nrefused(lambda: mv.ArrayTableHandler(10_000_000, session=session))\n"
    )
    assert lines[0].startswith("OutOfMemoryError | the system refused 40.0 MB")
    assert "ulimit -f" in lines[0]
    assert lines[1:] == ["went on"]


def test_file_descriptors() -> None:
    """`ulimit -n`: tables need none; another session is told, and the node goes on serving."""
    lines = said(
        "import os\n"
        "used = len(os.listdir('/proc/self/fd'))\n"
        "limit('RLIMIT_NOFILE', used)\n"
        "tables = [mv.ArrayTableHandler(3_000_000, name=str(i), session=session) for i in range(10)]\n"
        "print(len(tables))\n"
        "try:\n"
        "    Session(node.address, start_timeout_seconds=5)\n"
        "except (MultiversoError, OSError) as error:\n"
        "    print('told')\n"
        "limit('RLIMIT_NOFILE', used + 100)\n"
        "for table in tables: table.close()\n",
        number=12,
    )
    assert lines == ["10", "told", "went on"]


def test_nested_control_groups_count(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/outer/inner\n")
    root = tmp_path / "fs"
    for name, most, used in (("", "max", 5), ("outer", "1000", 900), ("outer/inner", "max", 5)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "memory.max").write_text(f"{most}\n")
        (root / name / "memory.current").write_text(f"{used}\n")
    assert left_in_groups(groups, root) == [100]
    (root / "outer" / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    assert left_in_groups(groups, root) == [400]


def test_nobody_waits_for_a_worker_that_the_node_has_no_thread_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "multiverso-watch-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with Node(2) as node:
        first, second = in_threads([lambda i=i: outcome(lambda: Session(node.address, i)) for i in range(2)])
        assert (type(first), type(second)) == (WorkerLostError, NodeLostError)
