"""The node: owns a job's memory on this host, gives out numbers and tables, and knows who is alive.

It is not on the data path. One thread serves every connection; one thread per worker sleeps in a timed lock on
that worker's life mutex, which the operating system releases within a millisecond of its death.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from io import FileIO
from typing import Any, overload

from multiverso import layout as at
from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.roster import Roster
from multiverso.hosts.transport import Listener
from multiverso.node_log import log
from multiverso.runtime import trust
from multiverso.runtime.abroad import Abroad, Carrier
from multiverso.runtime.connection import Connection
from multiverso.runtime.control import Control
from multiverso.runtime.deaths import await_end
from multiverso.runtime.host_creation import HostCreations
from multiverso.runtime.membership import Membership
from multiverso.runtime.outside_readers import look
from multiverso.runtime.questions import Questions
from multiverso.runtime.status import status_of
from multiverso.spec import MemorySpec, TableSpec
from multiverso.wire import messages
from multiverso.wire.messages import Message
from multiverso.wire.requests import asked, check

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
        abroad: of a job on several hosts: which they are, what moves values between them, and, on the first, where
            it listens for the others.
        replaces: whether, where the others go on, a new process may take the place of a worker that died: it has the
            same number, and finds the tables as they are.

    Owner: the thread that made it calls ``close``; everything else belongs to the serving thread.
    """

    _over = True  # nothing has begun

    def __init__(
        self,
        workers: int | None = None,
        *,
        on_lost: str = "stop",
        name: str | None = None,
        listener: socket.socket | None = None,
        secret: str | None = None,
        linger: Callable[[], None] | None = None,
        abroad: tuple[Roster, Carrier, Listener | None] | None = None,
        replaces: bool = False,
    ) -> None:
        if workers is not None and not 1 <= workers <= at.MAX_WORKERS:
            raise StartupError(f"a host runs 1 to {at.MAX_WORKERS} workers of a job; got {workers}")
        if on_lost not in ("stop", "continue"):
            raise StartupError(f"on_lost is 'stop' or 'continue'; got {on_lost!r}")
        self._secret = secret
        self._linger = linger
        self._posted: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[Message | Callable[[], None]] = queue.SimpleQueue()
        self._abroad: Abroad | None = None
        self._questions: Questions | None = None
        self._started, self._closing = threading.Event(), threading.Event()
        self._emptied = threading.Condition()
        self._connections: dict[int, Connection] = {}
        self._poll: select.epoll | None = None
        self._processes: dict[int, tuple[int, int]] = {}  # by descriptor: a worker's number and its process
        self._watchers: list[threading.Thread] = []
        self._began = time.monotonic()
        self._failed: Exception | None = None
        self._membership: Membership | None = None
        self._wake: tuple[socket.socket, ...] = ()
        self._spare: FileIO | None = None
        self._thread = threading.Thread(target=self._serve, name="multiverso-node", daemon=True)
        self._listener = listener
        self._over = False
        try:
            # what an exception finds here, wherever it arrives, is ended by `close`
            if self._listener is None:
                self._listener = messages.listen(name or f"multiverso-{os.getpid()}-{os.urandom(8).hex()}")
            self._listener.setblocking(False)
            self.address = self._listener.getsockname()[1:].decode()
            self._spare = _spare()
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            if abroad is not None:
                self._abroad = Abroad(*abroad, self._post_order)
                self._questions = Questions(self._abroad.report)
            self._membership = Membership(
                workers, on_lost, self._watch, self._watch_process, self._abroad, replaces
            )
            self._thread.start()
            self._started.wait()
            if self._failed is not None:
                raise StartupError(f"the job's node could not begin: {self._failed}") from self._failed
        except BaseException:
            self.close()
            raise
        _nodes.add(self)

    @property
    def _members(self) -> Membership:
        assert self._membership is not None
        return self._membership

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
            None if self._abroad is None else dict(self._abroad.remote_statistics),
            None if self._abroad is None else self._abroad.links(),
        )

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until at least one worker has come and all have gone; returns whether that is so."""
        with self._emptied:
            members = self._members
            return self._emptied.wait_for(
                lambda: members.had_workers and not members.attached, timeout_seconds
            )

    @overload
    def stay(self) -> bool: ...
    @overload
    def stay(self, timeout_seconds: float) -> bool | None: ...
    def stay(self, timeout_seconds: float | None = None) -> bool | None:
        """Waits until no host of the job needs this one's copies.

        Args:
            timeout_seconds: for how long; by default until it is so, or other hosts have never come.

        Returns:
            False when the node has ended before that; None at the timeout.
        """
        if self._abroad is None:
            return True
        slice_seconds = _WATCH_SECONDS if timeout_seconds is None else timeout_seconds
        while not self._abroad.over.wait(slice_seconds):
            if self._closing.is_set():
                return False
            if timeout_seconds is not None:
                return None
            if not self._abroad.needed:
                return False
        return True

    @property
    def had_workers(self) -> bool:
        """Whether a worker has ever come."""
        return self._members.had_workers

    @property
    def has_ended(self) -> bool:
        """Whether it serves nobody any more: it was closed, or the host that leads the job is gone."""
        return self._closing.is_set()

    def lost_workers(self) -> list[int]:
        """Returns the workers that died, or exited without ``shutdown()``, the first one first."""
        return self._members.lost()

    def may_be_replaced(self, worker_id: int) -> bool:
        """Whether there is something left to do for a new process in the place of a worker whose process has failed.

        Not where the node has ended, nor where the worker had called ``shutdown``: its part was done, and a new process
        would begin a job of its own when the others have left.
        """
        return not self.has_ended and self._members.control.participation(worker_id) != at.LEFT

    def absent(self, worker_id: int) -> None:
        """Says that a worker's process has ended, and none comes for it. The others need not wait for it any more."""
        self._posted.put(("absent", worker_id, 0))
        self._poke()

    def live_workers(self) -> list[int]:
        """Returns the workers that are attached now."""
        return sorted(self._members.attached)

    def close(self) -> None:
        """Ends the node. Workers that are still attached get NodeLostError from their waits."""
        if self._over:
            return
        self._closing.set()
        self._poke()
        if threading.current_thread() is self._thread:
            return
        if self._thread.ident is None:  # an exception came before it began
            self._end()
        else:
            self._thread.join()
        if self._abroad is not None:  # after the thread that does what it hears from other hosts
            self._abroad.close()
        for watcher in self._watchers:
            watcher.join()
        for end in self._wake:
            end.close()
        if self._spare is not None:
            self._spare.close()
        self._over = True

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the serving thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with select.epoll() as poll:
                self._loop(poll)
        except Exception as error:
            self._failed = error
            traceback.print_exc(file=sys.stderr)
            log("it failed; waits of its workers raise NodeLostError")
        finally:
            self._end()
            self._started.set()

    def _loop(self, poll: select.epoll) -> None:
        listener = self._listener
        assert listener is not None
        self._members.hold()
        self._poll = poll
        poll.register(listener.fileno(), select.EPOLLIN)
        poll.register(self._wake[0].fileno(), select.EPOLLIN)
        self._started.set()
        while not self._closing.is_set():
            for descriptor, _ in poll.poll():
                if descriptor == listener.fileno():
                    self._accept(poll, listener)
                elif descriptor == self._wake[0].fileno():
                    self._take_posted()
                elif descriptor in self._connections:  # one batch may hold two events of a closed one
                    self._read(poll, self._connections[descriptor])
                elif descriptor in self._processes:
                    worker_id, pid = self._processes[descriptor]
                    self._forget_process(descriptor)
                    self._members.process_ended(worker_id, pid)
                    self._notice_end()

    def _end(self) -> None:
        self._closing.set()
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.socket.close()
        for descriptor in list(self._processes):
            self._forget_process(descriptor)
        if self._membership is not None:
            self._membership.end()
        # whoever waits for the workers to go must not wait for ever after a failure of this thread
        with self._emptied:
            self._emptied.notify_all()
        if self._linger is not None:
            self._linger()

    def _poke(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            self._wake[1].send(b"x")

    def _accept(self, poll: select.epoll, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listener)
                return
            try:
                if not trust.is_same_user(accepted):
                    accepted.close()
                    continue
                accepted.setblocking(False)  # a peer that does not read must not stop the node
                pid, _ = messages.peer(accepted)
                poll.register(accepted.fileno(), select.EPOLLIN)
            except OSError as error:
                accepted.close()
                log(f"a new connection was closed: {error}")
                continue
            connection = Connection(accepted, pid, proven=not trust.proof_needed())
            self._connections[accepted.fileno()] = connection

    def _turn_away(self, listener: socket.socket) -> None:
        """Out of descriptors: tells the next one so, with one that was kept for this, or it would ask for ever."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert self._spare is not None
        self._spare.close()
        try:
            accepted, _ = listener.accept()
            with accepted:
                accepted.setblocking(False)
                told = f"the job's node has no file descriptor left for this process (ulimit -n is {limit} there)"
                messages.send(accepted, {"re": None, "error": "StartupError", "message": told})
                log(told)
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                self._spare = _spare()

    def _read(self, poll: select.epoll, connection: Connection) -> None:
        """Serves one message. Whatever goes wrong concerns this connection only."""
        try:
            received = messages.receive(connection.socket)
            if received is not None:
                request, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                self._answer(connection, request)
                return
        except BlockingIOError:
            return
        except OSError as error:
            log(f"the connection of process {connection.pid} was closed: {error}")
        except ValueError as error:
            log(
                f"the connection of process {connection.pid} was closed, as it did not send a message: {error}"
            )
        except Exception:
            traceback.print_exc(file=sys.stderr)
            log(f"the connection of process {connection.pid} was closed after the error above")
        self._disconnect(poll, connection)

    def _answer(self, connection: Connection, request: Message) -> None:
        try:
            do = asked(request)
            if not connection.proven and do not in ("challenge", "prove"):
                raise StartupError(
                    "this node cannot tell users apart, and this process has not proven that it knows the job's secret"
                )
            check(request)
            handler = {
                "hello": self._hello,
                "challenge": self._challenge,
                "prove": self._prove,
                "attach": self._members.attach,
                "ready": self._ready,
                "withdraw": self._members.withdraw,
                "create": self._create,
                "share": self._share,
                "initialised": self._initialised,
                "close": self._close_table,
                "cancel": self._cancel,
                "arrived": self._arrived,
                "gather": self._gather,
                "tell": self._tell,
                "ask": self._ask,
                "say": self._say,
                "combine": self._combine,
                "status": self._status,
                "look": self._look,
            }[do]
            handler(connection, request)
        except MultiversoError as error:
            connection.refuse(request, error)
        except (KeyError, TypeError, ValueError) as error:
            # one worker's broken message must not end everybody's job
            text = str(request)[:500]
            connection.refuse(request, StartupError(f"the node cannot read this request ({error!r}): {text}"))

    def _disconnect(self, poll: select.epoll, connection: Connection) -> None:
        """The socket's end. It says nothing about a worker that holds its life mutex: that has a watcher."""
        poll.unregister(connection.socket.fileno())
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
        self._members.forget(connection)
        if self._questions is not None:
            self._questions.forget(connection)
        if connection.worker_id is not None and connection.life is None:
            left = self._members.control.participation(connection.worker_id) == at.LEFT
            self._settle(connection.worker_id, at.GONE if left else at.LOST)

    # -- watching workers ------------------------------------------------------------------------------------

    def _ready(self, connection: Connection, request: Message) -> None:
        self._members.ready(connection, request)
        self._forget_process_of(connection.attached_id)  # its life mutex tells sooner

    def _watch_process(self, worker_id: int, pid: int) -> bool:
        """Has `Membership.process_ended` called at a process's end. Its socket may be held open by a child of it."""
        if (worker_id, pid) in self._processes.values():
            return True
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended, or there is none left, or this kernel has no such thing
            return False
        self._processes[descriptor] = worker_id, pid
        assert self._poll is not None
        self._poll.register(descriptor, select.EPOLLIN)
        return True

    def _forget_process_of(self, worker_id: int) -> None:
        for descriptor in [d for d, (other, _) in self._processes.items() if other == worker_id]:
            self._forget_process(descriptor)

    def _forget_process(self, descriptor: int) -> None:
        del self._processes[descriptor]
        os.close(descriptor)  # and epoll forgets it

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
        how = await_end(control, worker_id, self._closing.is_set, lambda: self._members.has_withdrawn(life))
        if how is not None:
            self._posted.put((how, worker_id, life))
            self._poke()

    def _take_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake[0].recv(4096)
        self._take_orders()
        while True:
            try:
                what, worker_id, life = self._posted.get_nowait()
            except queue.Empty:
                return
            worker = self._members.attached.get(worker_id)
            if what == "absent":
                self._members.absent(worker_id)
                if self._abroad is not None:
                    self._abroad.look()
            elif worker is not None and worker.connection.life == life:
                self._settle(worker_id, at.GONE if what == "left" else at.LOST)

    # -- the other hosts -------------------------------------------------------------------------------------

    def _post_order(self, order: Message | Callable[[], None]) -> None:
        self._orders.put(order)
        self._poke()

    def _take_orders(self) -> None:
        while not self._orders.empty():
            order = self._orders.get()
            if callable(order):
                order()
            else:
                self._obey(order)

    def _obey(self, order: Message) -> None:
        members, abroad = self._members, self._abroad
        assert abroad is not None
        do = order["do"]
        if do in ("make", "write", "join", "push", "finish", "drop", "used", "part", "free"):
            assert isinstance(members.creations, HostCreations)
            members.creations.obey(order)
        elif do == "refuse":
            members.refuse(order["options"])
        elif do == "welcome":
            members.take_over(order)
        elif do == "told":
            members.told(int(order["number"]), order["notes"])
        elif do == "answer":
            assert self._questions is not None
            self._questions.answer(order)
        elif do in ("alone", "broken"):
            if not abroad.over.is_set() and (members.control.continues or not abroad.lost_hosts):
                log(
                    f"the connection to {abroad.roster.names[0]}, which leads the job, is over: {order['why']}"
                    if do == "alone"
                    else f"values could not be exchanged with the other hosts: {order['why']}"
                )
                self._closing.set()
        else:
            if do == "peers":
                members.begin_with_others()
            for worker_id in abroad.obey(order):
                members.changed(worker_id)

    def _tell(self, connection: Connection, request: Message) -> None:
        if self._abroad is None:
            raise StartupError("the workers of one host tell each other in shared memory")
        self._members.tell(connection, request)

    def _ask(self, connection: Connection, request: Message) -> None:
        self._asked().ask(connection, request)

    def _say(self, connection: Connection, request: Message) -> None:
        self._asked().say(connection, request)

    def _combine(self, connection: Connection, request: Message) -> None:
        if self._abroad is None or self._abroad.reductions is None:
            raise StartupError("the workers of one host reduce arrays by themselves")
        self._abroad.reductions.told(connection.attached_id, request)

    def _asked(self) -> Questions:
        if self._questions is None:
            raise StartupError(
                "only the workers of a job on several hosts ask each other through their nodes"
            )
        return self._questions

    def _arrived(self, connection: Connection, request: Message) -> None:
        if self._abroad is not None:
            self._abroad.arrived(connection.attached_id, int(request["barrier"]))

    def _gather(self, connection: Connection, request: Message) -> None:
        if self._abroad is not None:
            self._abroad.report({"do": "gather", "number": int(request["number"])})

    def _hear_out(self, connection: Connection) -> None:
        """Serves what a worker said before its end, which its life mutex may tell of before its messages are read."""
        descriptor = connection.socket.fileno()
        while self._connections.get(descriptor) is connection and messages.waiting(connection.socket):
            assert self._poll is not None
            self._read(self._poll, connection)

    def _settle(self, worker_id: int, liveness: int) -> None:
        worker = self._members.attached.get(worker_id)
        if self._questions is not None and worker is not None:
            self._hear_out(worker.connection)
        self._members.settle(worker_id, liveness)
        self._forget_process_of(worker_id)
        if self._abroad is not None:
            self._abroad.tell_now()
            self._abroad.look()
        self._notice_end()

    def _notice_end(self) -> None:
        """A worker has gone: tells who waits for the last one."""
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

    def _hello(self, connection: Connection, request: Message) -> None:
        connection.reply(request, {})

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
        assert self._listener is not None
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

    def _look(self, connection: Connection, request: Message) -> None:
        look(connection, request, self._members.catalogue, self._members.memory)


def _spare() -> FileIO:
    """Returns a descriptor that is kept for the moment when there is none left."""
    return FileIO(os.devnull)


def _after_fork_in_child() -> None:
    """A forked child that kept the sockets would let the job look alive after its node's death."""
    for node in list(_nodes):
        for kept in (node._listener, *(connection.socket for connection in node._connections.values())):
            if kept is not None:
                kept.close()
        for descriptor in node._processes:
            os.close(descriptor)


os.register_at_fork(after_in_child=_after_fork_in_child)
