"""A worker's side: requests, minibatches, shared parameters, and what all workers compute together."""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from multiverso.errors import LockStateError
from platoon.channel import arguments
from platoon.channel.arguments import DEFAULT_PORT
from platoon.channel.data import BatchClient
from platoon.channel.requests import Requests
from platoon.channel.wire import Array
from platoon.util import PlatoonError

if TYPE_CHECKING:
    from multiverso.rules import Rule
    from multiverso.runtime import JobLock, Session
    from platoon.channel.sharing import SharedParameters
    from platoon.param_sync import ParamSyncRule


class _OnePerProcess(type):
    """Calling the class again returns the process's worker, until that is closed."""

    _lock = threading.Lock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with cls._lock:
            current = Worker.current()
            return super().__call__(*args, **kwargs) if current is None else current


class Worker(metaclass=_OnePerProcess):
    """One worker, the only one of its process: ``Worker()`` returns it again.

    Args:
        control_port: where the controller listens. A worker that was started by its controller knows, so this
            then has to be 5567 (what programs have written there) or the right number. Otherwise None means
            5567.
        data_port: where minibatches come from; None if there are none, or `init_mb_sock` is called later.
        socket_timeout: how long to wait for an answer or a minibatch, in milliseconds; 5 minutes.
        data_hwm: how many minibatches may be on their way to this worker.

    Raises:
        PlatoonError: no controller answered in time, or it has no place for this worker.

    Attributes:
        local_params: this worker's own parameters, as `init_shared_params` was given them.
        shared_arrays: the arrays that `shared` has made here, by their size in bytes.
    """

    local_params: Any
    shared_arrays: dict[int, Array]
    _current: ClassVar[Worker | None] = None

    def __init__(
        self,
        control_port: int | None = None,
        data_port: int | None = None,
        socket_timeout: int = 300_000,
        data_hwm: int = 10,
    ) -> None:
        self._process = os.getpid()
        self._seconds = socket_timeout / 1000
        self._closed = False
        self._session: Session | None = None
        self._lock: JobLock | None = None
        self._shared: SharedParameters | None = None
        self._batches: BatchClient | None = None
        self._opened_by_arguments = False
        self.shared_arrays = {}
        self._attaching = threading.Lock()
        port, rank = _place(control_port)
        self._requests = Requests(port, self._seconds)
        try:
            # what the controller says about the job, and this worker's place in it
            self._info: dict[str, Any] = self._requests.ask("platoon-hello", {"local_rank": rank})
            if data_port:
                self.init_mb_sock(data_port, data_hwm)
                # the launcher's, not the program's
                self._opened_by_arguments = "PLATOON_DATA_PORT" in os.environ
        except BaseException:
            self._requests.close()
            raise
        Worker._current = self
        atexit.register(self.close)

    @staticmethod
    def current() -> Worker | None:
        """Returns this process's worker, or None if there is none, or it is closed, or another process's."""
        worker = Worker._current
        return None if worker is None or worker._closed or worker._process != os.getpid() else worker

    # -- requests ------------------------------------------------------------------------------------------

    def send_req(self, req: Any, info: Any = None) -> Any:
        """Asks the controller and returns its answer.

        Args:
            req: the request, any JSON value; mostly a word, such as ``"next"``.
            info: more of it, any JSON value.

        Raises:
            PlatoonError: no answer came in time, the controller is gone, or it could not answer.
        """
        self._check()
        return self._requests.ask(req, info)

    @property
    def csocket(self) -> socket.socket:
        """The socket of the requests; `send_req` is what they are sent with."""
        self._check()
        return self._requests.socket

    @property
    def asocket(self) -> BatchClient:
        """The channel of the minibatches, once it is open.

        Raises:
            AttributeError: it is not.
        """
        if self._batches is None:
            raise AttributeError("asocket: no channel for minibatches is open; call init_mb_sock()")
        return self._batches

    # -- minibatches ---------------------------------------------------------------------------------------

    def init_mb_sock(self, port: int | None = None, data_hwm: int = 10) -> None:
        """Opens the channel for minibatches, unless the launcher's arguments have opened it already.

        Args:
            port: where they come from; None asks the controller.
            data_hwm: how many may be on their way to this worker.

        Raises:
            PlatoonError: it was called before.
        """
        self._check()
        if self._batches is not None:
            if port is None and self._opened_by_arguments:
                self._opened_by_arguments = False  # the program's own call, of which the launcher was ahead
                return
            raise PlatoonError("minibatches can be received already: init_mb_sock() was called before")
        if port is None:
            answer = self._requests.ask("platoon-data", None)
            port, data_hwm = answer["port"], min(data_hwm, answer["data_hwm"])
        self._batches = BatchClient(port, data_hwm, self._requests)

    def recv_mb(self, copy: bool = True) -> list[Array]:
        """Waits for a minibatch and returns its arrays; an empty list means that there are no more.

        Opens the channel first, as `init_mb_sock` does, unless it is open.

        Args:
            copy: False saves a copy: the arrays lie in the memory that the controller has written.

        Raises:
            PlatoonError: none came in time, or what sends them has ended without `Controller.end_mb`.
        """
        self._check()
        if self._batches is None:
            self.init_mb_sock()
        assert self._batches is not None
        return self._batches.receive(copy, self._seconds)

    # -- the job's lock ------------------------------------------------------------------------------------

    def lock(self, timeout: float | None = None) -> None:
        """Takes the job's lock: until `unlock` no other worker synchronises, copies, or has the lock.

        (Calls with ``synchronous=False`` ignore it.) If this worker dies the lock is free again.

        Args:
            timeout: seconds to wait; 0 fails at once; None waits for half an hour.

        Raises:
            WaitTimeoutError: another process kept it; names it.
        """
        lock = self._job_lock()
        try:
            lock.acquire(timeout)
        except LockStateError as error:
            raise PlatoonError(str(error)) from error
        except BaseException:
            lock.abandon()  # Ctrl-C may have come on the way back from there
            raise

    def unlock(self) -> None:
        """Releases the job's lock, in the thread that took it.

        Raises:
            PlatoonError: this thread does not have it.
        """
        lock = self._job_lock()
        try:
            if self._shared is not None:
                self._shared.note_written()  # its last owner may have changed them
            lock.release()
        except LockStateError as error:
            raise PlatoonError(str(error)) from error

    lock_params, unlock_params = lock, unlock
    """The same by their older names."""

    # -- shared parameters ---------------------------------------------------------------------------------

    def init_shared_params(self, params: Any, param_sync_rule: ParamSyncRule | Rule) -> None:
        """Shares the parameters with the other workers: the first worker's values become the shared ones.

        Every worker calls this, at any time, with parameters of the same shapes and dtypes in the same order.
        Its own values stay as they are (`copy_to_local` gives it the shared ones).

        Args:
            params: a list of NumPy arrays, torch parameters, Theano or PyTensor shared variables, Keras variables, or
                objects with ``get_value()`` and ``set_value(value)``; or a torch module or a Keras model.
            param_sync_rule: the rule of `sync_params`: of `platoon.param_sync`, one of your own, or one of
                `multiverso.rules`, with which the worker's values become the shared ones at once.

        Raises:
            PlatoonError: these parameters cannot be shared, or differ from those of the others.
        """
        from platoon.channel.sharing import SharedParameters

        lock = self._job_lock()
        assert self._session is not None
        self._shared = SharedParameters(self._session, lock, params, param_sync_rule)
        self.local_params = params

    @property
    def shared_params(self) -> list[Array]:
        """The shared parameters themselves, in shared memory; change them between `lock` and `unlock`."""
        return self._shared_parameters().arrays

    def sync_params(self, synchronous: bool = True) -> None:
        """Exchanges this worker's parameters with the shared ones, as the rule says.

        Args:
            synchronous: whether to wait while another worker has the job's lock. Parts of the shared memory are
                locked while they change in either case, unless the rule is one of your own.
        """
        self._shared_parameters().synchronise(synchronous)

    def copy_to_local(self, synchronous: bool = True) -> None:
        """Sets this worker's parameters to the shared ones."""
        self._shared_parameters().copy_to_local(synchronous)

    def copy_to_global(self, synchronous: bool = True) -> None:
        """Sets the shared parameters to this worker's."""
        self._shared_parameters().copy_to_global(synchronous)

    # -- all workers together ------------------------------------------------------------------------------

    def all_reduce(self, src: Any, op: str = "sum", dest: Any = None) -> Any:
        """Combines the arrays of all workers, element by element; waits for all of them.

        On one host it is computed in shared memory, in rank order, so the result has the same bits everywhere
        and always. torch tensors go through ``torch.distributed`` where that is initialised. 16-bit floats
        are combined in float32. The average of integers is rounded down.

        Args:
            src: this worker's array, tensor, or shared variable of Theano or PyTensor, the same number of elements
                and dtype in every worker.
            op: ``"sum"`` (or ``"+"``), ``"product"`` (``"*"``), ``"max"``, ``"min"``, or ``"average"``.
            dest: where the result goes; may be ``src``.

        Returns:
            the result, of the kind of ``src``, or None if ``dest`` is given.

        Raises:
            ShapeMismatchError: the workers' arguments differ.
            WorkerLostError: a worker died.
            WaitTimeoutError: a worker did not call it in time.
        """
        self._check()
        return self._reduction(src, op, dest)

    @functools.cached_property
    def _reduction(self) -> Callable[..., Any]:
        size = self._info["global_size"]
        if size is None:
            raise PlatoonError(
                "all_reduce needs a fixed number of workers: give the controller its devices (-D cpu cpu)"
            )
        from platoon.channel.collective import all_reduce

        return functools.partial(all_reduce, self._attach(), size)

    def shared(self, array: Any) -> Array:
        """Returns an array in shared memory, the same one in every worker of this host, of the given one's size.

        One exists for each size in bytes; `shared_arrays` has them all. Nothing locks it. A shared variable is taken
        for its value.
        """
        from platoon.channel.collective import shared_array

        return shared_array(self._attach(), self.shared_arrays, array)

    @property
    def local_size(self) -> int:
        """How many workers this host has; if they come and go, how many there are now."""
        size = self._info["local_size"]
        return int(size) if size is not None else int(self._requests.ask("platoon-size", None))

    @property
    def local_rank(self) -> int:
        """This worker's number on this host, from 0."""
        return int(self._info["local_rank"])

    @property
    def global_size(self) -> int:
        """How many workers all hosts have."""
        size = self._info["global_size"]
        return int(size) if size is not None else self.local_size

    @property
    def global_rank(self) -> int:
        """This worker's number among those of all hosts, from 0."""
        return int(self._info["global_rank"])

    @property
    def device(self) -> str:
        """This worker's device, such as ``cpu`` or ``cuda0``; empty if it was started by hand."""
        return os.environ.get("PLATOON_DEVICE", "")

    @property
    def _multinode(self) -> bool:
        # programs for the original ask for it
        return int(self._info["hosts"]) > 1

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the job. Called at the end of the program if you do not; a second call does nothing."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            self._requests.say_goodbye()
        finally:
            self._closed = True
            if self._session is not None:
                self._session.shutdown()
            # The memory goes with the last reference to it, which may be an array that the user still has.
            self._session = self._lock = self._shared = None
            self.shared_arrays = {}
            vars(self).pop("_reduction", None)
            if self._batches is not None:
                self._batches.close()
            self._requests.close()
            atexit.unregister(self.close)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- arguments -----------------------------------------------------------------------------------------

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Returns a parser for a worker's ports and timeout; add your own arguments to it."""
        return arguments.worker_parser()

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Returns the constructor's arguments among those that `default_parser` read."""
        return arguments.chosen(args, Worker.__init__)

    # -- within --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._process != os.getpid():
            raise PlatoonError(f"this worker belongs to process {self._process}, and this is a forked child of it")
        if self._closed:
            raise PlatoonError("this worker is closed")

    def _attach(self) -> Session:
        """Joins the memory of the job, when it is first needed: control alone works without."""
        self._check()
        with self._attaching:
            if self._session is None:
                from multiverso.runtime import Session

                # across hosts all workers begin together, and each when it first needs the others
                patience = self._seconds if self._info["hosts"] > 1 else None
                self._session = Session(self._info["node"], worker_id=self.global_rank, start_timeout_seconds=patience)
            return self._session

    def _job_lock(self) -> JobLock:
        session = self._attach()
        if self._lock is None:
            from multiverso.runtime import JobLock

            self._lock = JobLock(session, "platoon-lock")
        return self._lock

    def _shared_parameters(self) -> SharedParameters:
        self._check()
        if self._shared is None:
            raise PlatoonError("call init_shared_params() first")
        return self._shared


def _place(control_port: int | None) -> tuple[int, int | None]:
    """Returns the controller's port and, for a worker that the controller started, its rank."""
    given, rank = os.environ.get("PLATOON_CONTROL_PORT"), os.environ.get("PLATOON_LOCAL_RANK")
    if given is None or rank is None:
        return (DEFAULT_PORT if control_port is None else control_port), None
    if control_port not in (None, DEFAULT_PORT, int(given)):
        raise PlatoonError(
            f"this worker was started by a controller on port {given}, but is to use {control_port}; leave the port out"
        )
    return int(given), int(rank)
