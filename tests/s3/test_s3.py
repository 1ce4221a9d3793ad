"""`mv.checkpoint("s3://...")` for real: s3fs speaks HTTP with a server of S3's interface, and jobs begin again from it.

`make buckets` installs what it needs and runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="moto is not installed here; `make buckets` installs it")
pytest.importorskip("s3fs", reason="s3fs is not installed here; `make buckets` installs it")
pytestmark = [pytest.mark.timeout(280), pytest.mark.filterwarnings("default")]
PLACE = "s3://models/runs/7"
PROGRAM = """
import json, os, signal, sys
import multiverso as mv

last = int(sys.argv[1])
mv.init(sync=True)
table = mv.MatrixTableHandler(1000, 10)
with mv.checkpoint("s3://models/runs/7", every=4, keep=2) as checkpoint:
    own = checkpoint.restore()
    begun = step = own["step"] if own else 0
    while step < last:
        table.add([[1.0] * 10] * 1000)
        step += 1
        values = table.get()  # ends the round
        checkpoint.step({"step": step})
        if step == 10 and mv.worker_id() == 1 and not mv.restarts() and begun == 0:
            checkpoint.close()
            os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps([begun, step, float(values.min()), float(values.max())]), flush=True)
mv.shutdown()
"""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a server that keeps buckets in its memory."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        address, port = server.get_host_and_port()
        settings = {
            "AWS_ENDPOINT_URL": f"http://{address}:{port}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket="models")
        yield client
        client.close()
    finally:
        server.stop()


def run(folder: Path, last: int, *options: str) -> list[list[float]]:
    """Runs the program; returns what its workers print."""
    import json

    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "multiverso", "run", *options, "train.py", str(last)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ.copy(), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]


def objects(s3: Any) -> dict[str, int]:
    found = s3.list_objects_v2(Bucket="models", Prefix="runs/7/")
    return {each["Key"].removeprefix("runs/7/"): each["Size"] for each in found.get("Contents", ())}


def test_jobs_begin_again_from_a_bucket(s3: Any, tmp_path: Path) -> None:
    """One whose worker dies, on two hosts; then others, with more workers, and with the newest state spoilt."""
    said = run(tmp_path, 20, "--hosts", "2", "-n", "2", "--max-restarts", "1")
    assert said == [[8, 20, 40.0, 40.0]] * 2, "from the checkpoint of step 8, with the state that was saved there"
    assert "manifest.json" in objects(s3)
    generations = {name.partition("/")[0] for name in objects(s3) if name.startswith("generation-")}
    assert len(generations) == 2, "the older ones are gone"

    said = run(tmp_path, 24, "-n", "3", "--resume")
    assert [[begun, step] for begun, step, *_ in said] == [[20, 24]] * 3
    assert {tuple(values) for _, _, *values in said} == {(52.0, 52.0)}

    newest = max({name.partition("/")[0] for name in objects(s3) if name.startswith("generation-")})
    spoilt = max((name for name in objects(s3) if name.startswith(f"{newest}/")), key=lambda n: objects(s3)[n])
    whole = s3.get_object(Bucket="models", Key=f"runs/7/{spoilt}")["Body"].read()
    s3.put_object(Bucket="models", Key=f"runs/7/{spoilt}", Body=whole[:-1])
    begun, step, least, most = run(tmp_path, 26, "-n", "1", "--resume")[0]
    assert begun < 24, "the newest is not whole, so it is passed over"
    assert (step, least) == (26, most)
