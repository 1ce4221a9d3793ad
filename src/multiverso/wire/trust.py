"""Is the process at the other end of the node's socket one of ours? Asked on both sides, before anything else.

The kernel says which user the other end belongs to (SO_PEERCRED). In a user namespace where every user has the same
number that says nothing; there each side proves to the other that it knows the job's secret, without telling it.
"""

from __future__ import annotations

import hmac
import os
import socket
from pathlib import Path

from multiverso.errors import StartupError
from multiverso.files import opening as files
from multiverso.files import users
from multiverso.wire import messages

SECRET_VARIABLE = "MULTIVERSO_SECRET"
_SECRET_BYTES = 32


def new_secret() -> str:
    """Returns a secret for a job."""
    return os.urandom(_SECRET_BYTES).hex()


def user_secret() -> str:
    """Returns what only this user knows, the same in all of its processes; made at the first call.

    It lies in ``$XDG_STATE_HOME/multiverso/secret`` (``~/.local/state``), mode 0600. From it the names of sockets are
    made where no launcher can hand out a name.

    Raises:
        StartupError: it can be neither read nor made, or it is not safe from other users.
    """
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = files.own_directory(Path(home) / "multiverso") / "secret"
        if not os.path.lexists(path):
            try:
                files.write_whole(path, new_secret().encode(), mode=0o600, replace=False)
            except FileExistsError:  # another process has just made it
                pass
        secret = files.read_own(path).decode()
    except (OSError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"this user's secret cannot be kept ({error}); set XDG_STATE_HOME to a directory that only this user can "
            f"write to, or {SECRET_VARIABLE} to the same random text in all workers"
        ) from error
    if len(secret) < _SECRET_BYTES:
        raise StartupError(f"{path} is damaged: it has {len(secret)} characters; remove it")
    return secret


def check_user(connection: socket.socket, address: str) -> None:
    """In a worker: refuses a node of another user.

    Raises:
        StartupError: it is one.
    """
    pid, uid = messages.peer(connection)
    if uid != os.geteuid():
        raise StartupError(
            f"process {pid} of user {uid} holds {address!r}, the name of this job's node, and this is user "
            f"{os.geteuid()}: nothing was sent to it. Either the job is over, or another process has taken the name: "
            "end that process, or start the job again"
        )


def is_same_user(connection: socket.socket) -> bool:
    """In the node: whether the process at the other end belongs to this user, as far as numbers show."""
    return messages.peer(connection)[1] == os.geteuid()


def proof_needed() -> bool:
    """Returns whether the numbers of users are useless here."""
    return users.look_alike()


def proof(secret: str, role: str, address: str, nonces: tuple[str, str], pids: tuple[int, int]) -> str:
    """Returns what only a process that knows the secret can say, and what is worth nothing on another connection.

    Args:
        secret: the job's.
        role: ``"node"`` or ``"worker"``: neither can send back what the other has said.
        address: of the node.
        nonces: the worker's and the node's random numbers, new for each connection.
        pids: the worker's process and the one that listens: who stands between the two has another one.
    """
    text = "\0".join([role, address, *nonces, *map(str, pids)])
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def is_proof(said: object, expected: str) -> bool:
    """Returns whether a proof is the expected one."""
    return isinstance(said, str) and hmac.compare_digest(said.encode(), expected.encode())
