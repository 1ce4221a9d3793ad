"""The controller: answers requests, deals minibatches, starts workers and notices their deaths."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from multiverso.wake import Wake
from platoon.channel import arguments
from platoon.channel.answering import Answering, Query
from platoon.channel.arguments import DEFAULT_PORT
from platoon.channel.data import BatchServer, Senders
from platoon.channel.members import Members
from platoon.channel.wire import RESERVED
from platoon.devices import find_devices
from platoon.processes import stopped_by_sigterm
from platoon.reporting import Reporter
from platoon.util import PlatoonError, readable

if TYPE_CHECKING:
    from multiverso.runtime import Node
    from platoon.channel.hosts import Hosts

_SEND_MB_SECONDS = 1800.0
_CLOSE_SECONDS = 10.0
_IDLE_SECONDS = 0.5  # a signal that comes just before the wait does not interrupt it; its handler runs after it


class Controller:
    """Coordinates the workers of one host. Made to be subclassed: override `handle_control`.

    It owns the memory of the shared parameters (it hosts their node), so it lives as long as they are needed.

    Args:
        control_port: where requests arrive; None means 5567, or a free one when it starts its own workers.
        data_port: where minibatches are sent from, 0 for a free one; None if there are none.
        data_hwm: how many minibatches may be on their way to one worker.
        devices: names such as ``cpu`` or ``cuda0``, one worker for each, in rank order. An empty list means the
            configured ones or all GPUs. None, without an experiment: workers may connect at any time.
        experiment_name: starts ``NAME_worker.py`` of the working directory on each device.
        log_directory: where the workers' output goes.
        worker_args: what to append to the workers' command line, as one string.
        multi: one of several controllers, one on each host, started by ``platoon-launcher -H`` or MPI.

    Raises:
        PlatoonError: no device was found, a port is taken, or there is no MPI for ``multi``.
    """

    def __init__(
        self,
        control_port: int | None = None,
        data_port: int | None = None,
        data_hwm: int = 10,
        devices: Sequence[str] | None = None,
        experiment_name: str = "",
        log_directory: str = "",
        worker_args: str | None = "",
        multi: bool = False,
    ) -> None:
        self.control_port = control_port
        self.data_hwm = data_hwm
        # two underscores: subclasses have attributes of their own; the names with one are those of the original
        self.__opened = ExitStack()
        self.__reporter = self.__opened.enter_context(closing(Reporter(os.environ.get("PLATOON_STATUS_FD"))))
        self.__members = Members(self.__reporter)
        self.__senders = self.__opened.enter_context(closing(Senders()))
        self.__batches: BatchServer | None = None
        self.__requests: Answering | None = None
        self.__node: Node | None = None
        self.__hosts: Hosts | None = None
        self.__wake = self.__opened.enter_context(closing(Wake()))
        self.__process = os.getpid()
        self.__closed = False
        self.__serving = False
        self.__closes_at: float | None = None  # when it closes, though workers are still there
        self.__failed = False
        self.__stopped: str | None = None
        self._job_uid = uuid.uuid4().hex
        self._devices: list[str] = []
        self.__experiment = ""
        launched = os.environ.pop("PLATOON_LAUNCHED", None)
        # what the launcher said on the command line, for a program that did not read it; once
        self.__launched: dict[str, Any] = json.loads(launched) if launched else {}
        try:
            if devices is not None or experiment_name:
                self._devices = self.get_workers_devices(devices)
            if self.__launched.pop("multi", False) or multi:
                from platoon.channel.hosts import Hosts

                self.__hosts = Hosts(len(self._devices or self.__launched.get("devices", ())))
            if data_port is not None:
                self.init_data(data_port, data_hwm)
            if experiment_name:
                self.__start_workers(experiment_name, log_directory, worker_args)
        except BaseException:
            self.close()
            raise

    # -- to be overridden ----------------------------------------------------------------------------------

    def handle_control(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Answers a worker's request; override it.

        Args:
            req: the request, any JSON value; those that begin with ``platoon-`` never arrive here.
            worker_id: the process id of the worker.
            req_info: what it sent with the request.

        Returns:
            the answer, any JSON value; NumPy's numbers and arrays too.
        """
        default = (
            " (the launcher takes this one where there is no NAME_controller.py)" if type(self) is Controller else ""
        )
        raise NotImplementedError(
            f"{type(self).__name__} does not know the request {req!r}; "
            f"override handle_control(req, worker_id, req_info){default}"
        )

    # -- control -------------------------------------------------------------------------------------------

    def init_control(self, port: int) -> None:
        """Sets the port for requests, as programs written for older versions do; 0 for a free one.

        A controller that has started its workers keeps the port that they know.

        Raises:
            PlatoonError: requests are served on another port already, the port is taken, or it is closed.
        """
        if self.__experiment:
            return
        if self.__requests is not None and port != self.control_port:
            raise PlatoonError(f"requests are already served on port {self.control_port}")
        self.__open(port)

    def serve(self) -> int:
        """Answers requests until the workers are gone, and closes the controller.

        Started workers: until all have ended, or one has failed; then the others are ended too. Workers started by
        hand: until at least one has connected and all have ended. Uses next to no processor time while idle.

        Returns:
            0, or 1 if a worker failed (before `close` was called), or a request raised an error, or SIGTERM or
            Ctrl-C came.
        """
        if self.__launched and not self.__experiment:
            # It was made without its arguments, as in a program from the time when the launcher started workers.
            self._devices = self.get_workers_devices(self.__launched.pop("devices"))
            self.__start_workers(**self.__launched)
        self.__open(DEFAULT_PORT if self.control_port is None else self.control_port)
        self.__failed = self.__serving = True
        try:
            with stopped_by_sigterm(self.stop):
                self.__failed = not self.__serve()
        except KeyboardInterrupt:
            self.__reporter.say("interrupted", "interrupted: ending the workers")
        except PlatoonError as error:
            self.__reporter.say("failed", f"the controller failed: {error}")
        finally:
            self.__serving = False
            self.close()
        return int(self.__failed)

    def stop(self, why: str = "stopped") -> None:
        """Makes `serve` end the workers and return 1. Any thread or signal handler may call it."""
        self.__stopped = why
        self.wake()

    def worker_is_done(self, worker_id: int) -> None:
        """Marks a worker that was started by hand as done: `serve` need not wait for its end.

        Calling it is optional: the controller notices a worker's end.
        """
        member = self.__members.by_pid(worker_id)
        if member is not None:
            member.done = True

    def wake(self) -> None:
        """Wakes the serving thread."""
        self.__wake.set()

    @property
    def csocket(self) -> socket.socket:
        """The socket where workers come in with their requests, once the port is open; `serve` reads it.

        Raises:
            AttributeError: it is not.
        """
        if self.__requests is None:
            raise AttributeError("csocket: no port for requests is open; call init_control()")
        return self.__requests.door.entrance.listener

    @property
    def asocket(self) -> BatchServer:
        """The channel of the minibatches, once it is open; its ``close()`` says that there are no more.

        Raises:
            AttributeError: it is not.
        """
        if self.__batches is None:
            raise AttributeError("asocket: no channel for minibatches is open; call init_data()")
        return self.__batches

    # -- minibatches ---------------------------------------------------------------------------------------

    def init_data(self, port: int = 0, data_hwm: int = 10) -> None:
        """Opens the channel for minibatches.

        Args:
            port: where to listen; 0 for a free one, which workers ask for by `Worker.init_mb_sock()`.
            data_hwm: how many minibatches may be on their way to one worker.

        Raises:
            PlatoonError: there is one already, or the port is taken.
        """
        if self.__batches is not None and self.__process == os.getpid():
            raise PlatoonError(f"minibatches are already sent from port {self.__batches.port}")
        self.data_hwm = data_hwm
        self.__batches = BatchServer(port, self.__senders, self.__reporter.refuse)

    def send_mb(self, arrays: Sequence[Any] | npt.NDArray[Any], copy: bool = True) -> None:
        """Sends a minibatch to the next worker that has room, and waits for one (half an hour at most).

        A thread can send while `serve` answers requests in another; neither starves the other.

        Args:
            arrays: a list of arrays, any shape, order and number dtype; or one array, whose rows are sent as
                such a list.
            copy: accepted for older programs; the arrays are always copied once.

        Raises:
            PlatoonError: no worker had room in time, all have ended, the controller is closed, or an array cannot be
                sent.
        """
        self.__data().send(arrays, _SEND_MB_SECONDS, self.__all_ended)

    def end_mb(self) -> None:
        """Ends the minibatches: every `Worker.recv_mb` returns an empty list from now on."""
        self.__data().end()
        self.wake()

    # -- arguments -----------------------------------------------------------------------------------------

    @staticmethod
    def get_workers_devices(devices: Sequence[str] | None) -> list[str]:
        """Returns the devices given, else the configured ones, else all GPUs of this host.

        Raises:
            PlatoonError: there are none.
        """
        return find_devices(devices)

    @staticmethod
    def default_parser() -> argparse.ArgumentParser:
        """Returns a parser for what the launcher hands to a controller; add your own arguments to it."""
        return arguments.controller_parser()

    @staticmethod
    def default_arguments(args: argparse.Namespace) -> dict[str, Any]:
        """Returns the constructor's arguments among those that `default_parser` read."""
        return arguments.chosen(args, Controller.__init__)

    # -- within --------------------------------------------------------------------------------------------

    def __start_workers(self, experiment_name: str, log_directory: str, worker_args: str | None) -> None:
        self.__experiment = experiment_name
        self.__open(self.control_port or 0)
        variables = {"PLATOON_CONTROL_PORT": str(self.control_port), "PLATOON_DATA_HWM": str(self.data_hwm)}
        if self.__batches is not None:
            variables["PLATOON_DATA_PORT"] = str(self.__batches.port)
        first_rank = self.__hosts.ranks_before if self.__hosts else 0
        arguments = shlex.split(worker_args or "")
        self.__members.start_all(self._devices, experiment_name, arguments, log_directory, variables, first_rank)

    @property
    def _workers(self) -> set[int]:
        return {member.pid for member in self.__members.by_rank.values()}

    def __data(self) -> BatchServer:
        if self.__batches is None:
            raise PlatoonError("call init_data() before minibatches are sent")
        return self.__batches

    def __all_ended(self) -> bool:
        # a forked process does not know who has come since
        return self.__process == os.getpid() and self.__members.all_ended

    def __open(self, port: int) -> None:
        if self.__closed:
            raise PlatoonError("this controller is closed: make a new one")
        if self.__requests is not None:
            return
        from multiverso.runtime import Node

        try:
            self.__requests = Answering(port, self.__reporter, self.__answer)
            self.__opened.enter_context(closing(self.__requests.door))
            self.control_port = self.__requests.port
            # A worker's death is no reason for the others to stop: in elastic training they do not need it.
            across = self.__hosts is not None and self.__hosts.size > 1
            node = self.__hosts.node() if across else Node(workers=None, on_lost="continue")  # type: ignore[union-attr]
            self.__node = self.__opened.enter_context(node)
        except BaseException:
            self.close()
            raise

    def __serve(self) -> bool:
        requests = self.__requests
        assert requests is not None
        while not self.__members.all_gone or readable([requests.door], 0):
            ready = readable(self.__watched(), _IDLE_SECONDS)
            self.__wake.clear()
            if self.__stopped is not None:
                self.__reporter.say("stopped", f"{self.__stopped}: ending the workers")
                return False
            if self.__closes_at is not None and time.monotonic() >= self.__closes_at:
                self.__members.end()
                break
            gone = [member for watch, member in self.__members.watched.items() if watch in ready]
            ended = self.__members.job is not None and self.__members.job in ready
            if requests.door in ready and not requests.answer(all_of_them=bool(gone) or ended):
                return False
            if self.__batches is not None and self.__batches in ready:
                self.__batches.look()
            for member in gone:
                self.__members.note_gone(member)
                if self.__batches is not None:
                    self.__batches.look(member.pid)
            if ended and not self.__members.note_ends(failures=self.__closes_at is None):
                return False
        assert self.__node is not None
        # this host's workers are done; those of others may need what it has until they are, too
        if self.__hosts is not None and not self.__hosts.stay(self.__node, lambda: self.__stopped is not None):
            self.__reporter.say("failed", "another host's part of the job failed, or this one was stopped")
            return False
        self.__reporter.event("finished")
        return True

    def __watched(self) -> list[Any]:
        assert self.__requests is not None
        sources = [self.__requests.door, self.__wake, *self.__members.watched]
        if self.__members.job is not None:
            sources.append(self.__members.job)
        if self.__batches is not None and self.__batches.ended and not self.__batches.closed:
            sources.append(self.__batches)
        return sources

    def __answer(self, query: Query) -> Any:
        if query.reserved:
            return self.__answer_reserved(query)
        self.__reporter.count_request()
        return self.handle_control(query.req, query.worker_id, query.info)

    def __answer_reserved(self, query: Query) -> Any:
        req, worker_id = query.req, query.worker_id
        if req == "platoon-hello":
            most = len(self._devices) or None
            member = self.__members.admit(worker_id, query.field("local_rank", int, type(None)), most)
            self.__reporter.event("came", rank=member.rank, pid=member.pid)
            assert self.__node is not None
            return {
                "job_uid": self._job_uid,
                "node": self.__node.address,
                "local_rank": member.rank,
                "local_size": most,
                "global_rank": member.rank + (self.__hosts.ranks_before if self.__hosts else 0),
                "global_size": self.__hosts.global_size if self.__hosts else most,
                "hosts": self.__hosts.size if self.__hosts else 1,
            }
        if req == "platoon-get_job_uid":
            return self._job_uid
        if req == "platoon-data":
            if self.__batches is None:
                raise PlatoonError(
                    "the controller sends no minibatches here: data_port= or init_data() opens a channel"
                )
            return {"port": self.__batches.port, "data_hwm": self.data_hwm}
        if req == "platoon-sender":
            return self.__senders.ended(query.field("port", int) % 65536)
        if req == "platoon-size":
            return sum(member.present and not member.done for member in self.__members.by_rank.values())
        if req == "platoon-bye":
            self.worker_is_done(worker_id)
            return None
        raise PlatoonError(f"there is no request {req!r}; names that begin with {RESERVED!r} are reserved")

    def close(self) -> None:
        """Ends the workers that it started, and frees everything. `serve` does it at its end.

        While `serve` runs, as in `handle_control` at early stopping, this ends it: requests are still answered for 10
        s, in which workers that end have not failed; those that are then left are ended, and `serve` returns 0.
        """
        if self.__closed or os.getpid() != self.__process:
            return
        if self.__serving:
            if self.__closes_at is None:
                self.__closes_at = time.monotonic() + _CLOSE_SECONDS
            self.wake()
            return
        self.__closed = True
        with self.__opened:
            # before the connections, whose end says less to a worker that waits: the last one comes first
            if self.__hosts is not None:
                self.__opened.callback(self.__hosts.close, self.__failed)
            if self.__batches is not None:
                self.__opened.callback(self.__batches.close, no_more=False)
            self.__members.end()
        self.__node = None  # its memory goes with the last reference

    def _close(self) -> None:
        """The same as `close`, by its older name."""
        self.close()


def spawn_controller(arguments: Sequence[str] | None = None) -> int:
    """Runs a controller without requests of its own, as `platoon-launcher` does by default."""
    args = Controller.default_parser().parse_args(arguments)
    try:
        return Controller(**Controller.default_arguments(args)).serve()
    except PlatoonError as error:
        print(f"platoon: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"platoon: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(spawn_controller())
