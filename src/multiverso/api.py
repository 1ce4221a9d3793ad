"""The module-level functions of the originals: they act on the current session, the one that ``init`` made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import index
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from multiverso.errors import StartupError
from multiverso.runtime.joining import join
from multiverso.runtime.session.current import current, is_open, latest, set_current
from multiverso.runtime.session.session import Session, abandoned_by, open_sessions
from multiverso.signal_safety import new_lock, turn
from multiverso.spec.modes import Grace

_starting = new_lock()
_options: WeakKeyDictionary[Session, dict[str, Any]] = WeakKeyDictionary()  # what each was begun with


def init(
    sync: bool = False,
    *,
    staleness: int | None = None,
    quorum: float | None = None,
    grace_seconds: Grace | None = None,
    record: str | os.PathLike[str] | None = None,
    replay: str | os.PathLike[str] | None = None,
    on_lost: Literal["stop", "continue"] | None = None,
    wire: str | None = None,
    every: float | str | None = None,
    between: str | None = None,
    timeout_seconds: float | None = None,
    start_timeout_seconds: float | None = None,
    exist_ok: bool = False,
) -> Session:
    """Joins the job that this process belongs to; returns its session when all workers have joined.

    The environment variables of `multiverso run`, mpirun, torchrun and srun identify the job; a plain
    ``python train.py`` is a job of one worker.

    Args:
        sync: synchronous rounds: the i-th ``get`` of a table returns the same bits in every worker.
        staleness: bounded staleness instead: a read waits for workers more than this many ticks behind.
        quorum: with ``sync=True``: a round closes when all workers have reached it, or when this many have and
            ``grace_seconds`` are over: a number of workers, or a fraction of the live ones, rounded up (``0.75``). A
            late worker's adds count once, in the next round, and its read returns that round's values (Chen et al.
            2016, "Revisiting Distributed Synchronous SGD", without dropping anything).
        grace_seconds: how long a round stays open after the quorum has come; 0 by default. ``"auto"``: a tenth of a
            worker's time from one read to the next (the median of its last nine; 0 for its first read), and on one host
            only while another worker is, by its own last reads, about to come.
        record: a folder to which each worker writes, when it leaves, which rounds its reads were in.
        replay: such a folder: each round has the same workers as then, so the same program gets the same bits.
        on_lost: when a worker dies, waits raise WorkerLostError (``"stop"``, the default) or continue without it
            (``"continue"``). None takes the launcher's option.
        wire: the format in which changes travel between hosts: ``"native"`` (default), ``"float32"``, ``"bfloat16"``,
            ``"int8"``, ``"topk"`` or ``"topk:0.05"``. This and the next two have no effect on one host; with
            ``sync=True`` the next two are refused.
        every: how often a host sends its changes: a number of seconds, or ``"100 adds"`` of its workers to a
            table; by default at once. A bare number is *seconds* here (``every=0.5``), while
            the ``every`` of `checkpoint` and of parameter managers counts *steps*.
        between: how the hosts' changes are combined: ``"sum"`` (default), ``"mean"``, ``"local_sgd"``,
            ``"diloco"`` or ``"diloco:LR,MOMENTUM"``. Tables of integers are summed.
        timeout_seconds: deadline of barriers, rounds and clocks; by default MULTIVERSO_TIMEOUT_SECONDS, or
            30 minutes.
        start_timeout_seconds: deadline for all workers to join; 120 s by default.
        exist_ok: return the open session, if there is one with the same options: for a notebook's cell that runs
            again.

    Returns:
        The session that all functions of this module use. In a ``with`` statement the end of the block calls
        `shutdown`.

    Raises:
        StartupError: already initialised, not on Linux, arguments that make no sense or exclude each other, or other
            options than those of the other workers.
        WaitTimeoutError: not all workers came in time.
        WorkerLostError: another worker died while the job was starting (with ``on_lost="stop"``).
        NodeLostError: the job's node ended meanwhile.
    """
    options = dict(locals())  # all arguments
    del options["exist_ok"]
    with turn(_starting, "init()"):
        if is_open():
            opened = current()
            begun_with = _options.get(opened, {})
            if not exist_ok:
                raise StartupError(
                    "multiverso is already initialised in this process; call shutdown() first, or init(exist_ok=True)"
                )
            if begun_with != options:
                other = [name for name, value in options.items() if begun_with.get(name) != value]
                raise StartupError(
                    f"multiverso is already initialised with other options: {', '.join(other)} "
                    f"({', '.join(f'{name}={begun_with.get(name)!r}' for name in other)} then); call shutdown() first"
                )
            return opened
        before = open_sessions()
        try:
            session = join(**options)
            _options[session] = options
            set_current(session)
            return session
        except BaseException:  # interrupted when the session was there, but not yet the current one
            for abandoned in abandoned_by(before):
                abandoned.shutdown()
            set_current(None)
            raise


def shutdown() -> None:
    """Finishes pending operations and leaves the job, without waiting for other workers. A second call does nothing.

    The others continue without this worker. ``init`` afterwards begins a new session.
    """
    session = latest()
    if session is not None:
        session.shutdown()
        set_current(None)


def barrier(timeout_seconds: float | None = None) -> None:
    """Waits until every live worker has reached this barrier.

    This worker's pending adds are finished first, so after it everyone reads the same. It does not end a
    synchronous round.

    Args:
        timeout_seconds: deadline of the wait, instead of the session's.

    Raises:
        NotInitializedError: there is no session; call ``init`` first.
        WorkerLostError: a worker died (with ``on_lost="stop"``).
        WaitTimeoutError: the deadline passed; the error names who is missing. The next call waits for the same barrier.
        DeadlockError: all live workers wait for each other.
        NodeLostError: the job's node is gone.
    """
    current().barrier(timeout_seconds)


def workers_num() -> int:
    """Returns how many workers the job has."""
    return current().workers_num


num_workers = workers_num


def worker_id() -> int:
    """Returns this worker's number, from 0 to ``workers_num() - 1``."""
    return current().worker_id


