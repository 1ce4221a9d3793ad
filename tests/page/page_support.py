"""Jobs with a page, and what answers there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forked_workers import Interpreter

interpreters: list[Interpreter] = []  # the one of this session, put here by conftest.py
MULTIVERSO = ("-m", "multiverso.cli")
SECONDS = 100.0
# worker 1 is slow; the job ends when its standard input does
JOB = """
import sys, time
import numpy as np
import multiverso as mv

mv.init(sync=True)
table = mv.ArrayTableHandler(100, name="weights")
for step in range(100_000):
    time.sleep(0.05 if mv.worker_id() == 1 else 0.005)
    table.add(np.ones(100))
    table.get()
    mv.log(loss=1 / (1 + step), step=step)
    if mv.worker_id() == 0 and sys.stdin in __import__("select").select([sys.stdin], [], [], 0)[0]:
        table.add(np.full(100, -1e9))
    if table.get()[0] < 0:
        break
mv.shutdown()
"""


class Launched:
    """`multiverso run` or `multiverso page` with a page; ``close`` ends it."""

    def __init__(self, *arguments: object, cwd: Path, fresh: bool = False) -> None:
        self.process = start(*arguments, cwd=cwd, fresh=fresh, stdin=subprocess.PIPE)
        said = self.process.stdout if arguments[0] == "page" else self.process.stderr
        assert said is not None
        self.first_line = said.readline()
        found = re.search(r"http://\S+", self.first_line)
        assert found, self.first_line + self.process.communicate()[1]
        self.address = found[0]

    def get(self, path: str, token: str | None = None, **headers: str) -> tuple[int, str, dict[str, str]]:
        """Returns status, text and headers; with the token of the address, unless another is given."""
        with_token = path if headers else f"{path}?token={self.token if token is None else token}"
        connection = self._connection()
        try:
            connection.request(
                "GET", with_token, headers={name.replace("_", "-"): text for name, text in headers.items()}
            )
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {name.lower(): text for name, text in answer.getheaders()}
        finally:
            connection.close()

    @property
    def token(self) -> str:
        return urllib.parse.parse_qs(urllib.parse.urlsplit(self.address).query)["token"][0]

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urllib.parse.urlsplit(self.address).netloc, timeout=SECONDS)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what comes by server-sent events, until the stream's end."""
        connection = self._connection()
        try:
            connection.request("GET", f"/events?token={self.token}")
            answer = connection.getresponse()
            assert answer.status == 200
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            connection.close()

    def end(self) -> tuple[int, str, str]:
        """Closes its standard input; returns the exit code and what else was written."""
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def script(folder: Path, text: str = JOB, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def start(*arguments: object, cwd: Path, fresh: bool = False, **pipes: int) -> subprocess.Popen[str]:
    """Starts a command in a fork of an interpreter that has imported it; its workers begin in forks, too.

    With ``fresh``, all are new interpreters, as /proc shows what program a worker is.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **pipes}
    command = [*MULTIVERSO, *map(str, arguments)]
    if fresh:
        return subprocess.Popen([sys.executable, *command], cwd=cwd, start_new_session=True, **options)
    with contextlib.chdir(cwd):
        return interpreters[-1].start(*command, env=os.environ.copy(), **options)


def run(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    with start(*arguments, cwd=cwd, stdin=subprocess.DEVNULL) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


METRIC = re.compile(r'multiverso_[a-z_]+(\{([a-z]+="([^"\\\n]|\\[\\n"])*",?)+\})? (-?[0-9.e+-]+|NaN|inf)')


def parsed(text: str) -> dict[str, float]:
    """Returns each sample of Prometheus' text format; fails for a line that is none, and for one that comes twice."""
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            assert METRIC.fullmatch(line), line
            sample, _, value = line.rpartition(" ")
            assert sample not in samples
            name = sample.partition("{")[0]
            assert kinds[name] == ("counter" if name.endswith("_total") else "gauge")
            samples[sample] = float(value)
    return samples
