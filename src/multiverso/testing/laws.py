"""What a suite is made of: laws, tried out in the workers of a job and judged here."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import multiverso as mv
from multiverso.errors import WorkerLostError
from multiverso.launch.job import OnFailure
from multiverso.launch.rehearsing import hosts_here
from multiverso.runtime import Node
from multiverso.testing.nursery import Preload, run_forked

MODES = (False, True)
JOBS_SECONDS = 250.0  # compiling kernels on a cold and busy machine takes minutes
WAIT_SECONDS = JOBS_SECONDS / 2  # so that a wait ends with its own error, before the job is ended


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
class Raised:
    """What stands in the place of a result: the traceback of what was raised instead."""

    text: str


@dataclass(frozen=True)
class Job:
    """A job of some of the processes that `run_jobs` starts.

    Attributes:
        members: numbers of processes, in the workers' order.
        args: what the function is called with in this job, after what it is called with in all.
        hosts: how many of the members are on each host of a rehearsal; nothing for a job on one host.
    """

    members: tuple[int, ...]
    args: tuple[Any, ...] = ()
    hosts: tuple[int, ...] = ()

    def nodes(self, stack: ExitStack) -> list[str]:
        """Makes its nodes, for as long as the stack stands; returns the address of each member's."""
        if not self.hosts:
            return [stack.enter_context(closing(Node(len(self.members)))).address] * len(self.members)
        roster, nodes = stack.enter_context(hosts_here(self.hosts))
        return [nodes[roster.host_of(worker)].address for worker in range(len(self.members))]