rank, size = worker_id, workers_num
"""Other names of `worker_id` and `workers_num`, for programs that come from the C++ interface or from MPI."""


def all_reduce(
    array: Any,
    op: Literal["sum", "product", "max", "min", "average"] = "sum",
    out: Any = None,
    *,
    timeout_seconds: float | None = None,
) -> npt.NDArray[Any]:
    """Combines the arrays of all workers, element by element; waits for all of them. In any mode, on any hosts.

    What the C++ interface calls ``MV_Aggregate``. It has nothing to do with tables, and ends no round. Elements are
    combined in worker order on each host, and then in host order, so all workers get the same bits, in every run;
    16-bit floats in float32. A worker's threads take turns.

    Args:
        array: this worker's numbers, of the same shape and dtype in every worker; not modified.
        op: ``"sum"``, ``"product"``, ``"max"``, ``"min"`` or ``"average"`` (of integers rounded down; the sum of int64
            has to fit).
        out: a NumPy array of that shape and dtype for the result; may be ``array`` itself.
        timeout_seconds: deadline of the wait, instead of the session's.

    Returns:
        The result: ``out``, or a new array.

    Raises:
        ShapeMismatchError, DtypeMismatchError: the workers' arguments differ, or ``out`` does not fit.
        NotInThisJobError: the number of workers is not fixed in this job.
        WorkerLostError: a worker died or left; nothing more can be reduced.
        WaitTimeoutError, DeadlockError, NodeLostError: the wait failed. Called again with the same array it
            continues where it stopped.
        InterruptedRoundError: another call was interrupted, and has to be finished first.
        ValueError: ``op`` is none of these.

    Examples:
        >>> import multiverso as mv
        >>> with mv.init():
        ...     mv.all_reduce([1.0, 2.0])
        array([1., 2.])
    """
    from multiverso.runtime.collective import reducer
    from multiverso.tables.convert import as_numpy

    return reducer.all_reduce(current(), as_numpy(array, "array"), op, out, timeout_seconds)


def server_id() -> int:
    """Returns the same as `worker_id`: every process of the original was a worker and a server."""
    return current().worker_id


def incarnation() -> int:
    """Returns how many processes had this worker's number before, and died.

    Above 0 (``multiverso run --on-failure continue --replace N``) the tables keep their current values, whatever the
    initial values of this process, and barriers that the others have passed return at once. The worker's own state (a
    step, an optimizer, a place in the data) comes from its last checkpoint, if it makes any.
    """
    return current().incarnation


def is_master_worker() -> bool:
    """Returns whether this is worker 0: the one that validates, prints and saves."""
    return current().worker_id == 0


def live_workers() -> list[int]:
    """Returns the workers that take part now: neither left nor lost."""
    return current().live_workers()


def shard(n: int, epoch: int = 0, seed: int = 0, equal: bool = True) -> npt.NDArray[np.int64]:
    """Returns this worker's part of ``n`` samples, shuffled: a different shuffle each epoch, the same in every worker.

    Args:
        n: how many samples there are, 0 or more.
        epoch: the epoch's number.
        seed: of the shuffle.
        equal: every worker gets ``n // workers_num()`` samples and the rest is left out this time (other samples
            each epoch). Unequal parts are the commonest way to break synchronous training. False: the first
            ``n % workers_num()`` workers get one more.

    Returns:
        Indices in 0 .. n - 1, int64, of shape (samples of this worker,). No index is in two workers' parts.

    Raises:
        TypeError: ``n``, ``epoch`` or ``seed`` is not an integer.
        ValueError: ``n`` is below 0.
    """
    try:
        count = index(n)
    except TypeError:
        raise TypeError(f"n is a number of samples, as len(data) gives; got {type(n).__name__}") from None
    if count < 0:
        raise ValueError(f"n is a number of samples, 0 or more; got {n!r}")
    session = current()
    order = np.random.default_rng([index(seed), index(epoch)]).permutation(count)
    workers = session.workers_num
    used = count - count % workers if equal else count
    return order[:used][session.worker_id :: workers].astype(np.int64, copy=False)


