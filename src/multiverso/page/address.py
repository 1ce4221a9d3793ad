"""Where a page is found, and what it needs, without what serves it."""

from __future__ import annotations

import importlib.util
import secrets
import socket
from io import BufferedWriter
from pathlib import Path

from multiverso.errors import StartupError

HOST = "127.0.0.1"
FIRST_LINE = b'{"multiverso":"a job\'s past","version":1}\n'


def check_installed() -> None:
    """Raises StartupError where what serves the page is missing."""
    if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
        raise StartupError("the page needs Starlette and uvicorn: pip install 'multiverso[page]'")


def new_token() -> str:
    """Returns what a page's address has to have in it."""
    return secrets.token_urlsafe(24)


def new_listener(port: int = 0) -> socket.socket:
    """Returns a socket that listens on this machine only, at a free port or that one.

    Raises:
        StartupError: it cannot.
    """
    try:
        return socket.create_server((HOST, port), backlog=64)
    except OSError as error:
        raise StartupError(f"the page cannot listen at port {port} of {HOST}: {error.strerror}.") from None


def address_of(listener: socket.socket, token: str) -> str:
    """Returns a page's address."""
    return f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"


def new_file(path: Path, *, goes_on: bool = False) -> BufferedWriter:
    """Opens a file for a job's past, that is not there yet, or that ``goes_on`` as the job was started again.

    Raises:
        StartupError: it is, or cannot be made; `multiverso page` would not know it for one.
    """
    if path.suffix != ".jsonl":
        raise StartupError(f"--history {path}: a job's past is a .jsonl file, by which `multiverso page` knows it.")
    try:
        file = path.open("ab" if goes_on else "xb")
        if not file.tell():
            file.write(FIRST_LINE)
            file.flush()
        return file
    except FileExistsError:
        raise StartupError(f"--history {path}: this file is there already; give another name.") from None
    except OSError as error:
        raise StartupError(f"--history {path}: {error.strerror}.") from None
