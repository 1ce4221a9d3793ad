"""A session's side of its connection to the node: ask, wait for the answer with a deadline.

Is a node slow, or will it never answer? It answers its first question at once, as soon as it has the processor. So one
whose processes have all been asleep or stopped for a second, with that question unread before them, does not answer at
all: it is stopped, hangs, or is no node. One that is still being started, or waits for the processor or a disk, is
waited for until the deadline. (A start may sleep until the job's first host is there, see `processes.starting`.)
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from multiverso import errors
from multiverso.deadline import SLICE_SECONDS
from multiverso.errors import MultiversoError, NodeLostError, StartupError, WaitTimeoutError, WorkerLostError
from multiverso.runtime.job.processes import STARTING
from multiverso.wire import messages, trust
from multiverso.wire.messages import Message, listening_sockets
from multiverso.wire.requests import Cancel, Challenge, Hello, Prove, Request, message_of

_ASLEEP_SECONDS = 1.0
_IDLE, _AT_WORK = "STtZX", "R"  # as in proc(5)
_STOPPED = "Tt"


class Silence:
    """The last look at the processes that hold a node's socket.

    Args:
        address: the node's.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._used: dict[int, int] | None = None  # how much of the processor, while all were idle
        self._since = 0.0

    def look(self) -> None:
        """Looks at them once more.

        Raises:
            StartupError: they have not done anything for a second, while there was something for them to do.
        """
        seen = {pid: _activity(pid) for pid in holders(self._address)}
        idle = bool(seen) and all(states and set(states) <= set(_IDLE) for states, _ in seen.values())
        used = {pid: ticks for pid, (_, ticks) in seen.items()} if idle else None
        if used is None or used != self._used:
            self._used, self._since = used, time.monotonic()
        elif time.monotonic() - self._since >= _ASLEEP_SECONDS:
            raise StartupError(self._verdict(seen))

    def _verdict(self, seen: dict[int, tuple[str, int]]) -> str:
        stopped = [pid for pid, (states, _) in seen.items() if _all_stopped(states)]
        if stopped:
            return _stopped_node(stopped[0])
        who = ", ".join(f"process {pid} ({_command(pid)})" for pid in seen)
        return (
            f"the node at {self._address!r} does not answer: {who} of this user has been asleep since we asked. "
            "It is not a node, or it hangs: end it, and start the job again"
        )


def _all_stopped(states: str) -> bool:
    return bool(states) and set(states) <= set(_STOPPED)


def _stopped_node(pid: int) -> str:
    return (
        f"the job's node is stopped: process {pid} ({_command(pid)}); `kill -CONT {pid}` lets it continue, "
        f"`kill -KILL {pid}` ends the job"
    )


def holders(address: str) -> list[int]:
    """Returns the processes, of those that we may look at, that hold a listening socket of this abstract name."""
    try:
        inode = listening_sockets().get(address)
    except OSError:
        return []  # no /proc
    processes = map(int, filter(str.isdigit, os.listdir("/proc"))) if inode else ()
    return [pid for pid in processes if f"socket:[{inode}]" in _targets(pid)]


def _targets(pid: int) -> set[str]:
    found = set()
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # ended, or another user's
        for entry in entries:
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry.path))
    return found


