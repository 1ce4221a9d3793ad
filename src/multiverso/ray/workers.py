"""The workers of a function's call on a Ray cluster: an actor each."""

from __future__ import annotations

import io
import linecache
import os
import pickle
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
        try:
            os.environ.update(environ)
            text = io.BytesIO(call)
            *_, cells = pickle.load(text)  # where the caller's modules lie, Ray sees to
            linecache.cache.update(cells)
            function, args, kwargs = pickle.load(text)
            value = function(*args, **kwargs)
            _call.leave()
            _call.write(answer, "value", "", value)
        except BaseException as error:
            _call.write_error(answer, error)
        return answer.getvalue()
