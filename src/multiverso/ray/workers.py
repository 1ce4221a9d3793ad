"""The workers of a function's call on a Ray cluster: an actor each."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping

from multiverso.launch import _call


class Worker:
    """The actor. One call, and it has done what it is for."""

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id

    def __repr__(self) -> str:  # what Ray writes before each line of output
        return f"worker {self._worker_id}"

    def pid(self) -> int:
        """Returns its process's number."""
        return os.getpid()

    def call(self, environ: Mapping[str, str], call: bytes) -> bytes:
        """Calls the function; returns what `multiverso.launch.outcomes.read_answer` reads. Raises nothing."""
        answer = io.BytesIO()
        os.environ.update(environ)
        _call.answer(io.BytesIO(call), answer, by_its_path=False)  # where the caller's modules lie, Ray sees to
        return answer.getvalue()
