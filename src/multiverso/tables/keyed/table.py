"""Rows by key: a table that grows with the keys that are added to."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from multiverso.compiling.on_demand import compile_update
from multiverso.deadline import checked_seconds
from multiverso.errors import NotInThisJobError
from multiverso.runtime.session.current import current
from multiverso.runtime.session.session import Session
from multiverso.spec.table import check_name, checked_count, checked_dtype
from multiverso.tables.convert import Array, Out, as_shaped
from multiverso.tables.keyed.calls import SHORT_SECONDS
from multiverso.tables.keyed.contents import KeyedContents
from multiverso.tables.keyed.keys import Keys, as_keys, summed
from multiverso.tables.keyed.progress import Adding, Evicting
from multiverso.tables.keyed.spec import Eviction, KeyedSpec
from multiverso.tables.keyed.spread import SpreadCalls
from multiverso.tables.operations import ADD_ROWS, GET_ROWS
from multiverso.tables.output import fresh, into
from multiverso.tables.typed import Float16, Float32, Float64, Int32, Int64, Scalar
from multiverso.updaters import Updater, UpdaterName, resolve


class KeyedOptions(TypedDict, total=False):
    """What `KeyedTable` takes beside its dim and dtype."""

    initial: float | str | tuple[str, float]
    seed: int
    updater: UpdaterName | Updater
    admission: int
    eviction: Eviction | None
    cache_rows: int | None
    copies: int
    name: str | None
    session: Session | None


class KeyedTable(KeyedContents[Scalar]):
    """Rows of ``dim`` numbers, each under a 64-bit key, that all workers of the job share.

    The first add to a key creates its row; until then the key reads as its *initial row*, which depends on ``seed`` and
    the key alone. The table has no fixed size: it grows in small steps, and no row ever moves.

    An ``add`` is applied when it returns, row by row, and a row that is read is never torn. A
    worker that is killed in an ``add`` has applied it to a prefix of the keys, to each of them wholly or not at all,
    and the others continue; a key whose ``add`` has returned is never lost.

    In a synchronous job (``init(sync=True)``) ``get`` ends a round, as a matrix's does: each key that was added to gets
    one step of its updater with the sum of all workers' deltas, in worker order, and all workers read the same bits.
    Everything else (``len``, ``items``, ``save``) shows the last round. There keys are not removed, evicted or
    admitted late, and all workers make their tables in the same order.

    After an exception (a deadline, Ctrl-C, an alarm's handler) call the method again with the same arguments, in the
    same thread: that finishes the operation, and repeats nothing.

    With a ``name`` the first worker creates the table and others attach to it (in a synchronous job all create it
    together); without, the n-th keyed table of each worker is the same table.

    It lasts until all workers that have it have closed it (`close`, or the end of a ``with``) or have left. Rows
    of removed keys are used again before that.

    Args:
        dim: numbers in a row, 1 or more.
        dtype: float32 (default), float64, int32 or int64.
        initial: a number; or ``"uniform"`` or ``"normal"``, whose scale is 0.05; or ``(kind, scale)``: uniform in
            [-scale, scale), normal with this standard deviation. Integer tables take whole numbers only.
        seed: of the initial rows.
        updater: how adds reach a row: a name or an ``Updater``. Keys named twice in one call are summed first, unless
            the updater is plain addition: one call is one step of each row.
        admission: how many adds, one in each call, a key needs before it gets a row, at most 255. The deltas of those
            before are not applied: rare keys cost 16 bytes of the index, and no row.
        eviction: which keys `tick` and `evict` remove; None: none. Beyond `most_keys` adds do so by themselves. On
            several hosts each evicts of those that live there, beyond its part of `most_keys`.
        cache_rows: on several hosts: how many copies of rows that live on other hosts each host keeps; at least as many
            as one add names. By default 256 MB of them.
        copies: on several hosts: on how many of them each row is. With 2 the job loses no row with a host.
        name: create the table by this name, or attach to it; where reads wait for others, all workers create it
            together.
        session: the session it belongs to; the current one by default.

    Raises:
        TableMismatchError: other workers asked for another table of this name.
        NotInThisJobError: a session with bounded staleness, or rounds with a quorum; a synchronous one on several
            hosts, or with ``admission`` or ``eviction``; several hosts, and an updater of your own.
        ValueError: an invalid ``initial`` or name.

    Examples:
        >>> import multiverso as mv
        >>> session = mv.init()
        >>> table = mv.KeyedTable(2)
        >>> table.add([[1, 1], [2, 2]], keys=[7, -3])
        >>> table.get([-3, 7, 1000])
        array([[2., 2.],
               [1., 1.],
               [0., 0.]], dtype=float32)
        >>> len(table)
        2
        >>> mv.shutdown()
    """

    # fmt: off
    @overload
    def __init__(
        self: KeyedTable[np.float32], dim: int, *, dtype: Float32 = ..., **options: Unpack[KeyedOptions]
    ) -> None: ...
    @overload
    def __init__(
        self: KeyedTable[np.float64], dim: int, *, dtype: Float64, **options: Unpack[KeyedOptions]
    ) -> None: ...
    @overload
    def __init__(
        self: KeyedTable[np.int32], dim: int, *, dtype: Int32, **options: Unpack[KeyedOptions]
    ) -> None: ...
    @overload
    def __init__(
        self: KeyedTable[np.int64], dim: int, *, dtype: Int64, **options: Unpack[KeyedOptions]
    ) -> None: ...
    @overload
    def __init__(self, dim: int, *, dtype: npt.DTypeLike, **options: Unpack[KeyedOptions]) -> None: ...
    # fmt: on
    def __init__(
        self,
        dim: int,
        *,
        dtype: npt.DTypeLike = "float32",
        initial: float | str | tuple[str, float] = 0.0,
        seed: int = 0,
        updater: UpdaterName | Updater = "add",
        admission: int = 1,
        eviction: Eviction | None = None,
        cache_rows: int | None = None,
        copies: int = 1,
        name: str | None = None,
        session: Session | None = None,
    ) -> None:
        check_name(name)
        rule = resolve(updater)
        asked = KeyedSpec.of(
            checked_count(dim, "dim"), checked_dtype(dtype), initial, seed, rule, name, admission, eviction, copies
        )
        self._update = compile_update(rule.apply, asked.dtype)
        self._sums_first = bool(rule.states or rule.hyper or rule.clip or asked.admission > 1)
        most = None if cache_rows is None else checked_count(cache_rows, "cache_rows")
        super().__init__(session or current(), asked, rule, most)  # last: it is open then

    def __len__(self) -> int:
        """Keys that have a row: counted segment by segment, about 10 microseconds for a million keys."""
        return self._passes.counts()[0]

    # -- reading and adding ----------------------------------------------------------------------------------

    @overload
    def get(
        self, keys: Any, out: None = None, *, dtype: None = None, timeout_seconds: float | None = None
    ) -> npt.NDArray[Scalar]: ...
    @overload
    def get(
        self, keys: Any, out: None = None, *, dtype: Float16, timeout_seconds: float | None = None
    ) -> npt.NDArray[np.float16]: ...
    @overload
    def get(
        self, keys: Any, out: None = None, *, dtype: npt.DTypeLike, timeout_seconds: float | None = None
    ) -> Array: ...
    @overload
    def get(self, keys: Any, out: Out, *, timeout_seconds: float | None = None) -> Out: ...
    def get(
        self, keys: Any, out: Any = None, *, dtype: npt.DTypeLike | None = None, timeout_seconds: float | None = None
    ) -> Any:
        """Returns the rows of keys; of a key that has none, its initial row. In a synchronous job it ends a round.

        Args:
            keys: integers that fit in 64 bits with a sign, in any shape and order, also repeated.
            out: written to and returned: keys' shape + (dim,), or flat.
            dtype: of the result, where ``out`` is not given: the table's, ``"float16"`` or ``"bfloat16"``.
            timeout_seconds: deadline, instead of the session's, of the wait for a worker that was stopped in the middle
                of a change; in a synchronous job of the round, too.

        Returns:
            Numbers of the table's dtype, of keys' shape + (dim,).

        Raises:
            RowIdError: keys that are not integers, or do not fit.
            ShapeMismatchError, DtypeMismatchError: ``out`` does not fit.
            WorkerLostError, NodeLostError, DeadlockError, WaitTimeoutError: the round failed.
        """
        array = as_keys(keys)
        shape = (*array.shape, self.dim)
        output = fresh(shape, self._dtype, dtype) if out is None else into(out, shape, self._dtype, False)
        flat = array.reshape(-1)
        operations, deadline = self._operations, self._deadline(timeout_seconds)
        if operations is None:
            self._calls.get(flat, output.flat, deadline)
            return output.give()
        return operations.run(GET_ROWS, operations.how.get_rows, (flat, output.flat), deadline, output.give)

    def add(self, delta: Any, keys: Any, *, timeout_seconds: float | None = None) -> None:
        """Gives each key's delta to the table's updater; a key without a row gets one first.

        Args:
            delta: numbers of keys' shape + (dim,), or flat, or one number for all; not modified.
            keys: as for `get`.
            timeout_seconds: as for `get`.

        Raises:
            RowIdError, ShapeMismatchError, DtypeMismatchError: they do not fit; nothing was changed.
            OutOfMemoryError: there is no memory for more rows; nothing was added, but some of the keys may have got
                their initial rows.
            WaitTimeoutError: a worker was stopped while it held a row, for too long. A part of the keys may be done:
                the same call does the rest, and any other call on the table does so first.
        """
        array = as_keys(keys)
        data = as_shaped(delta, (*array.shape, self.dim), self._dtype, "delta", "keyed")
        flat = array.reshape(-1)
        operations = self._operations
        if self._sums_first and (operations is None or self._clip is not None):
            flat, data = summed(flat, data, self.dim)
        data = self._transformed(data, flat.size)
        deadline = self._deadline(timeout_seconds)
        if operations is not None:
            operations.run(ADD_ROWS, operations.how.add_rows, (flat, data), deadline)
            return
        calls = self._calls
        calls.make(Adding.of(self._update, flat, data, self._spec.admission), calls.add, deadline)

    def _unread(self) -> tuple[Array, ...] | None:
        """As for a `TableHandler`: the deltas and their keys."""
        return None if self._rounds is None else self._rounds.logged()

    def _add_unread(self, deltas: Array, keys: Keys) -> None:
        if self._rounds is None:  # saved by a synchronous job
            self.add(deltas, keys)
        else:
            self._rounds.log_again(deltas, keys)

    def prefetch(self, keys: Any) -> None:
        """Asks for rows that will be read or added to soon, and does not wait.

        On several hosts rows that live on another one travel while this worker does something else: ask for the keys of
        the next minibatch before the step on this one. On one host it does nothing.

        Args:
            keys: as for `get`; up to 131,072 that have to travel. While the rows of the last call are on their way,
                another call does nothing.
        """
        array = as_keys(keys)
        self._session.check()
        if isinstance(self._calls, SpreadCalls):
            self._calls.prefetch(array.reshape(-1))

    def contains(self, keys: Any) -> npt.NDArray[np.bool_]:
        """Returns for each key whether it has a row; in the keys' shape."""
        array = as_keys(keys)
        return self._calls.contains(array.reshape(-1)).reshape(array.shape)

    # -- letting go ------------------------------------------------------------------------------------------

    def remove(self, keys: Any, *, timeout_seconds: float | None = None) -> npt.NDArray[np.bool_]:
        """Removes keys: they read as their initial rows again, and get a new row when something is added to them.

        An add of another worker at the same time comes before the removal or after it. The memory of the rows is reused
        for other keys, once every call that is under way in any worker has ended.

        Args:
            keys: as for `get`.
            timeout_seconds: as for `get`.

        Returns:
            Whether each key had a row, in the keys' shape; a key that is named twice had one the first time.

        Raises:
            NotInThisJobError: in a synchronous job.
        """
        if self._rounds is not None:
            raise NotInThisJobError(f"{self!r} is in a synchronous job, where keys are not removed: their rows stay")
        return self._remove(keys, timeout_seconds)

    def tick(self, *, seconds: float = SHORT_SECONDS) -> int:
        """Advances the table's time by one, and evicts keys for a moment. Call it in one worker: each epoch, say.

        On several hosts each has its time and its keys: call it, and `evict`, in one worker of each host.

        Args:
            seconds: as for `evict`.

        Returns:
            How many keys were evicted.
        """
        self._session.check()
        calls, most = self._calls, checked_seconds(seconds)
        return calls.make(Evicting(self.ticks + 1), calls.evict, most)

    def evict(self, *, seconds: float | None = None) -> int:
        """Removes the keys that the table's ``eviction`` names, one segment of a few hundred keys after another.

        Any worker may call it at any time, several at once: each continues where the last one stopped. It waits for
        nobody: a segment that another worker is changing just now is left out.

        Args:
            seconds: stop after this long, at the end of a segment (tens of microseconds); None looks at all keys.

        Returns:
            How many keys were evicted.

        Raises:
            ValueError: the table has no eviction.
        """
        if self._spec.eviction is None:
            raise ValueError(f"{self!r} has no eviction; make it with eviction=Eviction(...), or remove(keys)")
        calls, most = self._calls, None if seconds is None else checked_seconds(seconds)
        return calls.make(Evicting(None), calls.evict, most)

    # -- looking at it ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns what the table holds and what all workers have done with it.

        Returns:
            ``keys`` (with a row), ``candidates`` (for a row), ``dead`` (entries of removed keys, whose rows the next
            keys get), ``bytes`` (memory in use), ``segments``, and over all workers: ``adds`` and ``gets`` (calls),
            ``rows_added``, ``rows_read``, ``keys_removed``, ``keys_evicted``, ``splits``, ``waits``, ``taken_over``
            (words of dead workers) and ``put_back`` (rows that one of them had half written). On several hosts
            ``keys`` are those of all, and the rest is of this one's workers and of the rows that live here; of rows
            that live elsewhere there are ``copies`` (how many), ``copies_used`` (how many of its workers' reads and
            adds were of these rows) and ``copies_fetched`` (how many had to come first: where these are many, give the
            table more ``cache_rows``).
        """
        keys, candidates, dead = self._passes.counts()
        copies = self._calls.statistics() if isinstance(self._calls, SpreadCalls) else {}
        return {"keys": keys, "candidates": candidates, "dead": dead, **self._memory.statistics(), **copies}

    def check(self) -> dict[str, int]:
        """Checks every entry, as fsck does, while no worker adds or removes.

        Returns:
            ``keys``, ``twins`` (keys entered twice), ``misplaced`` (entries that a search would not find), ``shared``
            (rows of two entries), ``lost`` (rows of none), ``miscounted`` (by how many keys, candidates and dead
            entries the segments' counts are wrong) and ``held`` (words that a worker holds). All but ``keys`` are 0 in
            a sound table.
        """
        return self._passes.check()
