"""The node: owns a job's memory on this host, gives out numbers and tables, and knows who is alive.

It is not on the data path. One thread serves every connection; one thread per worker sleeps in a timed lock on
that worker's life mutex, which the operating system releases within a millisecond of its death.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from multiverso import layout as at
from multiverso.errors import MultiversoError, StartupError
from multiverso.memory import mutex
from multiverso.runtime import trust
from multiverso.runtime.connection import Connection
from multiverso.runtime.control import Control
from multiverso.runtime.membership import Membership
from multiverso.runtime.status import status_of
from multiverso.spec import MemorySpec, TableSpec
from multiverso.wire import messages
from multiverso.wire.messages import Message

_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
_WATCH_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 128


class Node:
    """A job's node, run by threads of this process.

    Args:
        workers: how many workers the job has; None for any number that come and go.
        on_lost: ``"stop"``: the others' waits raise WorkerLostError; ``"continue"``: they go on without it.
        name: the abstract socket name to listen on; a fresh one by default.
        listener: an already listening socket, instead of ``name``.
        secret: what a worker has to know where users cannot be told apart; this user's own by default.
        linger: called when the last worker has gone, in the node's thread.

    Owner: the thread that made it calls ``close``; everything else belongs to the serving thread.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        on_lost: str = "stop",
        name: str | None = None,
        listener: socket.socket | None = None,
        secret: str | None = None,
        linger: Callable[[], None] | None = None,
    ) -> None:
        if workers is not None and not 1 <= workers <= at.MAX_WORKERS:
            raise StartupError(f"a host runs 1 to {at.MAX_WORKERS} workers of a job; got {workers}")
        if on_lost not in ("stop", "continue"):
            raise StartupError(f"on_lost is 'stop' or 'continue'; got {on_lost!r}")
        if listener is None:
            name = name or f"multiverso-{os.getpid()}-{os.urandom(8).hex()}"
            listener = messages.listen(name)
        self.address = listener.getsockname()[1:].decode()
        self._listener = listener
        self._listener.setblocking(False)
        self._secret = secret
        self._linger = linger
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._posted: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._emptied = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._watchers: list[threading.Thread] = []
        self._began = time.monotonic()
        self._members = Membership(workers, on_lost, self._watch)
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(started,), name="multiverso-node", daemon=True
        )
        self._thread.start()
        started.wait()
        _nodes.add(self)

    # -- for its owner ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Returns what ``multiverso top`` shows: workers, what they wait for, tables and their statistics."""
        members = self._members
        return status_of(
            self.address,
            members.workers_num,
            members.control,
            members.catalogue,
            members.memory_bytes,
            self._began,
        )

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until at least one worker has come and all have gone; returns whether that is so."""
        with self._emptied:
            members = self._members
            return self._emptied.wait_for(
                lambda: members.had_workers and not members.attached, timeout_seconds
            )

    @property
    def had_workers(self) -> bool:
        """Whether a worker has ever come."""
        return self._members.had_workers

    def lost_workers(self) -> list[int]:
        """Returns the workers that died, or exited without ``shutdown()``, the first one first."""
        return self._members.lost()

    def absent(self, worker_id: int) -> None:
        """Says that a worker's process has ended. If it never attached, the others need not wait for it."""
        self._posted.put(("absent", worker_id, 0))
        self._poke()

    def live_workers(self) -> list[int]:
        """Returns the workers that are attached now."""
        return sorted(self._members.attached)

    def close(self) -> None:
        """Ends the node. Workers that are still attached get NodeLostError from their waits."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for watcher in self._watchers:
                watcher.join()
            for descriptor in (self._wake_read, self._wake_write):
                os.close(descriptor)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the serving thread ----------------------------------------------------------------------------------

    def _serve(self, started: threading.Event) -> None:
        self._members.hold()
        started.set()
        poll = select.epoll()
        try:
            poll.register(self._listener.fileno(), select.EPOLLIN)
            poll.register(self._wake_read, select.EPOLLIN)
            while not self._closing.is_set():
                for descriptor, _ in poll.poll():
                    if descriptor == self._listener.fileno():
                        self._accept(poll)
                    elif descriptor == self._wake_read:
                        self._take_posted(poll)
                    elif descriptor in self._connections:  # one batch may hold two events of a closed one
                        self._read(poll, self._connections[descriptor])
        except Exception:
            traceback.print_exc(file=sys.stderr)
            print("multiverso: the node failed; waits of its workers raise NodeLostError", file=sys.stderr)
        finally:
            poll.close()
            self._end()

    def _end(self) -> None:
        self._closing.set()
        self._listener.close()
        for connection in self._connections.values():
            connection.socket.close()
        self._members.end()
        # whoever waits for the workers to go must not wait for ever after a failure of this thread
        with self._emptied:
            self._emptied.notify_all()
        if self._linger is not None:
            self._linger()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _accept(self, poll: select.epoll) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            if not trust.is_same_user(accepted):
                accepted.close()
                continue
            accepted.settimeout(5.0)  # a peer that does not read must not stop the node for ever
            pid, _ = messages.peer(accepted)
            connection = Connection(accepted, pid, proven=not trust.proof_needed())
            self._connections[accepted.fileno()] = connection
            poll.register(accepted.fileno(), select.EPOLLIN)

    def _read(self, poll: select.epoll, connection: Connection) -> None:
        try:
            received = messages.receive(connection.socket)
        except (OSError, ValueError):
            received = None
        if received is None:
            self._disconnect(poll, connection)
            return
        request, descriptors = received
        for descriptor in descriptors:
            os.close(descriptor)
        handler = {
            "challenge": self._challenge,
            "prove": self._prove,
            "attach": self._members.attach,
            "ready": self._members.ready,
            "create": self._create,
            "share": self._share,
            "initialised": self._initialised,
            "close": self._close_table,
            "cancel": self._cancel,
            "status": self._status,
        }.get(str(request.get("do")))
        try:
            if handler is None:
                raise StartupError(f"this node does not know the request {request.get('do')!r}")
            if not connection.proven and handler not in (self._challenge, self._prove):
                raise StartupError(
                    "this node cannot tell users apart, and this process has not proven that it knows the job's secret"
                )
            handler(connection, request)
        except MultiversoError as error:
            connection.refuse(request, error)
        except (KeyError, TypeError, ValueError) as error:
            # one worker's broken message must not end everybody's job
            connection.refuse(
                request, StartupError(f"the node cannot read this request ({error!r}): {request}")
            )

    def _disconnect(self, poll: select.epoll, connection: Connection) -> None:
        """The socket's end. It says nothing about a worker that holds its life mutex: that has a watcher."""
        poll.unregister(connection.socket.fileno())
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        self._members.forget(connection)
        if connection.worker_id is not None and connection.life is None:
            self._settle(connection.worker_id, at.LOST)

    # -- watching workers ------------------------------------------------------------------------------------

    def _watch(self, control: Control, worker_id: int, life: int) -> None:
        watcher = threading.Thread(
            target=self._await_end,
            args=(control, worker_id, life),
            name=f"multiverso-watch-{worker_id}",
            daemon=True,
        )
        self._watchers = [t for t in self._watchers if t.is_alive()] + [watcher]
        watcher.start()

    def _await_end(self, control: Control, worker_id: int, life: int) -> None:
        """Sleeps until a worker's life mutex is released, or its owner is dead."""
        address = control.block(worker_id) + at.LIFE
        code = mutex.TIMED_OUT
        while code == mutex.TIMED_OUT and not self._closing.is_set():
            code = mutex.lock(address, _WATCH_SECONDS)
        if code == mutex.TIMED_OUT:
            return
        if code == mutex.OWNER_DEAD:
            mutex.recover(address)
        if code in (0, mutex.OWNER_DEAD):
            left = control.state(worker_id) == at.LEFT
            mutex.unlock(address)
        else:
            left = False
        # the word is set here and now: waiters must not depend on what else the node has to do
        control.settle(worker_id, at.GONE if left else at.LOST)
        self._posted.put(("left" if left else "lost", worker_id, life))
        self._poke()

    def _take_posted(self, poll: select.epoll) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                what, worker_id, life = self._posted.get_nowait()
            except queue.Empty:
                return
            worker = self._members.attached.get(worker_id)
            if what == "absent":
                self._members.absent(worker_id)
            elif worker is not None and worker.connection.life == life:
                self._settle(worker_id, at.GONE if what == "left" else at.LOST)

    def _settle(self, worker_id: int, fate: int) -> None:
        self._members.settle(worker_id, fate)
        if not self._members.attached:
            with self._emptied:
                self._emptied.notify_all()
            if self._linger is not None:
                self._linger()

    # -- other requests --------------------------------------------------------------------------------------

    def _create(self, connection: Connection, request: Message) -> None:
        spec = TableSpec.from_message(request["spec"])
        key = ("name", spec.name) if spec.name is not None else ("order", int(request["order"]))
        self._members.creations.ask(connection, request, key, spec, self._members.mode)

    def _share(self, connection: Connection, request: Message) -> None:
        spec = MemorySpec.from_message(request["spec"])
        self._members.creations.ask(connection, request, ("memory", spec.name), spec, "")

    def _initialised(self, connection: Connection, request: Message) -> None:
        self._members.creations.initialised(connection.attached_id)

    def _close_table(self, connection: Connection, request: Message) -> None:
        self._members.catalogue.close(int(request["number"]), connection.attached_id)

    def _challenge(self, connection: Connection, request: Message) -> None:
        """A worker that cannot tell users apart asks whether this is its node."""
        connection.nonces = (str(request["nonce"]), trust.new_secret())
        connection.reply(request, {"nonce": connection.nonces[1], "proof": self._proof(connection, "node")})

    def _prove(self, connection: Connection, request: Message) -> None:
        if not trust.is_proof(request.get("proof"), self._proof(connection, "worker")):
            raise StartupError("this process does not know the job's secret")
        connection.proven = True
        connection.reply(request, {"proven": True})

    def _proof(self, connection: Connection, role: str) -> str:
        if connection.nonces is None:
            raise StartupError("ask for a challenge before proving")
        pids = (connection.pid, messages.peer(self._listener)[0])  # of a listener it is who called listen()
        secret = self._secret or trust.user_secret()
        return trust.proof(secret, role, self.address, connection.nonces, pids)

    def _cancel(self, connection: Connection, request: Message) -> None:
        """The session gave up waiting for an answer."""
        self._members.forget(connection)
        if connection.worker_id is not None:
            self._members.creations.cancel(connection, request.get("why"))

    def _status(self, connection: Connection, request: Message) -> None:
        connection.reply(request, {"status": self.status()})


def _after_fork_in_child() -> None:
    """A forked child that kept the sockets would let the job look alive after its node's death."""
    for node in list(_nodes):
        for kept in (node._listener, *(connection.socket for connection in node._connections.values())):
            kept.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
