"""`multiverso.run(function)`: call a function in several workers, from a script, a notebook or a test.

With ``page=True`` the job's page is shown, in a notebook's cell, or its address on standard error.
"""

from __future__ import annotations

import html
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from operator import index
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

from multiverso.deadline import checked_seconds
from multiverso.errors import StartupError
from multiverso.hosts.roster import spread
from multiverso.launch.job import OnFailure
from multiverso.launch.on_nodes import Part, Watcher, job_on
from multiverso.launch.outcomes import conclude, read_answer, write_call
from multiverso.launch.output import Output
from multiverso.launch.place import JOB_VARIABLE, Place, place_in
from multiverso.launch.restart_policy import Replacements
from multiverso.launch.results import WorkerExit
from multiverso.launch.sinks import text_sink
from multiverso.launch.watched import Page, Watch
from multiverso.layout.words import MAX_WORKERS, MOST_WORKERS
from multiverso.runtime.node.node import Node
from multiverso.saying import say
from multiverso.wire.trust import SECRET_VARIABLE, new_secret

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RunOptions(TypedDict, total=False):
    """The options of `run`."""

    timeout_seconds: float | None
    on_failure: OnFailure
    env: Mapping[str, str] | None
    hosts: int
    replace: int
    page: bool


@overload
def run(function: Callable[[], T], workers: int = 4, **options: Unpack[RunOptions]) -> list[T]: ...
@overload
def run(function: Callable[[*Ts], T], workers: int, args: tuple[*Ts], **options: Unpack[RunOptions]) -> list[T]: ...
@overload
def run(
    function: Callable[[*Ts], T], workers: int = 4, *, args: tuple[*Ts], **options: Unpack[RunOptions]
) -> list[T]: ...
@overload
def run(
    function: Callable[..., T],
    workers: int = 4,
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any],
    **options: Unpack[RunOptions],
) -> list[T]: ...
def run(
    function: Callable[..., Any],
    workers: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
    on_failure: OnFailure = "stop",
    env: Mapping[str, str] | None = None,
    hosts: int = 1,
    replace: int = 0,
    page: bool = False,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in each of several new processes, the workers of one job.

    Blocks until all have ended. The workers are fresh interpreters: the function travels with its globals, even when it
    is defined in a notebook or a script, which is not run again and needs no guard. Each line of their output appears
    here with its worker's number. In the function, `multiverso.init()` joins
    the job; `multiverso.shutdown()` is called at its end if it did not do so. May be called from any thread.

    Args:
        function: what to call; it may ask `multiverso.worker_id()` who it is.
        workers: how many workers, from 1.
        args: positional arguments, the same for all.
        kwargs: keyword arguments, the same for all. Checkers of types do not look into them; into those of
            ``run(functools.partial(train, rate=0.1))`` they do.
        timeout_seconds: the longest that the whole call may take; None for no limit.
        on_failure: "stop" ends the others when a worker fails, and raises. "continue" lets them continue: the
            failed worker's place in the result holds its exception, which is raised when no worker succeeded.
        env: environment variables to set in the workers.
        hosts: rehearse a job on this many hosts, which are all this machine (docs/how-to/hosts.md); workers are
            numbered in host order.
        replace: with on_failure="continue": how many failed workers, in all, are started again in their places, and
            call the function again, while the others continue.
        page: show the job in the browser while it runs (extra ``page``): in a notebook in the cell, which keeps what it
            showed; elsewhere the address is printed.

    Returns:
        Each worker's result, in worker order.

    Raises:
        Exception: what a worker raised, of the same type, with the worker's traceback as a note.
        WorkerFailedError: a worker raised something that cannot be sent here, or that should not end this
            process (SystemExit); its text has the traceback.
        WorkerLostError: a worker was killed or ended without a result.
        WaitTimeoutError: the time is over; all workers were ended.
        StartupError: the options make no sense, or an argument cannot be sent to a process; nothing was started.

    Examples:
        >>> import multiverso as mv
        >>> def job(base):
        ...     mv.init()
        ...     return base + mv.worker_id()
        >>> mv.run(job, workers=2, args=(10,))
        [10, 11]
    """
    most = MAX_WORKERS if hosts == 1 else MOST_WORKERS
    check_call("multiverso.run", function, args, workers, timeout_seconds, on_failure, replace, env, most)
    if not hasattr(hosts, "__index__") or not 1 <= hosts <= workers:
        raise StartupError(f"multiverso.run: hosts is {hosts!r}; it must be from 1 to the {workers} workers.")
    workers, hosts = index(workers), index(hosts)  # NumPy's, too
    with ExitStack() as stack:
        call = stack.enter_context(open(os.memfd_create("multiverso-call"), "w+b"))
        answers = [stack.enter_context(open(os.memfd_create("multiverso-answer"), "w+b")) for _ in range(workers)]
        write_call(call, function, tuple(args), dict(kwargs or {}))
        secret = new_secret()
        descriptors = [(call.fileno(), answer.fileno()) for answer in answers]
        python = (sys.executable, str(Path(__file__).with_name("_call.py")))
        job_id = uuid.uuid4().hex
        environ = {**os.environ, **(env or {}), SECRET_VARIABLE: secret, JOB_VARIABLE: job_id}
        parts = []
        for node, place in _nodes(stack, workers, hosts, on_failure, secret, replace > 0):
            theirs = [descriptors[worker_id] for worker_id in place.workers]
            programs = [(*python, *map(str, pair)) for pair in theirs]  # inherited under the same numbers
            parts.append(Part(node, place, programs, theirs))
        watch = stack.enter_context(shown(parts[0].node)) if page else None
        job = job_on(
            parts,
            Replacements(replace),
            _Answers(answers),
            environ=environ,
            marker=f"{JOB_VARIABLE}={job_id}",
            output=Output(text_sink(sys.stdout, sys.stderr), folds=True),
            on_failure=on_failure,
        )
        result = job.run(timeout_seconds)
        if watch is not None:
            first = result.culprit.worker_id if result.culprit else None
            watch.end(result, result.exit_code == 0, f"{result}", first, on_failure == "stop")
        outcomes = [read_answer(answers[end.worker_id], end) for end in result.exits]
    late = (
        f"multiverso.run took longer than timeout_seconds={timeout_seconds:g}" if result.reason == "timeout" else None
    )
    return conclude(outcomes, on_failure, late)


class _Answers(Watcher):
    """A replacement writes the answer again."""

    def __init__(self, answers: Sequence[IO[bytes]]) -> None:
        self._answers = answers

    def replacing(self, end: WorkerExit, replacements: Replacements, seconds: float) -> None:
        self._answers[end.worker_id].seek(0)
        self._answers[end.worker_id].truncate()


def _nodes(
    stack: ExitStack, workers: int, hosts: int, on_failure: OnFailure, secret: str, replaces: bool
) -> Iterator[tuple[Node, Place]]:
    """Makes the job's nodes, one for each host, and says which workers are there."""
    if hosts == 1:
        node = Node(workers=workers, on_lost=on_failure, secret=secret, replaces=replaces)
        yield stack.enter_context(closing(node)), Place.alone(workers)
        return
    # not above: it takes long to import, and a job on one host has no use for it
    from multiverso.launch.rehearsing import hosts_here

    made = hosts_here(spread(workers, hosts), on_lost=on_failure, secret=secret, replaces=replaces)
    roster, nodes = stack.enter_context(made)
    for host, node in enumerate(nodes):
        yield node, place_in(roster.on(host))


def check_call(
    what: str,
    function: Callable[..., Any],
    args: object,
    workers: int,
    timeout_seconds: float | None,
    on_failure: OnFailure,
    replace: int = 0,
    env: object = None,
    most: int = MOST_WORKERS,
) -> None:
    """Refuses what makes no sense, in the name of the function that was called.

    Raises:
        TypeError: the function is none, or its arguments are no sequence of them.
        StartupError: another argument cannot be.
    """
    if not callable(function):
        raise TypeError(
            f"{what}: expected a function, got {type(function).__name__}."
            + (f" A script: multiverso run -n {workers} {function}" if isinstance(function, str) else "")
        )
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise TypeError(f"{what}: args is a tuple of arguments, args=({args!r},) for one; got {type(args).__name__}.")
    if not hasattr(workers, "__index__") or not 1 <= workers <= most:
        raise StartupError(f"{what}: workers is {workers!r}; it must be from 1 to {most}.")
    if env is not None and not (
        isinstance(env, Mapping) and all(isinstance(text, str) for pair in env.items() for text in pair)
    ):
        raise TypeError(f"{what}: env has texts by their names, such as {{'OMP_NUM_THREADS': '1'}}; got {env!r:.200}")
    if timeout_seconds is not None:
        try:
            checked_seconds(timeout_seconds, positive=True)
        except ValueError:
            raise StartupError(
                f"{what}: timeout_seconds is {timeout_seconds!r}; it must be a number of seconds above 0."
            ) from None
    if on_failure not in ("stop", "continue"):
        raise StartupError(f"{what}: on_failure is {on_failure!r}; it must be 'stop' or 'continue'.")
    if not hasattr(replace, "__index__") or replace < 0:
        raise StartupError(f"{what}: replace is {replace!r}; it must be a number of workers, 0 or more.")
    if replace and on_failure == "stop":
        raise StartupError(f"{what}: replace={replace} is for on_failure='continue', where the others continue.")


# in a <div>, as IPython warns of a bare frame
_FRAME = (
    '<div><iframe title="The page of the job" {} style="width: 100%; height: 40rem; border: 1px solid #8888"></iframe>'
    "</div>"
)


@contextmanager
def shown(node: Node) -> Iterator[Watch]:
    """Shows a page of a node's job: live until it is over, and then what it showed in the end, without a server."""
    page = Page()
    with Watch(page, say) as watch:
        cell: Any = None
        if _in_notebook():
            from IPython.display import HTML, display

            cell = display(HTML(_FRAME.format(f'src="{html.escape(page.address)}"')), display_id=True)
        else:
            say(f"the page is at {page.address}")
        try:
            with watch.following(node):
                yield watch
        finally:
            if cell is not None and watch.history.now is not None:
                from multiverso.page.feed import Feed

                text = html.escape(Feed(history=watch.history).saved())
                cell.update(HTML(_FRAME.format(f'srcdoc="{text}"')))


def _in_notebook() -> bool:
    """Whether this process shows what is displayed: a terminal's IPython does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")