def batches(
    n: int, size: int, *, seed: int = 0, epoch: int | None = None, timeout_seconds: float | None = None
) -> Iterator[npt.NDArray[np.int64]]:
    """Hands out one shuffled epoch of ``n`` samples on demand: a slow worker gets fewer batches.

    Each sample is in exactly one batch of one worker. The loop ends in all workers at once, when every batch is done,
    so nobody waits for longer than one batch of the slowest worker. A batch is done when its worker asks for the next
    one or leaves the loop. If the worker dies or leaves the job before that, another worker gets the batch (with
    ``on_lost="continue"``), so its samples may count twice, and no others.

    Collective: all workers that train call it equally often, with the same arguments; the next epoch begins when
    all of them have left the loop. Loops cannot be nested. For a worker that joins the job later, earlier epochs are
    over at once. Asynchronous mode only: rounds need equal parts, see `shard`.

    Args:
        n: how many samples there are, 0 or more.
        size: the most samples of a batch, 1 or more; the epoch's last batch may be smaller.
        seed: of the shuffle, 0 or more.
        epoch: its number, 0 or more; a different shuffle for each. By default the one after the last of the same ``n``,
            ``size`` and ``seed`` in this session, from 0.
        timeout_seconds: deadline of each wait for others, instead of the session's.

    Yields:
        Sample numbers in 0 .. n - 1: int64, of shape (at most ``size``,), an array of the caller's own. The batches
        and their order depend on ``seed`` and ``epoch`` only; which worker gets which depends on the timing.

    Raises:
        TableMismatchError: other workers have called it with other arguments.
        WorkerLostError: a worker died in the middle of a batch (with ``on_lost="stop"``).
        StartupError: the job is synchronous or bounded, or the loop is nested.
        WaitTimeoutError, NodeLostError, DeadlockError: see ``multiverso.errors``.

    Examples:
        >>> import multiverso as mv
        >>> session = mv.init()
        >>> sorted(int(row) for rows in mv.batches(5, 2) for row in rows)
        [0, 1, 2, 3, 4]
        >>> mv.shutdown()
    """
    from multiverso.tables.batches import deal

    return deal(current(), n, size, seed, epoch, timeout_seconds=timeout_seconds)


def log(*, step: int | None = None, **values: Any) -> None:
    """Publishes numbers such as the loss: `mv.log(loss=...)`.

    `multiverso top` and the page show each worker's last values.

    With MULTIVERSO_TENSORBOARD=FOLDER they are written for TensorBoard, too, to ``FOLDER/<script>-<job>/worker-<i>``.
    Costs a few microseconds, without waiting.

    Args:
        step: the training step; by default one more than at the last call.
        values: numbers by name, or arrays or tensors of one number. About a kilobyte of them is shown.

    Raises:
        TypeError: a value is not a number; nothing is published.
        ImportError: MULTIVERSO_TENSORBOARD is set, and TensorBoard is not installed.
    """
    from multiverso.tables.log import log_of

    log_of(current()).write(values, step)


def stats() -> dict[str, Any]:
    """Returns what this worker has done so far.

    Returns:
        ``worker_id``, ``workers_num``, ``waited_seconds`` and, in ``tables``, for each array and matrix by its name
        (a text) or its number (an int): ``adds``, ``gets``, ``exchanges``, ``bytes``, ``wait_seconds``,
        ``locks_recovered`` (taken over from a dead worker), ``rows_put_back`` (half-written rows of a dead worker,
        restored by this one), ``clock``, and the staleness of reads (``staleness_last``, ``_max``, ``_mean``): how
        many pushes of other workers came since this worker's read before. Keyed tables have `KeyedTable.stats`.
    """
    return current().statistics()


def save(directory: str | os.PathLike[str]) -> None:
    """Writes all tables of this worker's session to a directory, whole or not at all.

    Call it in one worker or in all: one at a time writes, and a save that began after another worker's call serves for
    both. A load meanwhile finds the last finished save. See `TableHandler.save`.

    Raises:
        SnapshotError: it cannot be written, or the directory has a manifest of something else. Earlier saves are still
            there.
        WaitTimeoutError: another process is still saving there (``init(timeout_seconds=)``).
    """
    from multiverso.tables.save_all import save_all

    save_all(current(), directory)


def load(directory: str | os.PathLike[str]) -> None:
    """Replaces the values of all tables by those of a `save`; all fit, or nothing is changed.

    Create the same tables first. Call it in one worker (or in all), then ``barrier()``. A ``ParamManager`` saves and
    loads its tables by its own ``save`` and ``load``.

    Raises:
        SnapshotError: no saved tables there, other tables than this session's, or tables of a live ``ParamManager``.
    """
    from multiverso.tables.save_all import load_all

    load_all(current(), directory)