def _activity(pid: int) -> tuple[str, int]:
    """Returns the states of a process's threads, a letter each, and how much of the processor they have had."""
    states, ticks = "", 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            name, _, rest = Path(f"/proc/{pid}/task/{thread}/stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            states += _AT_WORK if name.partition("(")[2] == STARTING else fields[0]
            ticks += int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):  # it has just ended, or a thread of it: look again
        return "", 0
    return states, ticks


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    line = " ".join(" ".join(words).split())
    return line if len(line) <= 60 else line[:60] + "..."


_ASIDE = 0  # requests whose answers are waited for have numbers from 1


class NodeLink:
    """One connection. Owner: its session, which serialises the calls."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._number = 0
        self._descriptors: list[int] = []  # received, and not yet taken

    @classmethod
    def to(cls, address: str, deadline: float, secret: str | None = None) -> NodeLink:
        """Returns a connection; see `connect`."""
        link = cls()
        try:
            link.connect(address, deadline, secret)
        except BaseException:
            link.close()
            raise
        return link

    @property
    def connection(self) -> socket.socket:
        """The socket; NodeLostError before `connect`."""
        if self._connection is None:
            raise NodeLostError("there is no connection to the job's node")
        return self._connection

    def connect(self, address: str, deadline: float, secret: str | None = None) -> None:
        """Connects to a node of this user. `close` after an error.

        Args:
            address: the node's.
            deadline: on time.monotonic().
            secret: the job's, for where users cannot be told apart; this user's own by default.

        Raises:
            StartupError: there is no node, or another user's process is there, or it sleeps instead of answering.
            WaitTimeoutError: too many others wait there for us to get in.
        """
        try:
            self._connection = messages.connect(address, max(0.1, deadline - time.monotonic()))
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the node at {address!r} could not be reached in time: {error.strerror}; some process keeps "
                "connecting to it"
            ) from error
        except OSError as error:
            raise StartupError(
                f"no node listens at {address!r} ({error.strerror or error}): the job is over, or this process "
                "is in another container; start it with `multiverso run`, mpirun, torchrun or srun"
            ) from error
        trust.check_user(self._connection, address)
        silence = Silence(address)

        def look() -> None:
            silence.look()
            if time.monotonic() >= deadline:
                raise WaitTimeoutError("the job's node has not answered in time, although it is not idle")

        if trust.proof_needed():
            self.prove(address, deadline, secret or trust.user_secret(), look)
        else:
            self.ask(Hello(), deadline, "the node's first answer", look)

    def prove(self, address: str, deadline: float, secret: str, look: Callable[[], None]) -> None:
        """Where users cannot be told apart: each side proves to the other that it knows the secret.

        Raises:
            StartupError: the other side does not.
        """
        nonce = trust.new_secret()
        answer, _ = self.ask(Challenge(nonce), deadline, "the node's proof of the job's secret", look)
        nonces, pids = (nonce, str(answer.get("nonce"))), (os.getpid(), messages.peer(self.connection)[0])
        if not trust.is_proof(answer.get("proof"), trust.proof(secret, "node", address, nonces, pids)):
            raise StartupError(
                f"the process that listens at {address!r} does not know this job's secret, and users cannot be "
                "told apart here: it is another job's node, or another user's"
            )
        proof = trust.proof(secret, "worker", address, nonces, pids)
        self.ask(Prove(proof), deadline, "the node to accept our proof of the job's secret")

    def tell(self, message: Request | Message, aside: bool = False) -> None:
        """Sends a message that has no answer of its own.

        Args:
            message: the message.
            aside: it comes in the middle of a request whose answer is still waited for; its own answer is dropped.
        """
        self._send(message, _ASIDE if aside else self._number)

    def ask(
        self, message: Request | Message, deadline: float, what: str, look: Callable[[], None] | None = None
    ) -> tuple[Message, list[int]]:
        """Sends a request and waits for its (first) answer. After an error `give_up`, unless the connection ends.

        Args:
            message: the request.
            deadline: on time.monotonic().
            what: what is waited for, in words.
            look: called twice a second meanwhile and at the deadline; may raise, and has to at the deadline.

        Returns:
            The answer and the descriptors beside it.
        """
        self._close_descriptors()  # of an answer that an exception has kept from its caller
        self._number += 1
        self._send(message, self._number)
        return self.more(deadline, what, look)

    def more(self, deadline: float, what: str, look: Callable[[], None] | None = None) -> tuple[Message, list[int]]:
        """Waits for the next answer to the last request."""
        while True:
            if select.select([self.connection], [], [], max(0.0, min(SLICE_SECONDS, deadline - time.monotonic())))[0]:
                try:
                    received = messages.receive(self.connection, self._descriptors)
                except ValueError as error:
                    raise NodeLostError(
                        f"what listens in place of the job's node did not send a message ({error}); waited for {what}"
                    ) from error
                if received is None:
                    raise NodeLostError(f"the job's node is gone while waiting for {what}")
                answer, descriptors = received
                # to a request that was given up; one without a number is for any waiter
                if answer.get("re") not in (self._number, None):
                    self._close_descriptors()
                    continue
                if "error" in answer:
                    raise _as_error(answer)
                return answer, descriptors
            if look is not None:
                look()
            elif time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"gave up waiting for {what}: the node did not answer in time; `multiverso top` shows which "
                    "workers are there"
                )

    def _send(self, message: Request | Message, number: int) -> None:
        body = message if isinstance(message, dict) else message_of(message)
        try:
            messages.send(self.connection, {**body, "id": number})
        except OSError as error:
            raise NodeLostError(f"the job's node is gone ({error.strerror or error})") from error

    def said_if_stopped(self) -> str | None:
        """Returns what to say of the node's process if it is stopped now, by a signal or a debugger; otherwise None."""
        pid = messages.peer(self.connection)[0]
        return _stopped_node(pid) if _all_stopped(_activity(pid)[0]) else None

    def give_up(self, why: str | None = None) -> None:
        """Cancels the last request: its answer is no longer waited for.

        Args:
            why: that it cannot be granted here, so that others need not wait for it either.
        """
        with suppress(OSError):  # the node is gone: nothing there to cancel
            messages.send(self.connection, message_of(Cancel(why, id=self._number)))

    def close(self) -> None:
        """Ends the connection; may be called again. In a forked child it does so without a word to the node."""
        self._close_descriptors()
        if self._connection is not None:
            self._connection.close()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _as_error(answer: Message) -> MultiversoError:
    kind = getattr(errors, str(answer["error"]), MultiversoError)
    if kind is WorkerLostError:
        return WorkerLostError(str(answer["message"]), answer.get("worker_ids", ()))
    error: MultiversoError = kind(str(answer["message"]))
    return error
