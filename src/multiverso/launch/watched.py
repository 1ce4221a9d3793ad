"""A launcher looks at its own job now and then: for the page beside it, and for its last line.

The page is another process: what it takes is not taken from the node's threads, which are in this one. It gets the
listening socket, a token and snapshots, and ends when the pipe ends by which these come.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from multiverso.in_process import Closing
from multiverso.launch.processes import end_process, signal_name
from multiverso.launch.results import JobResult
from multiverso.page.address import address_of, check_installed, new_file, new_listener, new_token
from multiverso.runtime.node.node import Node
from multiverso.watching.history import History
from multiverso.watching.jobs import with_publications
from multiverso.watching.snapshot import Observer, Snapshot, Worker

_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 2.0
_END_SECONDS = 8.0


class Page:
    """The process that serves the page of a launcher's job. Owner: one thread at a time; ``close`` ends it.

    Args:
        history: takes the job's past; None for no file.
        goes_on: whether that is there, as this job was started again.

    Attributes:
        address: the page's, with its token.

    Raises:
        StartupError: what it needs is not installed, or ``history`` cannot be made.
    """

    def __init__(self, history: Path | None = None, *, goes_on: bool = False) -> None:
        check_installed()
        token = new_token()
        self._history = history
        with ExitStack() as stack:
            listener = stack.enter_context(new_listener())
            file = None if history is None else stack.enter_context(new_file(history, goes_on=goes_on))
            self._socket, theirs = socket.socketpair()
            stack.enter_context(theirs)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "multiverso.page", str(listener.fileno())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[one.fileno() for one in (listener, file) if one is not None],
                start_new_session=True,  # a terminal's Ctrl-C is for the workers
            )
            self._socket.settimeout(_STUCK_SECONDS)
            self.address = address_of(listener, token)
            self._send(f"{token}\n{'' if file is None else file.fileno()}\n".encode())

    def show(self, now: Snapshot) -> str | None:
        """Shows a snapshot. Of a page that has died, or is stuck, says so, once: it gets no more of them."""
        is_open = self._socket.fileno() >= 0
        return self._trouble() if is_open and not self._send(msgspec.json.encode(now) + b"\n") else None

    def _send(self, lines: bytes) -> bool:
        try:
            self._socket.sendall(lines)
        except OSError:
            self._socket.close()
            return False
        return True

    def _trouble(self) -> str:
        try:
            code = self._process.wait(_STUCK_SECONDS)
        except subprocess.TimeoutExpired:
            what = "takes nothing any more"
        else:
            what = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        file = f", and {self._history} ends here" if self._history else ""
        return (
            f"the page's process (pid {self._process.pid}) {what}{file}; the job continues, and `multiverso page` "
            "serves another page of it."
        )

    def close(self) -> None:
        """Ends it, once the browsers that look have the last snapshot."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever else has this end, by a fork
        self._socket.close()
        end_process(self._process, _END_SECONDS)


class Watch(Closing):
    """A thread that looks at a job's node twice a second. Owner: the thread that made it; ``close`` ends it.

    Args:
        page: where what is seen is shown; closed with this.
        say: called with what is to be said where it cannot be shown any more.
        restarts: how often the job was started again before.

    Attributes:
        history: what was seen.
    """

    def __init__(self, page: Page | None, say: Callable[[str], None], restarts: int = 0) -> None:
        self.history = History()
        self._page, self._say = page, say
        self._node: Node | None = None
        self._observer = Observer(restarts)
        self._looking = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiverso-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            with self._looking:
                self._look()

    def _look(self, last: bool = False) -> None:
        came = self._node is not None and self._node.had_workers
        if self._node is not None and (came or (last and self.history.now is None)):
            with contextlib.suppress(Exception):  # what is not seen must not end a job
                now = self._observer.see(with_publications(self._node.status()))
                self._show(now if came else replace(now, workers=[]))

    def _show(self, now: Snapshot) -> None:
        self.history.add(now)
        trouble = self._page.show(now) if self._page is not None else None
        if trouble is not None:
            self._say(trouble)

    @contextlib.contextmanager
    def following(self, node: Node) -> Iterator[None]:
        """Looks at a node, in place of the one before, and once more in the end: then the node may be closed."""
        with self._looking:
            self._node = node
        try:
            yield
        finally:
            with self._looking:
                self._look(last=True)
                self._node = None

    def end(self, result: JobResult, well: bool | None, why: str, first: int | None, stops: bool) -> None:
        """The job is over, and not started again; says so on the page.

        Args:
            result: how this host's workers have ended.
            well: whether the job has; None where a signal has ended it.
            why: how it has, in words.
            first: the worker that failed first, on whichever host.
            stops: whether that ended the job: then others that were lost were so because of it.
        """
        with self._looking:
            self._look(last=True)
            self._node = None  # of which nothing is shown any more
        if self.history.now is not None:
            innocent = {end.worker_id for end in result.exits if not end.failed}

            def state_of(worker: Worker) -> str:
                if stops and worker.id == first:
                    return "failed"
                if stops:  # another host's end may not be known here
                    return "ended" if worker.state in ("lost", "alive") else worker.state
                return "ended" if worker.state == "lost" and worker.id in innocent else worker.state

            workers = [replace(worker, state=state_of(worker)) for worker in self.history.now.workers]
            self._show(replace(self.history.now, workers=workers, over=why, well=well))

    def close(self) -> None:
        """Ends the thread, and the page."""
        self._closing.set()
        self._thread.join()
        if self._page is not None:
            self._page.close()
