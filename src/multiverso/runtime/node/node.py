"""The node: owns a job's memory on this host, gives out numbers and tables, and knows who is alive.

It is not on the data path. One thread serves every connection; one thread per worker sleeps in a timed lock on
that worker's life lock, which the operating system releases within a millisecond of its death.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from multiverso.errors import StartupError
from multiverso.in_process import Closing, InProcess, close_in_children
from multiverso.layout import words as at
from multiverso.node_log import log
from multiverso.runtime.node.connection import Connection
from multiverso.runtime.node.deaths import Deaths, Ended
from multiverso.runtime.node.entrance import Entrance
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.one_host import Hosts
from multiverso.runtime.node.requests import Requests
from multiverso.wake import Wake
from multiverso.wire import messages


class Mailbox:
    """The tasks of the node's thread. Any thread posts. Owner: the node's maker opens and closes it."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake: Wake | None = None

    def open(self) -> None:
        """Makes the socket. What is posted before is not lost."""
        self._wake = Wake()

    def close(self) -> None:
        """Closes it; later posts are dropped."""
        if self._wake is not None:
            self._wake.close()

    def fileno(self) -> int:
        """The descriptor that is readable while something was posted."""
        assert self._wake is not None
        return self._wake.fileno()

    def post(self, what: Any) -> None:
        """Posts what has `Ended`, an order of the coordinator's, or something to call."""
        self._posted.put(what)
        if self._wake is not None:
            self._wake.set()

    def taken(self) -> Iterator[Any]:
        """Yields what there is, each once."""
        assert self._wake is not None
        self._wake.clear()
        while not self._posted.empty():
            yield self._posted.get()


