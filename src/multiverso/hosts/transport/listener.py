"""A port where other hosts connect: lets in those that know the job's secret, and bounds others' cost.

A stranger can connect, say nothing or nonsense, and connect again. It costs a thread for ten seconds at most, there are
never more than sixteen of these, or two for each host of the job, which may all come at once, and the log gets a line
about it in ten seconds at most. Where all are taken, the next one takes the place of the oldest: a host that belongs
to the job needs milliseconds to show it, so that strangers who just hold connections open keep no host out. At the
first host's port they put off the loss of a host whose connection has ended, from five seconds to the grace at most.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, StartupError
from multiverso.hosts.transport.addresses import listen_at
from multiverso.hosts.transport.channel import Channel, RefusedError
from multiverso.hosts.transport.credentials import Credentials
from multiverso.hosts.transport.handshake import HANDSHAKE_SECONDS, Hello, accept
from multiverso.in_process import close_in_children
from multiverso.node_log import Seldom

STRANGERS = 16  # connections at a time that have not proven anything yet, in a job of up to eight hosts
_LOG_SECONDS = 10.0  # between two lines of one kind
_AGAIN_SECONDS = 0.05  # after a connection could not be taken
_ROOM_SECONDS = 1.0  # until a thread whose connection was ended is over
_LEAVE_SECONDS = 1.0  # that those who are not let in yet have left when it is shut
_JOIN_SECONDS = 10.0
_BACKLOG = 128


def open_port(address: tuple[str, int]) -> socket.socket:
    """Opens the port where a node's peers connect.

    Args:
        address: host name or address, and port, as for `listen_at`.

    Raises:
        StartupError: there can be none at that address.
    """
    try:
        return listen_at(*address, _BACKLOG)
    except OSError as error:
        raise StartupError(f"no connections can be taken at {address[0]}:{address[1]}: {error}") from error


class Listener:
    """Takes connections, and hands on those of the job's own hosts.

    Args:
        port: where they come in, as of `open_port`; closed by ``shut``.
        credentials: the job's.
        me: what this node says of itself.
        welcome: gets the channel of each host that is let in, and what that host says of itself, in a thread of that
            connection, which may serve it to its end.
        name: of its threads.

    Owner: its maker calls ``shut`` and ``join``; its threads do the rest.
    """

    def __init__(
        self,
        port: socket.socket,
        credentials: Credentials,
        me: Hello,
        welcome: Callable[[Channel, Hello], None],
        name: str,
    ) -> None:
        self._port, self._credentials, self._me = port, credentials, me
        self._welcome, self._name = welcome, name
        self._most = max(STRANGERS, 2 * me.hosts)  # strangers
        self._refusals, self._crowds = Seldom(_LOG_SECONDS), Seldom(_LOG_SECONDS)
        self._changed = threading.Condition()
        self.strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        close_in_children(port, socket.socket.close)
        self._accepting.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        name = self._port.getsockname()
        return name[0], name[1]

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._port.accept()[0]
            except OSError:
                if self._closing.wait(_AGAIN_SECONDS):  # out of descriptors, perhaps not for long
                    return
                continue
            close_in_children(connection, socket.socket.close)
            if not self._make_room():
                connection.close()
                continue
            with self._changed:
                if self._closing.is_set():  # `shut` waits for those that it finds
                    connection.close()
                    return
                self.strangers[connection] = None
            thread = threading.Thread(target=self._let_in, args=(connection,), name=f"{self._name}-admit", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no thread, perhaps not for long
                with self._changed:
                    del self.strangers[connection]
                connection.close()
                self._closing.wait(_AGAIN_SECONDS)
                continue
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _make_room(self) -> bool:
        """Ends the connection that came first, if there are as many as there may be; returns whether there is room."""
        with self._changed:
            if len(self.strangers) < self._most:
                return True
            first = next(iter(self.strangers))
            self._crowds.log(
                f"{self._most} connections at {_place(self.address)} have not shown that they belong to this job, "
                f"as many as may be: the first of them, from {_peer(first)}, was closed to make room for the next"
            )
            _end(first)
            return self._changed.wait_for(lambda: first not in self.strangers, _ROOM_SECONDS)

    def _let_in(self, connection: socket.socket) -> None:
        peer = _peer(connection)
        try:
            deadline = Deadline.after(HANDSHAKE_SECONDS)
            channel, theirs = accept(connection, self._credentials, self._me, deadline)
        except RefusedError as error:
            self._refusals.log(f"a connection from {peer} was refused: {error}")
            return
        except (OSError, MultiversoError):
            return
        finally:
            with self._changed:
                del self.strangers[connection]
                self._changed.notify_all()
        self._welcome(channel, theirs)

    def shut(self) -> None:
        """Takes no more connections. Those that are showing what they are have a second left. May be called again."""
        self._closing.set()
        _end(self._port)  # a thread that waits in accept gets an OSError
        self._port.close()
        with self._changed:
            self._changed.wait_for(lambda: not self.strangers, _LEAVE_SECONDS)
            for connection in self.strangers:
                _end(connection)

    def join(self) -> None:
        """After ``shut``, and once what ``welcome`` serves has been ended: waits for the threads."""
        end = Deadline.after(_JOIN_SECONDS)
        self._accepting.join(end.left(_JOIN_SECONDS))  # it starts the others
        for thread in self._threads:
            thread.join(end.left(_JOIN_SECONDS))


def _end(connection: socket.socket) -> None:
    """Wakes the thread that listens to a connection, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return _place(connection.getpeername()[:2])
    return "a process that has gone"


def _place(address: tuple[str, int]) -> str:
    name = address[0].removeprefix("::ffff:")  # IPv4, where one socket takes both
    return f"[{name}]:{address[1]}" if ":" in name else f"{name}:{address[1]}"
