"""The node as a process of its own, started by the first worker of mpirun, torchrun or srun."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading

from multiverso.deadline import Deadline
from multiverso.errors import StartupError
from multiverso.hosts.roster import LISTENER_VARIABLE, ROSTER_VARIABLE, Roster
from multiverso.hosts.transport.channel import RefusedError
from multiverso.node_log import log
from multiverso.runtime.job.processes import starting
from multiverso.runtime.node.node import Node
from multiverso.wire import messages
from multiverso.wire.trust import SECRET_VARIABLE

_FIRST_WORKER_SECONDS = 120.0
_ORPHAN_SECONDS, _LOOK_SECONDS = 5.0, 0.5  # for the first worker, once the one that has started this node is gone
_FAREWELL_SECONDS, _ANSWER_SECONDS = 5.0, 1.0
_LINGER_SECONDS = 0.5  # `init` again, right after `shutdown`, finds the same node


def main(descriptor: int, workers: int, on_lost: str, starter: int) -> None:
    """Serves a job until its last worker has gone; ``starter``: the process of the worker that has started this one."""
    # descriptors of the worker's launcher (pipes, MPI's control sockets) would keep that waiting for us
    text, port = os.environ.pop(ROSTER_VARIABLE, None), os.environ.pop(LISTENER_VARIABLE, None)
    kept = sorted({descriptor, *([int(port)] if port else [])})
    for low, high in itertools.pairwise([2, *kept, min(os.sysconf("SC_OPEN_MAX"), 65536)]):
        os.closerange(low + 1, high)
    os.chdir("/")
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    secret = os.environ.get(SECRET_VARIABLE) or None
    other_hosts = None
    if text:
        # not above: it takes long to import, and a job on one host has no use for it
        from multiverso.runtime.several_hosts.other_hosts import other_hosts_of

        other_hosts = other_hosts_of(Roster.from_text(text), int(port) if port else None)
    with listener.dup() as door:
        try:
            with starting():
                node = Node(workers, on_lost=on_lost, listener=listener, secret=secret, other_hosts=other_hosts)
        except StartupError as error:
            log(str(error))
            _say_why(door, error)
            return
    with node:
        if not _has_begun(node, starter):
            return
        while True:
            while node.live_workers():
                node.wait(_FIRST_WORKER_SECONDS)
            if other_hosts is not None:
                node.stay()
                return
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait(_LINGER_SECONDS)
            if not node.live_workers():
                return


def _has_begun(node: Node, starter: int) -> bool:
    """Waits for the first worker; not for long where the one that has started this node was killed before it came."""
    deadline, is_orphan = Deadline.after(_FIRST_WORKER_SECONDS), False
    while not deadline.passed:
        if node.had_workers:
            return True
        if os.getppid() != starter and not is_orphan:
            deadline, is_orphan = Deadline.after(_ORPHAN_SECONDS), True
        node.wait(_LOOK_SECONDS)
    return node.had_workers


def _say_why(door: socket.socket, error: StartupError) -> None:
    """Answers workers that connect with the reason why there is no node."""
    text = str(error)
    if isinstance(error, RefusedError):
        text += (
            ". Hosts that srun has started need one secret: a home directory that they share, or the same "
            f"{SECRET_VARIABLE} in all workers"
        )
    answer = {"re": None, "error": "StartupError", "message": f"the job's node could not begin: {text}"}
    deadline = Deadline.after(_FAREWELL_SECONDS)
    while not deadline.passed:
        door.settimeout(max(1e-3, deadline.left(_FAREWELL_SECONDS)))
        with contextlib.suppress(OSError, ValueError):
            connection, _ = door.accept()
            with connection:
                connection.settimeout(_ANSWER_SECONDS)
                messages.receive(connection)  # what is unread at the end would take our word with it
                messages.send(connection, answer)