class Node(Closing, InProcess):
    """A job's node, run by threads of this process.

    Args:
        workers: how many workers the job has; None for any number that come and go.
        on_lost: ``"stop"``: the others' waits raise WorkerLostError; ``"continue"``: they continue without it.
        name: the abstract socket name to listen on; a fresh one by default.
        listener: an already listening socket, instead of ``name``.
        secret: what a worker has to know where users cannot be told apart; this user's own by default.
        other_hosts: of a job on several hosts (`several_hosts.other_hosts`); the node closes it.
        replaces: whether, where the others continue, a new process may take the place of a worker that died: it has the
            same number, and finds the tables as they are.

    Raises:
        StartupError: an invalid number of workers or ``on_lost``; the name is taken, another host cannot be
            reached, or there is no memory or descriptor for it.

    Owner: the thread that made it calls ``close``; everything else belongs to the serving thread.
    """

    _over = True  # nothing has begun
    _poll: select.epoll  # of the serving thread
    _members: Membership  # once there is memory

    def __init__(
        self,
        workers: int | None = None,
        *,
        on_lost: str = "stop",
        name: str | None = None,
        listener: socket.socket | None = None,
        secret: str | None = None,
        other_hosts: Hosts | None = None,
        replaces: bool = False,
    ) -> None:
        if workers is not None and other_hosts is None and not 1 <= workers <= at.MAX_WORKERS:
            raise StartupError(f"a job has 1 to {at.MAX_WORKERS} workers on a host; got {workers}")
        if on_lost not in ("stop", "continue"):
            raise StartupError(f"on_lost is 'stop' or 'continue'; got {on_lost!r}")
        self._started, self._closing = threading.Event(), threading.Event()
        self._emptied = threading.Condition()
        self._mailbox = Mailbox()
        self._entrance = Entrance(listener, secret)
        self._deaths = Deaths(self._mailbox.post, self._closing.is_set)
        self._connections: dict[int, Connection] = {}
        self.hosts = other_hosts or Hosts()
        self.hosts.replaces = replaces
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="multiverso-node", daemon=True)
        self._over = False
        try:
            # what an exception finds here, wherever it arrives, is ended by `close`
            self._entrance.open(name)
            self.address = self._entrance.address
            self._mailbox.open()
            self._poll = select.epoll()
            self._deaths.open(self._poll)
            self.hosts.meet(self._mailbox.post, self.address)
            self._members = Membership(workers, on_lost, self._deaths, self.hosts)
            self._requests = Requests(self._entrance, self._members, time.monotonic(), self.hosts)
            self._thread.start()
            self._started.wait()
            if self._failed is not None:
                raise StartupError(f"the job's node could not begin: {self._failed}") from self._failed
        except BaseException:
            self.close()
            raise
        close_in_children(self, Node._close_copies)

    # -- for its owner ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Returns what ``multiverso top`` shows: workers, what they wait for, tables and their statistics."""
        return self._requests.status()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until at least one worker has come and all have gone; returns whether that is so."""
        with self._emptied:
            members = self._members
            return self._emptied.wait_for(lambda: members.had_workers and not members.attached, timeout_seconds)

    def stay(self, stopped: Callable[[], bool] | None = None) -> bool:
        """Waits until no host of the job needs this one's copies.

        Args:
            stopped: asked twice a second: whether to wait no longer. By default, whether other hosts have never come.

        Returns:
            False when it has stopped, or the node has ended, before that.
        """
        return self.hosts.stay(self._closing, stopped)

    @property
    def had_workers(self) -> bool:
        """Whether a worker has ever come."""
        return self._members.had_workers

    @property
    def has_ended(self) -> bool:
        """Whether it has stopped serving: it was closed, or the host that leads the job is gone."""
        return self._closing.is_set()

    def lost_workers(self) -> list[int]:
        """Returns the workers that died, or exited without ``shutdown()``, the first one first."""
        return self._members.control.lost()

    def may_be_replaced(self, worker_id: int) -> bool:
        """Whether there is something left to do for a new process in the place of a worker whose process has failed.

        Not where the node has ended, nor where the worker had called ``shutdown``: its part was done, and a new process
        would begin a job of its own when the others have left. Nor where they have begun another one since, or do not
        continue without it: they have called ``init(on_lost="stop")``.
        """
        left = self._members.control.participation(worker_id) == at.LEFT
        over = self.has_ended or left or self._members.has_missed(worker_id)
        return not over and self._members.control.continues

    def absent(self, worker_id: int) -> None:
        """Notes that a worker's process has ended and none replaces it: the others need not wait for it any more."""

        def note() -> None:
            self._members.absent(worker_id)
            self.hosts.look()

        self._mailbox.post(note)

    def live_workers(self) -> list[int]:
        """Returns the workers that are attached now."""
        return sorted(self._members.attached)

    def close(self) -> None:
        """Ends the node. Workers that are still attached get NodeLostError from their waits."""
        if self._over:
            return
        self._closing.set()
        self._mailbox.post(lambda: None)
        if threading.current_thread() is self._thread:
            return
        if self._thread.ident is None:  # an exception came before it began
            self._end()
        else:
            self._thread.join()
        self.hosts.close()  # after the thread that obeys messages of other hosts
        self._deaths.join()
        self._mailbox.close()
        self._over = True

    # -- the serving thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._failed = error
            traceback.print_exc(file=sys.stderr)
            log("it failed; waits of its workers raise NodeLostError")
        finally:
            self._end()
            self._started.set()

    def _loop(self) -> None:
        self._members.memory.hold()
        poll = self._poll
        entrance, mailbox = self._entrance.listener.fileno(), self._mailbox.fileno()
        for descriptor in (entrance, mailbox):
            poll.register(descriptor, select.EPOLLIN)
        self._started.set()
        while not self._closing.is_set():
            for descriptor, _ in poll.poll():
                if descriptor == entrance:
                    for connection in self._entrance.accept(poll):
                        self._connections[connection.socket.fileno()] = connection
                elif descriptor == mailbox:
                    self._take_posted()
                elif descriptor in self._connections:  # one batch may hold two events of a closed one
                    self._read(self._connections[descriptor])
                elif ended := self._deaths.ended_process(descriptor):
                    self._members.process_ended(*ended)
                    self.hosts.look()
                    self._notice_end()

    def _end(self) -> None:
        self._closing.set()
        self._close_copies()
        if hasattr(self, "_poll"):
            self._poll.close()
        if hasattr(self, "_members"):
            self._members.end()
        # those that wait for the workers to go must not wait forever after a failure of this thread
        with self._emptied:
            self._emptied.notify_all()

    def _close_copies(self) -> None:
        """Closes what a forked child has copies of."""
        self._entrance.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._deaths.close()

    def _read(self, connection: Connection) -> None:
        """Serves one message. Whatever goes wrong concerns this connection only."""
        try:
            received = messages.receive(connection.socket)
            if received is not None:
                request, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                self._requests.answer(connection, request)
                return
        except BlockingIOError:
            return
        except OSError as error:
            log(f"the connection of process {connection.pid} was closed: {error}")
        except ValueError as error:
            log(f"the connection of process {connection.pid} was closed, as it did not send a message: {error}")
        except Exception:
            traceback.print_exc(file=sys.stderr)
            log(f"the connection of process {connection.pid} was closed after the error above")
        self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        """The socket's end. It says nothing about a worker that holds its life lock: that has a watcher."""
        self._poll.unregister(connection.socket.fileno())
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        self._members.forget(connection)
        if connection.worker_id is not None and connection.life is None:
            left = self._members.control.participation(connection.worker_id) == at.LEFT
            self._settle(connection.worker_id, at.GONE if left else at.LOST)

    # -- what other threads have found out -------------------------------------------------------------------

    def _take_posted(self) -> None:
        for what in self._mailbox.taken():
            if isinstance(what, Ended):
                worker = self._members.attached.get(what.worker_id)
                if worker is not None and worker.life == what.life:
                    self._settle(what.worker_id, what.how)
            elif callable(what):
                what()
            else:
                self.hosts.obey(what, self._members, self._closing.set)

    def _hear_out(self, connection: Connection) -> None:
        """Serves what a worker said before its end, which its life lock may report before its messages are read."""
        descriptor = connection.socket.fileno()
        while self._connections.get(descriptor) is connection and messages.waiting(connection.socket):
            self._read(connection)

    def _settle(self, worker_id: int, liveness: int) -> None:
        worker = self._members.attached.get(worker_id)
        if self.hosts.several and worker is not None:
            self._hear_out(worker)
        self._members.settle(worker_id, liveness)
        self.hosts.look()
        self._notice_end()

    def _notice_end(self) -> None:
        """A worker has gone: wakes those that wait for the last one to go."""
        if not self._members.attached:
            with self._emptied:
                self._emptied.notify_all()
