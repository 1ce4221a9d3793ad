"""Every error that the package raises on purpose, named by the state that it reports.

    MultiversoError
    ├── StartupError          the job cannot start here, or not with these options
    │   ├── NotInThisJobError   this job's mode, or its being on several hosts, does not allow the call
    │   └── NoSuchTableError    no job here has a table of this name
    ├── NotInitializedError   no session yet: call init() first
    ├── ClosedError           the session is over, or belongs to another process
    ├── InterruptedRoundError a synchronous round has to be finished first
    ├── LockStateError        a lock that this thread has already, or does not have
    ├── WorkerLostError       another worker died, or exited without shutdown()
    ├── WorkerFailedError     what a worker of multiverso.run raised cannot be raised here
    ├── NodeLostError         the process that holds the tables is gone
    ├── WaitTimeoutError      a deadline passed; says what was waited for and who is missing
    ├── DeadlockError         all workers wait, each for something else
    ├── ShapeMismatchError    an array or a table has another size or shape
    ├── DtypeMismatchError    data that cannot become the table's dtype without being changed
    ├── RowIdError            a row id that is not a row of the matrix
    ├── TableMismatchError    workers created different tables, or in a different order
    ├── OutOfMemoryError      there is not that much memory
    └── SnapshotError         a saved table that cannot be written or read, or does not fit

Each also derives from the built-in exception that a caller would expect, so ``except ValueError`` works.
"""

from __future__ import annotations

from collections.abc import Sequence


class MultiversoError(Exception):
    """Base of all errors of this package."""


class StartupError(MultiversoError, RuntimeError):
    """The job cannot start here, or not with these options."""


class NotInThisJobError(StartupError, ValueError):
    """The call is not for a job of this mode, or not for one on several hosts. Nothing was changed."""


class NoSuchTableError(StartupError, LookupError):
    """No job of this user on this host has a table of this name, or not yet; or several have."""


class NotInitializedError(MultiversoError, RuntimeError):
    """There is no session yet: call ``multiverso.init()`` first."""


class ClosedError(MultiversoError, RuntimeError):
    """The session is over (``shutdown()``), or it belongs to the process that this one was forked from."""


class InterruptedRoundError(MultiversoError, RuntimeError):
    """A synchronous round is unfinished: a read was interrupted in it, or its adds were not read yet."""


class LockStateError(MultiversoError, RuntimeError):
    """A lock is taken twice by a worker, or given back by a thread that does not have it."""


class WorkerLostError(MultiversoError, RuntimeError):
    """Another worker died, or exited without ``shutdown()``.

    Attributes:
        worker_ids: the lost workers.
    """

    def __init__(self, message: str, worker_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.worker_ids = tuple(worker_ids)


class WorkerFailedError(MultiversoError, RuntimeError):
    """What a worker of ``multiverso.run`` raised cannot be raised here; the message has its traceback."""


class NodeLostError(MultiversoError, RuntimeError):
    """The node, the process that owns the job's memory, is gone."""


class WaitTimeoutError(MultiversoError, TimeoutError):
    """A deadline passed. The message says what was waited for and which workers are missing."""


class DeadlockError(MultiversoError, RuntimeError):
    """All live workers wait for different things, so none of them can continue."""


class ShapeMismatchError(MultiversoError, ValueError):
    """An array or a table has another size or shape than expected."""


class DtypeMismatchError(MultiversoError, TypeError, ValueError):
    """The data cannot become the table's dtype without being changed."""


class RowIdError(MultiversoError, IndexError, ValueError):
    """A row id that is not an integer, is negative, or is past the last row."""


class TableMismatchError(MultiversoError, ValueError):
    """Workers created different tables, or the same ones in a different order."""


class OutOfMemoryError(MultiversoError, MemoryError):
    """The shared memory asked for is not available; the message gives the figures."""


class SnapshotError(MultiversoError, ValueError):
    """A saved table cannot be written or read, or does not fit the table that it is loaded into."""
