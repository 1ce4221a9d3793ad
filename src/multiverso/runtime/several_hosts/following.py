"""Bounded staleness between hosts: a tick counts on another host once what was added before it is there.

Each node looks at the clocks of its own workers, brings what they have added to the homes, and then tells the other
nodes how far they are. A node that is told takes what the homes have, and only then shows the clocks to its own
workers, whose reads wait for them. So a read that goes ahead sees all adds of all workers up to its own clock less
the bound, whatever the network does; where that is slow, reads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from multiverso.hosts.control.messages import Reached
from multiverso.kernels import waits
from multiverso.kernels.between_hosts import node as chained_node
from multiverso.layout import words as at
from multiverso.memory.words import load32
from multiverso.runtime.several_hosts.mirror import read_progress, write_progress
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 0.5


class Clocks:
    """A thread that tells this host's clocks and shows the others'. Owner: whoever made it; ``close`` ends it.

    Args:
        control: address of the control segment, whose event word tells that a clock has moved.
        local: the workers of this host.
        shards: returns the tables by number.
        settle: brings what is in this host's copies of some tables to their homes.
        take: brings what is at the homes into the copies.
        tell: tells the other hosts how far this host's workers are in each table.
        gone_wrong: called with an error that ends it.
    """

    def __init__(
        self,
        control: int,
        local: Iterable[int],
        shards: Callable[[], Mapping[int, Shard]],
        settle: Callable[[Iterable[int]], None],
        take: Callable[[Iterable[int]], None],
        tell: Callable[[Reached], None],
        gone_wrong: Callable[[Exception], None],
    ) -> None:
        self._control, self._local = control, list(local)
        self._shards, self._settle, self._take, self._tell = shards, settle, take, tell
        self._gone_wrong = gone_wrong
        self._tables: set[int] = set()
        self._reported: Reached = {}
        self._received: Reached = {}
        self._lock = threading.Lock()
        self._sleep, self._wake = chained_node.sleep.compiled(), waits.wake.compiled()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiverso-hosts-clocks", daemon=True)
        self._thread.start()

    def follow(self, number: int) -> None:
        """A table has joined the exchange between hosts."""
        with self._lock:
            self._tables.add(number)
        self._wake(self._control)

    def forget(self, number: int) -> None:
        """It is about to leave."""
        with self._lock:
            self._tables.discard(number)
            self._reported.pop(number, None)
            self._received.pop(number, None)

    def hear(self, lines: Reached) -> None:
        """Another host has told how far its workers are; what they have added is at the homes."""
        with self._lock:
            for number, workers in lines.items():
                self._received.setdefault(number, {}).update(workers)
        self._wake(self._control)

    def close(self) -> None:
        """Ends the thread. What it waits for has to end, too: the fabric is closed before, or soon."""
        self._closing.set()
        self._wake(self._control)

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = load32(self._control + at.EVENT)
            try:
                moved = self._show() | self._say()
            except Exception as error:
                if not self._closing.is_set():
                    self._gone_wrong(error)
                return
            if not moved and not self._closing.is_set():
                self._sleep(self._control, event, int(_LONGEST_SECONDS * 1e9))

    def _show(self) -> bool:
        """Takes what those who have told have added, and shows how far they are."""
        with self._lock:
            heard = {number: lines for number, lines in self._received.items() if number in self._tables}
            for number in heard:
                del self._received[number]
        if not heard:
            return False
        self._take(heard)
        shards = self._shards()
        with self._lock:  # one that is forgotten after this may be freed, and its memory another's
            for number, lines in heard.items():
                if number in self._tables and number in shards:
                    write_progress(shards[number], lines)
        self._wake(self._control)
        return True

    def _say(self) -> bool:
        """Reports how far this host's workers are, once what they have added is at the homes."""
        shards = self._shards()
        with self._lock:
            tables = [number for number in self._tables if number in shards]
        found = {number: read_progress(shards[number], self._local) for number in tables}
        changed = {number: lines for number, lines in found.items() if lines != self._reported.get(number)}
        if not changed:
            return False
        self._settle(changed)
        self._tell(changed)
        with self._lock:
            self._reported.update({number: lines for number, lines in changed.items() if number in self._tables})
        return True
