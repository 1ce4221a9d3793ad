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
from dataclasses import dataclass, field
from typing import Any

from multiverso import layout as at
from multiverso.errors import MultiversoError, StartupError
from multiverso.memory import mutex, segment
from multiverso.runtime.control import Control
from multiverso.runtime.creation import Catalogue
from multiverso.runtime.status import status_of
from multiverso.wire import messages
from multiverso.wire.messages import Message

_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
_ELASTIC_CAPACITY = at.MAX_WORKERS
_WATCH_SECONDS = 1.0


@dataclass
class Connection:
    """One connected process: a worker once it has attached, an observer otherwise. Owner: the node's thread."""

    socket: socket.socket
    pid: int
    worker_id: int | None = None
    life: int | None = None
    sent_arenas: set[int] = field(default_factory=set)
    enrolled_in: int | None = None  # the table that its last request made it take part in

    def reply(self, request: Message, body: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Answers; a peer that is gone or does not read is somebody else's business."""
        with contextlib.suppress(OSError):
            messages.send(self.socket, {"re": request.get("id"), **body}, descriptors)

    def refuse(self, request: Message, error: MultiversoError) -> None:
        """Answers with an error that the session raises."""
        lost = list(getattr(error, "worker_ids", ()))
        self.reply(request, {"error": type(error).__name__, "message": str(error), "worker_ids": lost})


@dataclass
class Attached:
    """A worker that the node knows. Owner: the node's thread."""

    connection: Connection
    ready: bool = False


class Node:
    """A job's node, run by threads of this process.

    Args:
        workers: how many workers the job has; None for any number that come and go.
        on_lost: ``"stop"``: the others' waits raise WorkerLostError; ``"continue"``: they go on without it.
        name: the abstract socket name to listen on; a fresh one by default.
        listener: an already listening socket, instead of ``name``.
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
        linger: Callable[[], None] | None = None,
    ) -> None:
        if workers is not None and not 1 <= workers <= at.MAX_WORKERS:
            raise StartupError(f"a host runs 1 to {at.MAX_WORKERS} workers of a job; got {workers}")
        if on_lost not in ("stop", "continue"):
            raise StartupError(f"on_lost is 'stop' or 'continue'; got {on_lost!r}")
        self.workers_num = workers
        self.on_lost = on_lost
        if listener is None:
            name = name or f"multiverso-{os.getpid()}-{os.urandom(8).hex()}"
            listener = messages.listen(name)
        self.address = listener.getsockname()[1:].decode()
        self._listener = listener
        self._linger = linger
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._posted: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._emptied = threading.Condition()
        self._had_workers = False
        self._connections: dict[int, Connection] = {}
        self._attached: dict[int, Attached] = {}
        self._watchers: list[threading.Thread] = []
        self._lives = 0
        self._waiting_ready: list[tuple[Connection, Message]] = []
        self._waiting_attach: list[tuple[Connection, Message]] = []
        self._options: Message | None = None
        self._began = time.monotonic()
        self._begin()
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
        return status_of(self.address, self.workers_num, self._control, self._catalogue, self._began)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until at least one worker has come and all have gone; returns whether that is so."""
        with self._emptied:
            return self._emptied.wait_for(lambda: self._had_workers and not self._attached, timeout_seconds)

    def lost_workers(self) -> list[int]:
        """Returns the workers that died, or exited without ``shutdown()``, the first one first."""
        lost = {w.worker_id for w in self._control.workers() if w.fate == at.LOST}
        order = [i for i in self._lost_in_order if i in lost]
        return order + sorted(lost - set(order))

    def absent(self, worker_id: int) -> None:
        """Says that a worker's process has ended. If it never attached, the others need not wait for it."""
        self._posted.put(("absent", worker_id, 0))
        self._poke()

    def live_workers(self) -> list[int]:
        """Returns the workers that are attached now."""
        return sorted(self._attached)

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

    def _begin(self) -> None:
        """A new generation: fresh control segment, no tables."""
        capacity = self.workers_num or _ELASTIC_CAPACITY
        self._control_descriptor = segment.create("control", at.control_bytes(capacity))
        self._control = Control(segment.Segment(self._control_descriptor))
        self._control.initialise(capacity)
        self._control.continue_without_lost(self.on_lost == "continue")
        self._catalogue = Catalogue(self._control, self.workers_num is not None)
        self._lost_in_order: list[int] = []
        self._options = None

    def _serve(self, started: threading.Event) -> None:
        # This thread's end is the node's death: whoever waits finds the mutex's owner dead.
        mutex.lock(self._control.address + at.NODE_LIFE, 1.0)
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
        self._catalogue.arenas.close()
        os.close(self._control_descriptor)
        mutex.unlock(self._control.address + at.NODE_LIFE)
        self._control.notify()
        # whoever waits for the workers to go must not wait for ever after a failure of this thread
        self._attached.clear()
        with self._emptied:
            self._emptied.notify_all()
        if self._linger is not None:
            self._linger()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"x")

    def _accept(self, poll: select.epoll) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        pid, uid = messages.peer(accepted)
        if uid != os.getuid():
            accepted.close()
            return
        accepted.settimeout(5.0)  # a peer that does not read must not stop the node for ever
        self._connections[accepted.fileno()] = Connection(accepted, pid)
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
            "attach": self._attach,
            "ready": self._ready,
            "create": self._create,
            "initialised": self._initialised,
            "cancel": self._cancel,
            "status": self._status,
        }.get(str(request.get("do")))
        try:
            if handler is None:
                raise StartupError(f"this node does not know the request {request.get('do')!r}")
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
        self._waiting_attach = [w for w in self._waiting_attach if w[0] is not connection]
        self._waiting_ready = [w for w in self._waiting_ready if w[0] is not connection]
        if connection.worker_id is not None and connection.life is None:
            self._settle(connection.worker_id, at.LOST)

    # -- attaching -------------------------------------------------------------------------------------------

    def _attach(self, connection: Connection, request: Message) -> None:
        if request.get("protocol") != messages.PROTOCOL:
            raise StartupError(
                f"this worker speaks protocol {request.get('protocol')}, the job's node {messages.PROTOCOL}: "
                "use one version of multiverso in all workers"
            )
        options = {"consistency": request["consistency"], "on_lost": request.get("on_lost") or self.on_lost}
        wish, number = request.get("worker_id"), request.get("workers_num")
        if self.workers_num is not None and number not in (None, self.workers_num):
            raise StartupError(f"this worker expects {number} workers, but the job has {self.workers_num}")
        if wish is not None and not 0 <= wish < self._control.capacity:
            raise StartupError(f"worker_id {wish} is not in 0 .. {self._control.capacity - 1}")
        if not self._attached and self._had_workers and self.workers_num is not None:
            self._restart()
        worker_id = self._free_id(wish)
        if worker_id is None:
            if self.workers_num is not None and self._is_over(wish):
                # it has left, others have not: a new job of the same processes begins when all have
                self._waiting_attach.append((connection, request))
                return
            raise StartupError(
                f"the job's {self._control.capacity} places are taken"
                if wish is None
                else f"worker {wish} is already there: two processes have the same worker_id"
            )
        if self._options is None:
            self._options = options
            self._control.continue_without_lost(options["on_lost"] == "continue")
        elif options != self._options:
            raise StartupError(
                f"this worker asks for {_words(options)}, the others for {_words(self._options)}: "
                "call init with the same arguments everywhere"
            )
        self._admit(connection, request, worker_id)

    def _is_over(self, wish: int | None) -> bool:
        ids = range(self._control.capacity) if wish is None else [wish]
        # its own word counts before the watcher has noticed: `init` may follow `shutdown` at once
        return any(
            self._control.fate(i) in (at.GONE, at.LOST) or self._control.state(i) == at.LEFT for i in ids
        )

    def _free_id(self, wish: int | None) -> int | None:
        ids = range(self._control.capacity) if wish is None else [wish]
        for worker_id in ids:
            fate = self._control.fate(worker_id)
            if fate == at.FREE or (self.workers_num is None and self._released(worker_id, fate)):
                return worker_id
        return None

    def _released(self, worker_id: int, fate: int) -> bool:
        """A number is given out again only when its last owner's process has left it or really is gone, the node
        has done what its end asks for, and no round still needs what it staged."""
        if fate not in (at.GONE, at.LOST) or worker_id in self._attached or self._catalogue.needs(worker_id):
            return False
        if fate == at.GONE:
            return True
        try:
            os.kill(self._control.worker(worker_id).pid, 0)
        except ProcessLookupError:
            return True
        return False

    def _admit(self, connection: Connection, request: Message, worker_id: int) -> None:
        self._catalogue.forget(worker_id)
        self._control.admit(worker_id, connection.pid)
        connection.worker_id, connection.life = worker_id, None
        self._attached[worker_id] = Attached(connection)
        self._had_workers = True
        body = {"worker_id": worker_id, "workers_num": self.workers_num}
        connection.reply(request, body, (self._control_descriptor,))

    def _ready(self, connection: Connection, request: Message) -> None:
        """The worker holds its life mutex: from now on a thread waits for its end."""
        worker_id = connection.worker_id
        if worker_id is None or worker_id not in self._attached:
            raise StartupError("attach before ready")
        self._lives += 1
        connection.life = self._lives
        self._attached[worker_id].ready = True
        watcher = threading.Thread(
            target=self._watch,
            args=(self._control, worker_id, self._lives),
            name=f"multiverso-watch-{worker_id}",
            daemon=True,
        )
        self._watchers = [t for t in self._watchers if t.is_alive()] + [watcher]
        watcher.start()
        self._waiting_ready.append((connection, request))
        self._answer_ready()

    def _answer_ready(self) -> None:
        """Starting is collective: all are let go once all are there."""
        lost = self.lost_workers()
        if lost and not self._control.continues:
            for connection, request in self._waiting_ready:
                connection.refuse(request, self._catalogue.lost_error(lost, "while the job was starting"))
            self._waiting_ready.clear()
        missing = self.missing_at_start()
        if not missing:
            for connection, request in self._waiting_ready:
                connection.reply(request, {"ready": True})
            self._waiting_ready.clear()

    def missing_at_start(self) -> list[int]:
        """Returns the workers of a fixed-size job that have not come yet."""
        ready = {i for i, worker in self._attached.items() if worker.ready}
        gone = (at.GONE, at.LOST) if self._control.continues else (at.GONE,)
        return [
            i for i in range(self.workers_num or 0) if i not in ready and self._control.fate(i) not in gone
        ]

    def _watch(self, control: Control, worker_id: int, life: int) -> None:
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
            worker = self._attached.get(worker_id)
            if what == "absent":
                if self._control.fate(worker_id) == at.FREE:
                    self._control.settle(worker_id, at.LOST)
                    self._catalogue.dropped(worker_id)
                    self._answer_ready()
            elif worker is not None and worker.connection.life == life:
                self._settle(worker_id, at.GONE if what == "left" else at.LOST)

    def _settle(self, worker_id: int, fate: int) -> None:
        """A worker has left or is lost: tell everyone who waits for it."""
        worker = self._attached.pop(worker_id, None)
        if worker is None:
            return
        if fate == at.LOST:
            self._lost_in_order.append(worker_id)
        worker.connection.worker_id = worker.connection.life = None
        self._control.settle(worker_id, fate)
        self._catalogue.dropped(worker_id)
        self._answer_ready()
        if self._attached:
            return
        with self._emptied:
            self._emptied.notify_all()
        if self._waiting_attach:
            self._restart()
            waiting, self._waiting_attach = self._waiting_attach, []
            for connection, request in waiting:
                try:
                    self._attach(connection, request)
                except MultiversoError as error:
                    connection.refuse(request, error)
        elif self._linger is not None:
            self._linger()

    def _restart(self) -> None:
        """All workers have gone and come again (`init` after `shutdown`): nothing of the last job is left."""
        old = self._control
        self._catalogue.arenas.close()
        os.close(self._control_descriptor)
        self._begin()
        self._had_workers = False
        mutex.lock(self._control.address + at.NODE_LIFE, 1.0)
        mutex.unlock(old.address + at.NODE_LIFE)

    # -- tables ----------------------------------------------------------------------------------------------

    def _create(self, connection: Connection, request: Message) -> None:
        if connection.worker_id is None:
            raise StartupError("attach before creating tables")
        self._catalogue.create(connection, request, self._mode())

    def _mode(self) -> str:
        return str(self._options["consistency"]["mode"]) if self._options else "async"

    def _initialised(self, connection: Connection, request: Message) -> None:
        self._catalogue.initialised(connection, request)

    def _cancel(self, connection: Connection, request: Message) -> None:
        """The session gave up waiting for an answer."""
        self._waiting_ready = [w for w in self._waiting_ready if w[0] is not connection]
        self._waiting_attach = [w for w in self._waiting_attach if w[0] is not connection]
        self._catalogue.cancel(connection)

    def _status(self, connection: Connection, request: Message) -> None:
        connection.reply(request, {"status": self.status()})


def _after_fork_in_child() -> None:
    """A forked child that kept the sockets would let the job look alive after its node's death."""
    for node in list(_nodes):
        for kept in (node._listener, *(connection.socket for connection in node._connections.values())):
            kept.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _words(options: Message) -> str:
    consistency = options["consistency"]
    bound = f" (staleness={consistency['staleness']})" if consistency["mode"] == "bounded" else ""
    return f"{consistency['mode']}{bound} with on_lost={options['on_lost']!r}"
