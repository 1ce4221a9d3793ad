"""Sends a node what no session would, for a given time and seed, and looks whether its job still works.

    python tests/fuzz/fuzz_node.py --seconds 60 --seed 7

What has ended a node once is kept in ``corpus/node.jsonl`` and is sent first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multiverso.runtime import Node, Session
from multiverso.tables import ArrayTableHandler
from multiverso.wire import messages

CORPUS = Path(__file__).parent / "corpus" / "node.jsonl"
SPEC = {
    "kind": "array",
    "rows": 1,
    "columns": 3,
    "dtype": "float32",
    "updater": "add",
    "hyper": [],
    "states": 0,
    "initial": "master",
    "name": "fuzz",
    "mean": False,
    "per_worker": 0,
    "rule": "",
}
REQUESTS: list[dict[str, Any]] = [
    {
        "do": "attach",
        "protocol": messages.PROTOCOL,
        "worker_id": None,
        "workers_num": None,
        "consistency": {"mode": "async", "staleness": 0},
        "on_lost": None,
    },
    {"do": "ready"},
    {"do": "create", "order": None, "spec": SPEC, "master": False, "mode": "async"},
    {"do": "create", "order": 1, "spec": {**SPEC, "name": None}, "master": True, "mode": "sync"},
    {"do": "share", "spec": {"name": "m", "nbytes": 100}},
    {"do": "initialised"},
    {"do": "leaving"},
    {"do": "close", "number": 1},
    {"do": "cancel", "why": None},
    {"do": "status"},
    {"do": "look", "kind": "name", "name": "w"},
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    1.5,
    float("nan"),
    "",
    "x",
    "bounded",
    "\udcff",
    "a" * 3000,
    [],
    [[]] * 3,
    {},
    {"mode": []},
    "O",
    "float32",
]
BODIES = [b"", b"{", b"[]", b"null", b"[" * 50_000, b"{}" * 9, b"\xff\xfe", b'{"long": 5}', b'{"do": "status"', b"7"]


def mutated(random_: random.Random) -> dict[str, Any]:
    """Returns a request with something in it changed, now and then deep inside."""
    request: dict[str, Any] = json.loads(json.dumps(random_.choice(REQUESTS)))
    for _ in range(random_.randrange(3)):
        place = request
        while True:
            key = random_.choice([*place, "surplus"])
            inner = place.get(key)
            if isinstance(inner, dict) and inner and random_.random() < 0.7:
                place = inner
                continue
            if random_.random() < 0.2:
                place.pop(key, None)
            else:
                place[key] = copy.deepcopy(random_.choice(VALUES))
            break
    request.setdefault("id", random_.choice([1, 1, "x", [], None]))
    return request


def kept() -> Iterator[dict[str, Any]]:
    """What the corpus holds: ``body`` (text, repeated ``times``) or a ``long`` message in some kind of file."""
    for line in CORPUS.read_text().splitlines():
        yield json.loads(line)


def send(connection: socket.socket, case: dict[str, Any]) -> None:
    """Sends one case of the corpus."""
    body = str(case["body"]).encode("latin-1") * int(case.get("times", 1))
    kind, descriptors = case.get("beside"), []
    if kind == "pipe":
        descriptors = list(os.pipe())
    elif kind == "memfd":
        descriptors = [os.memfd_create("fuzz")]
        os.write(descriptors[0], str(case["content"]).encode() * int(case.get("repeat", 1)))
    elif kind == "many":
        descriptors = [os.dup(connection.fileno()) for _ in range(30)]
    try:
        socket.send_fds(connection, [body], descriptors[:1] if kind == "pipe" else descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def attack(address: str, random_: random.Random, until: float) -> int:
    """Sends messages until a time; returns how many."""
    sent = 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError), messages.connect(address, 5.0) as connection:
            connection.settimeout(5.0)
            for _ in range(random_.randrange(1, 12)):
                sent += 1
                kind = random_.random()
                if kind < 0.2:
                    connection.send(random_.choice(BODIES))
                elif kind < 0.3:
                    connection.send(random_.randbytes(random_.randrange(200)))
                elif kind < 0.4:
                    body = json.dumps(mutated(random_)).encode()
                    position = random_.randrange(len(body))
                    connection.send(body[:position] + random_.randbytes(1) + body[position + 1 :])
                else:
                    messages.send(connection, mutated(random_))
                if random_.random() < 0.3:  # else: this peer does not read
                    connection.settimeout(0.02)
                    with contextlib.suppress(TimeoutError, ValueError):
                        received = messages.receive(connection)
                        for descriptor in received[1] if received else ():
                            os.close(descriptor)
                    connection.settimeout(5.0)
    return sent


def run(seconds: float, seed: int) -> int:
    """Attacks a job with a worker in it; returns how many messages were sent.

    Raises:
        MultiversoError: the job did not survive.
    """
    with Node(None, on_lost="continue") as node, Session(node.address, timeout_seconds=60) as session:
        for case in kept():
            with contextlib.suppress(OSError), messages.connect(node.address, 5.0) as connection:
                send(connection, case)
                connection.settimeout(5.0)
                with contextlib.suppress(OSError, ValueError):
                    messages.receive(connection)
            _check(session, node)
        sent = attack(node.address, random.Random(seed), time.monotonic() + seconds)
        _check(session, node)
    return sent


def _check(session: Session, node: Node) -> None:
    with ArrayTableHandler(3, [1, 2, 3], name="still there", session=session) as table:
        table.add([1, 1, 1])
        assert table.get().tolist() == [2, 3, 4]
    assert session.worker_id in node.live_workers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    given = parser.parse_args()
    print(f"fuzzing a node for {given.seconds:g} s with seed {given.seed}", flush=True)
    sent = run(given.seconds, given.seed)
    print(f"{sent:,} messages, and the job still works", file=sys.stdout)


if __name__ == "__main__":
    main()
