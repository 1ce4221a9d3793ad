"""What a suite is made of: laws, tried out in the workers of a job and judged here."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import multiverso as mv

MODES = (False, True)
JOB_SECONDS = 250.0  # compiling kernels on a cold and busy machine takes minutes
_WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Law:
    """Something that holds for every implementation.

    Attributes:
        work: called in each worker with the subject and the worker's number; returns what there is to judge.
        check: called here with what each worker returned; raises AssertionError.
    """

    work: Callable[[Any, int], Any]
    check: Callable[[list[Any]], None]


@dataclass(frozen=True)
class _Raised:
    text: str


def try_out(laws: Mapping[str, Law], subject: Any) -> list[dict[str, Any]]:
    """Does all laws' work, in a worker: asynchronously, then synchronously; returns a dict for each mode."""
    found = []
    for sync in MODES:
        mv.init(sync=sync, timeout_seconds=_WAIT_SECONDS)
        records: dict[str, Any] = {}
        for name, law in laws.items():
            try:
                records[name] = law.work(subject, mv.worker_id())
            except Exception:
                records[name] = _Raised(traceback.format_exc())
                break  # the workers are no longer in step
        mv.shutdown()
        found.append(records)
    return found


def judge(law: Law, name: str, results: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raises AssertionError when a law does not hold in what the workers brought from `try_out`."""
    for mode, sync in enumerate(MODES):
        records = [worker[mode].get(name) for worker in results]
        how = "synchronous" if sync else "asynchronous"
        for me, worker in enumerate(results):
            for other, record in worker[mode].items():
                assert not isinstance(record, _Raised), f"{how}, worker {me}, in {other!r}:\n{record.text}"
        try:
            law.check(records)
        except AssertionError as error:
            raise AssertionError(f"{how}, {len(records)} workers: {error}") from error


def suite_of(
    laws: Mapping[str, Law], subject: Any, workers: Sequence[int], env: Mapping[str, str] | None
) -> type:
    """Returns a class of pytest tests: each law with each number of workers. One job runs all laws."""
    import pytest

    @functools.cache
    def results(number: int) -> Any:
        return mv.run(try_out, number, args=(laws, subject), timeout_seconds=JOB_SECONDS, env=env)

    class Conformance:
        """Laws, each with several numbers of workers."""

        @pytest.mark.parametrize("number", workers)
        @pytest.mark.parametrize("law", list(laws))
        def test_law(self, number: int, law: str) -> None:
            """The law holds."""
            judge(laws[law], law, results(number))

    return Conformance
