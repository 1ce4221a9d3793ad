"""`multiverso doctor --probe`: what one host says of itself to the doctor of another, over standard input and output.

It listens at a port that the system chooses, and at one that it is given; writes one line of JSON, and reads lines of
JSON, an answer for each: ``{"ping": n}`` (the time there), ``{"reach": [[address, port], ...]}`` (what came of
connecting to each, and how many seconds the fastest took). It ends when its input does.
"""

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from importlib import metadata
from typing import Any

from multiverso.hosts.transport.addresses import ANY, listen_at
from multiverso.memory.heap import free_memory

_SECONDS = 5.0
_HELLO = b"multiverso probe\n"
PACKAGES = ("multiverso", "numpy", "numba", "pyopenssl", "cryptography")


def probe(port: int) -> int:
    """Answers until its input ends; ``port``: where to listen besides, 0 for nowhere."""
    with contextlib.ExitStack() as stack:
        _write({**facts(), **_listening([port, 0] if port else [0], stack)})
        for line in sys.stdin:
            asked = json.loads(line)
            if "ping" in asked:
                _write({"time": time.time()})
            else:
                took: list[float] = []
                reached = [_reach(str(address), int(port), took) for address, port in asked["reach"]]
                _write({"reached": reached, "seconds": min(took, default=None)})
    return 0


def facts() -> dict[str, Any]:
    """Returns what has to be alike on all hosts, or is worth knowing of each."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        address = f"unknown ({error})"
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "name": name,
        "address": address,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "free": free_memory(),
        "versions": versions,
    }


def _listening(wanted: list[int], stack: contextlib.ExitStack) -> dict[str, Any]:
    try:
        listeners = [stack.enter_context(listen_at(ANY, port)) for port in wanted]
    except OSError as error:
        return {"ports": [], "trouble": f"it cannot listen at {wanted[0] or 'any port'}: {error}"}
    for listener in listeners:
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
    return {"ports": [listener.getsockname()[1] for listener in listeners]}


def _greet(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(_HELLO)


def _reach(address: str, port: int, took: list[float]) -> str | None:
    """Returns None if our probe answers there, or what happened; adds the seconds of a round trip."""
    try:
        began = time.perf_counter()
        with socket.create_connection((address, port), _SECONDS) as connection:
            took.append(time.perf_counter() - began)
            connection.settimeout(_SECONDS)
            return None if connection.recv(64) == _HELLO else "something else listens there"
    except OSError as error:
        return str(error) or type(error).__name__


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)