def run_jobs(
    jobs: Sequence[Job],
    function: Callable[..., Any],
    *args: Any,
    on_failure: OnFailure = "stop",
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> list[list[Any]]:
    """Runs several jobs, one after the other, in the same processes: to start those is what takes the time.

    Args:
        jobs: who takes part in which.
        function: called in each worker of each job.
        args: what the function is called with in every job.
        on_failure: "continue" where workers are killed on purpose, each in the last job that it takes part in.
        env: environment variables for the processes.
        preload: modules that one process imports (or functions that it calls) to fork itself for each of
            these; with none of them the processes are fresh interpreters.

    Returns:
        For each job what its workers returned: `Raised` for one that raised, WorkerLostError for one that was
        killed.
    """
    with ExitStack() as stack:
        number = 1 + max(number for job in jobs for number in job.members)
        what = ([(job.nodes(stack), job) for job in jobs], function, *args)
        if preload:
            found = run_forked(_take_part, number, what, preload=preload, timeout_seconds=JOBS_SECONDS, env=env)
            lost = [outcome for outcome in found if isinstance(outcome, WorkerLostError)]
            if lost and on_failure == "stop":
                raise lost[0]
        else:
            found = mv.run(_as_worker, number, args=what, timeout_seconds=JOBS_SECONDS, on_failure=on_failure, env=env)
    return [
        [found[n] if isinstance(found[n], Exception) else found[n][i] for n in job.members]
        for i, job in enumerate(jobs)
    ]


def _as_worker(*args: Any) -> list[Any]:
    return _take_part(int(os.environ["MULTIVERSO_WORKER_ID"]), *args)


def _take_part(me: int, jobs: Sequence[tuple[list[str], Job]], function: Callable[..., Any], *args: Any) -> list[Any]:
    """The life of one process; returns a result for each job, None where it takes no part."""
    results = []
    for addresses, job in jobs:
        result = None
        if me in job.members:
            worker = job.members.index(me)
            os.environ["MULTIVERSO_NODE"] = addresses[worker]
            os.environ["MULTIVERSO_WORKER_ID"] = str(worker)
            os.environ["MULTIVERSO_WORKERS_NUM"] = str(len(job.members))
            try:
                result = function(*args, *job.args)
            except Exception:  # the other jobs are none the worse for it
                result = Raised(traceback.format_exc())
            mv.shutdown()
        results.append(result)
    return results


def in_each(
    runs: Sequence[tuple[Any, ...]],
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> Callable[..., list[Any]]:
    """Returns a function that gives a run's results, in worker order; all runs are made when it is first called.

    Args:
        runs: the number of workers, and what the function is called with in this run, after what it is called
            with in all.
        function: called in each worker of each run.
        args: what the function is called with in every run.
        env: environment variables for the processes.
        preload: what they import once for all, as in `run_jobs`.

    Examples:
        >>> trained = in_each([(1, False), (2, True)], train)  # doctest: +SKIP
        >>> trained(2, True)  # doctest: +SKIP
    """
    largest_first = sorted(runs, key=lambda run: -run[0])  # no worker waits while others import and compile
    jobs = [Job(tuple(range(workers)), tuple(own)) for workers, *own in largest_first]
    results = when_asked(jobs, function, *args, env=env, preload=preload)
    return lambda *run: unless_raised(results(largest_first.index(run)))


def when_asked(
    jobs: Sequence[Job],
    function: Callable[..., Any],
    *args: Any,
    on_failure: OnFailure = "stop",
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> Callable[[int], list[Any]]:
    """Returns a function that gives the results of a job, by its place; it does `run_jobs` when first called."""

    @functools.cache
    def outcomes() -> list[list[Any]] | Exception:
        try:
            return run_jobs(jobs, function, *args, on_failure=on_failure, env=env, preload=preload)
        except Exception as error:
            return error

    def results(place: int) -> list[Any]:
        found = outcomes()
        if isinstance(found, Exception):
            raise found
        return found[place]

    return results


def unless_raised(results: list[Any]) -> list[Any]:
    """Returns them; raises AssertionError with the traceback if a worker raised, and what a lost one left."""
    for me, result in enumerate(results):
        assert not isinstance(result, Raised), f"worker {me}:\n{result.text}"
        if isinstance(result, WorkerLostError):
            raise result
    return results


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it: what `run_jobs` is to do where each job has a function of its own."""
    return function(*args)


def try_out(laws: Mapping[str, Law], subject: Any, sync: bool) -> dict[str, Any]:
    """Does all laws' work, in a worker; returns what there is to judge, by their names."""
    mv.init(sync=sync, timeout_seconds=WAIT_SECONDS)
    records: dict[str, Any] = {}
    for name, law in laws.items():
        try:
            records[name] = law.work(subject, mv.worker_id())
        except Exception:
            records[name] = Raised(traceback.format_exc())
            break  # the workers are no longer in step
    return records


def judge(law: Law, name: str, sync: bool, results: Sequence[Mapping[str, Any]]) -> None:
    """Raises AssertionError when a law does not hold in what the workers brought from `try_out`."""
    how = "synchronous" if sync else "asynchronous"
    for me, worker in enumerate(results):
        for other, record in worker.items():
            assert not isinstance(record, Raised), f"{how}, worker {me}, in {other!r}:\n{record.text}"
    try:
        law.check([worker.get(name) for worker in results])
    except AssertionError as error:
        raise AssertionError(f"{how}, {len(results)} workers: {error}") from error


def suite_of(
    laws: Mapping[str, Law],
    subject: Any,
    workers: Sequence[int],
    *,
    hosts: Sequence[tuple[int, ...]] = (),
    more: Sequence[Job] = (),
    env: Mapping[str, str] | None = None,
    preload: Preload = (),
) -> tuple[type, Callable[[int], list[Any]]]:
    """Returns a class of pytest tests: each law with each number of workers. A job of each mode tries all.

    Args:
        laws: what is to hold, by name.
        subject: what the laws are about.
        workers: numbers of workers, on one host.
        hosts: how many workers each host has, for each rehearsal of several.
        more: jobs that the same processes do afterwards, each called with its own arguments only: a function and
            what it is called with. Workers may be killed in them that are none of the laws'.
        env: environment variables for the processes.
        preload: what they import once for all, as in `run_jobs`.

    Returns:
        The class, and a function that gives the results of a job of ``more`` by its place.
    """
    import pytest

    layouts: dict[str, tuple[int, ...]] = {str(number): () for number in sorted(workers, reverse=True)}
    layouts |= {"+".join(map(str, layout)): tuple(layout) for layout in hosts}
    # first those of most workers: nobody waits while others import and compile
    jobs = [
        Job(tuple(range(sum(layout) or int(number))), (try_out, laws, subject, sync), layout)
        for number, layout in layouts.items()
        for sync in MODES
    ]
    results = when_asked([*jobs, *more], call, on_failure="continue" if more else "stop", env=env, preload=preload)

    class Conformance:
        """Laws, each with several numbers of workers."""

        @pytest.mark.parametrize("number", list(layouts))
        @pytest.mark.parametrize("law", list(laws))
        def test_law(self, number: str, law: str) -> None:
            """The law holds."""
            first = len(MODES) * [*layouts].index(str(number))
            for place, sync in enumerate(MODES, first):
                judge(laws[law], law, sync, unless_raised(results(place)))

    return Conformance, lambda place: results(len(jobs) + place)
