"""Lets processes of this host in, and decides which have to prove that they are this user's."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
from collections.abc import Callable
from io import FileIO

from multiverso.errors import StartupError
from multiverso.node_log import log
from multiverso.runtime.node.connection import Connection
from multiverso.wire import messages, trust
from multiverso.wire.requests import Challenge, Prove

_ACCEPTED_AT_ONCE = 128


class Entrance:
    """The node's listening socket.

    Args:
        listener: a listening socket; None until `open` makes one.
        secret: what a worker has to know where users cannot be told apart; this user's own by default.
        on_stranger: called with the process and the user of each connection that another user's process has made.

    Attributes:
        address: the abstract socket's name, once it is open; also after it is closed.

    Owner: the node's maker opens it; from then on the node's thread.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        secret: str | None,
        on_stranger: Callable[[int, int], None] = lambda pid, uid: None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._on_stranger = on_stranger
        self._spare: FileIO | None = None
        self.address = ""

    def open(self, name: str | None) -> None:
        """Begins to listen, on an abstract socket of that name (by default a fresh one), where it does not yet."""
        if self._listener is None:
            self._listener = messages.listen(name or f"multiverso-{os.getpid()}-{os.urandom(8).hex()}")
        self._listener.setblocking(False)
        self.address = str(self._listener.getsockname()[1:].decode())
        self._spare = _spare()

    @property
    def listener(self) -> socket.socket:
        """The listening socket."""
        assert self._listener is not None
        return self._listener

    def close(self) -> None:
        """Closes the socket: no further process is let in."""
        if self._listener is not None:
            self._listener.close()
        if self._spare is not None:
            self._spare.close()

    # -- coming in -------------------------------------------------------------------------------------------

    def accept(self, poll: select.epoll) -> list[Connection]:
        """Returns connections of processes of this user that wait to be let in, watched by `poll` from here on."""
        connections: list[Connection] = []
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self.listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                break
            try:
                pid, uid = messages.peer(accepted)
                if not trust.is_same_user(accepted):
                    accepted.close()
                    self._on_stranger(pid, uid)
                    continue
                accepted.setblocking(False)  # a peer that does not read must not stop the node
                poll.register(accepted.fileno(), select.EPOLLIN)
            except OSError as error:
                accepted.close()
                log(f"a new connection was closed: {error}")
                continue
            connections.append(Connection(accepted, pid, proven=not trust.proof_needed()))
        return connections

    def _turn_away(self) -> None:
        """Out of descriptors: answers the next process with a spare one; it would retry forever otherwise."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert self._spare is not None
        self._spare.close()
        with contextlib.suppress(OSError):
            accepted, _ = self.listener.accept()
            with accepted:
                accepted.setblocking(False)
                text = f"the job's node has no file descriptor left for this process (ulimit -n is {limit} there)"
                messages.send(accepted, {"re": None, "error": "StartupError", "message": text})
                log(text)
        with contextlib.suppress(OSError):
            self._spare = _spare()

    # -- where users cannot be told apart --------------------------------------------------------------------

    def challenge(self, connection: Connection, request: Challenge) -> None:
        """A worker asks whether this is its node."""
        connection.nonces = (request.nonce, trust.new_secret())
        connection.reply(request.id, {"nonce": connection.nonces[1], "proof": self._proof(connection, "node")})

    def prove(self, connection: Connection, request: Prove) -> None:
        """A worker proves that it is one of ours.

        Raises:
            StartupError: it does not.
        """
        if not trust.is_proof(request.proof, self._proof(connection, "worker")):
            raise StartupError("this process does not know the job's secret")
        connection.proven = True
        connection.reply(request.id, {"proven": True})

    def _proof(self, connection: Connection, role: str) -> str:
        if connection.nonces is None:
            raise StartupError("ask for a challenge before proving")
        pids = (connection.pid, messages.peer(self.listener)[0])  # of a listener it is who called listen()
        secret = self._secret or trust.user_secret()
        return trust.proof(secret, role, self.address, connection.nonces, pids)


def _spare() -> FileIO:
    """Returns a descriptor that is kept for the moment when there is none left."""
    return FileIO(os.devnull)
