"""Where publications are found: abstract sockets whose names only this user can work out, and the kernel forgets."""

from __future__ import annotations

import errno
import hmac
import os
import socket
import time

from multiverso.errors import StartupError
from multiverso.wire import messages, trust

_PREFIX = "multiverso.publication-"  # not what nodes have: they are asked other things
_TRIES = 100


def checked(name: str) -> str:
    """Returns a publication's name.

    Raises:
        ValueError: it is empty, too long, or no text.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 200 or "\0" in name:
        raise ValueError(f"a publication's name is a text of 1 to 200 characters; got {name!r:.80}")
    return name


def addresses(name: str, job: str | None) -> list[str]:
    """Returns where publications of a name are: those of a job, or of this user's processes here."""
    if job is not None:
        return [address(name, place) for place in dict.fromkeys((job, followed(job)))]
    return sorted(found for found in messages.listening_sockets() if found.startswith(f"{_stem(name)}-"))


def address(name: str, job: str) -> str:
    """Returns the socket of a job's publication; ``job`` is empty for a process alone."""
    return f"{_stem(name)}-{_digest('job', job)}"


def followed(job: str) -> str:
    """Returns what stands for a job where a process of this host follows what is published on another one."""
    return f"{job} elsewhere"


def forwarded(address: str, token: str) -> str:
    """Returns what stands for a job where a user names an address: another address is another publication."""
    return f"at {_digest('token', token)} {address}"


def is_taken(name: str, job: str) -> bool:
    """Returns whether a process listens under a publication's name."""
    return address(name, job) in messages.listening_sockets()


def of_job(job: str) -> list[str]:
    """Returns where a job's publications are, those that are followed here as well."""
    ends = tuple(f"-{_digest('job', place)}" for place in (job, followed(job)))
    return [found for found in messages.listening_sockets() if found.startswith(_PREFIX) and found.endswith(ends)]


def take(name: str, job: str) -> socket.socket:
    """Returns a listening socket for a publication.

    Raises:
        StartupError: another process publishes under this name.
    """
    place = address(name, job)
    for _ in range(_TRIES):
        try:
            return messages.listen(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StartupError(f"no socket for publication {name!r} ({error.strerror or error})") from error
        try:
            with messages.connect(place, 1.0) as connection:
                pid, uid = messages.peer(connection)
        except OSError:  # it has just gone
            time.sleep(0.001)
            continue
        if pid == os.getpid():
            raise StartupError(f"this process publishes {name!r} already: close() that publication first")
        raise StartupError(
            f"process {pid} of user {uid} publishes {name!r} already: one process at a time; take another name, or try "
            "again when that process has ended"
        )
    raise StartupError(f"the name {name!r} is taken, and nothing answers there: try again")


def _stem(name: str) -> str:
    return _PREFIX + _digest("name", name)


def _digest(kind: str, text: str) -> str:
    return hmac.new(trust.user_secret().encode(), f"{kind}\0{text}".encode(), "sha256").hexdigest()[:24]
