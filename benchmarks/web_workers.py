"""Memory of a web server's workers that share one published model, and of workers that each load the file.

    pip install gunicorn uvicorn
    python benchmarks/web_workers.py --out results.json

Matrices of --mb megabytes, multiplied by a vector for each request, in so many workers of gunicorn and of uvicorn.
Counted is the proportional set size (Pss) of all processes of the server, and of the publisher: a page that n processes
map counts 1/n in each. Every worker has answered a request, for which it has read all of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DEADLINE_SECONDS = 300.0
APP = """
    import os
    import numpy as np
    from safetensors.numpy import load_file
    import multiverso as mv

    if os.environ["MODEL_WAY"] == "shared":
        model = dict(mv.subscribe("web-workers", timeout_seconds=60).latest())
    else:
        model = load_file("model.safetensors")

    def answer():
        x = np.ones(1024, "float32")
        for name in sorted(model):
            x = np.tanh(model[name] @ x / 32)
        return f"{os.getpid()} {x.tobytes().hex()[:32]}".encode()

    def wsgi(environ, start):
        start("200 OK", [("Content-Type", "text/plain")])
        return [answer()]

    async def asgi(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": answer()})
"""
SERVERS = {
    "gunicorn": "gunicorn --bind 127.0.0.1:{port} --workers {workers} --timeout 300 app:wsgi",
    "uvicorn": "uvicorn --host 127.0.0.1 --port {port} --workers {workers} --log-level warning app:asgi",
}


def make_model(folder: Path, megabytes: float) -> float:
    """Saves random matrices, and returns their size in MB."""
    random = np.random.default_rng(0)
    layers = round(megabytes / (4 * 1024**2 / 1e6))
    model = {f"{layer:04}": random.normal(size=(1024, 1024)).astype(np.float32) for layer in range(layers)}
    save_file(model, folder / "model.safetensors")
    return sum(matrix.nbytes for matrix in model.values()) / 1e6


@contextmanager
def program(command: list[str], **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, **more) as process:
        try:
            yield process
        finally:
            process.terminate()


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in descendants(int(child)))]


def pss(pids: list[int]) -> float:
    """Returns the proportional set size of processes in MB."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def taken(pid: int) -> float:
    """Returns what a publisher has taken in MB: one slot, which is in the Pss of those that map it."""
    files = [f for f in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(f).startswith("/memfd:multiverso")]
    return sum(os.stat(file).st_blocks * 512 for file in files) / 1e6


def ask_all(port: int, workers: int) -> set[str]:
    """Asks until each worker has answered, and returns what they said."""
    said: dict[str, str] = {}
    until = time.monotonic() + DEADLINE_SECONDS
    while len(said) < workers:
        assert time.monotonic() < until, f"{len(said)} of {workers} workers answered"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as response:
                pid, answer = response.read().decode().split()
                said[pid] = answer
        except OSError:
            time.sleep(0.1)
    return set(said.values())


def measure(server: str, way: str, workers: int, folder: Path, port: int) -> tuple[dict[str, float], set[str]]:
    """Returns the memory of one server, its publisher's included, and the answers of its workers."""
    bin_ = Path(sys.executable).parent
    env = {**os.environ, "MODEL_WAY": way, "OPENBLAS_NUM_THREADS": "1"}
    publish = [str(bin_ / "multiverso"), "publish", str(folder / "model.safetensors"), "--name", "web-workers"]
    serve = [str(bin_ / part) if part == server else part for part in SERVERS[server].split()]
    serve = [part.format(port=port, workers=workers) for part in serve]
    with program(publish) as publisher, program(serve, cwd=folder, env=env) as process:
        answered = ask_all(port, workers)
        pids = descendants(process.pid) + (descendants(publisher.pid) if way == "shared" else [])
        return {"pss_mb": pss(pids), "publication_mb": taken(publisher.pid) if way == "shared" else 0.0}, answered


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=600)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--port", type=int, default=23_457)
    parser.add_argument("--out", type=Path, help="file for the JSON, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = make_model(folder, options.mb)
        (folder / "app.py").write_text(textwrap.dedent(APP))
        results = {}
        answered: set[str] = set()
        for number, (server, way) in enumerate((s, w) for s in SERVERS for w in ("shared", "each its own")):
            results[f"{server}, {way}"], said = measure(server, way, options.workers, folder, options.port + number)
            answered |= said
    assert len(answered) == 1, f"workers disagree: {answered}"
    told = {"model_mb": size, "workers": options.workers, "results": results}
    if options.out:
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
