"""Threads of a node that follow what its workers do, woken by the control segment's event word.

Bounded staleness between hosts: a tick counts on another host once what was added before it is there. Each node looks
at the clocks of its own workers, brings what they have added to the homes, and then reports to the other nodes how far
they are. A node that receives this takes what the homes have, and only then shows the clocks to its own workers, whose
reads wait for them. So a read that goes ahead sees all adds of all workers up to its own clock less the bound, whatever
the network does; where that is slow, reads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from multiverso.hosts.control.messages import Clocks as ClocksReport
from multiverso.hosts.control.messages import Reached, Report
from multiverso.hosts.fabric import Fabric
from multiverso.kernels import waits
from multiverso.kernels.between_hosts import node as chained_node
from multiverso.layout import words as at
from multiverso.memory.words import load32
from multiverso.runtime.several_hosts.mirror import read_progress, write_progress
from multiverso.runtime.several_hosts.moving import Mover, move_deadline
from multiverso.shards.shard import Shard

_LONGEST_SECONDS = 0.5


class Follower:
    """A thread that looks after each event of this host's workers. Owner: its maker; ``close`` ends it.

    Args:
        control: address of the control segment, whose event word is watched.
        name: what is followed.
        look: returns the seconds after which it wants to be called without an event, or None.
        mover: whose node ends if this thread does.
    """

    def __init__(self, control: int, name: str, look: Callable[[], float | None], mover: Mover) -> None:
        self._control, self._look = control, look
        self._sleep, self._wake = chained_node.sleep.compiled(), waits.wake.compiled()
        self._closing = threading.Event()
        self._thread = mover.thread(f"multiverso-hosts-{name}", self._run)
        self._thread.start()

    def wake(self) -> None:
        """Wakes it, and all of this host that wait for an event."""
        self._wake(self._control)

    def close(self) -> None:
        """Ends the thread, once what it waits for has ended."""
        self._closing.set()
        self.wake()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            event = load32(self._control + at.EVENT)
            wait = self._look()
            seconds = _LONGEST_SECONDS if wait is None else min(wait, _LONGEST_SECONDS)
            if not self._closing.is_set():
                self._sleep(self._control, event, int(seconds * 1e9))


class Clocks:
    """Tells this host's clocks and shows the others'. Owner: its maker; ``close`` ends its thread.

    Args:
        control: address of the control segment.
        local: the workers of this host.
        shards: returns the tables by number.
        fabric: moves their values.
        tell: reports to the coordinator.
        mover: whose node ends if this thread does.
    """

    def __init__(
        self,
        control: int,
        local: Iterable[int],
        shards: Callable[[], Mapping[int, Shard]],
        fabric: Fabric,
        tell: Callable[[Report], None],
        mover: Mover,
    ) -> None:
        self._local, self._shards = list(local), shards
        self._fabric, self._tell = fabric, tell
        self._tables: set[int] = set()
        self._reported: Reached = {}
        self._received: Reached = {}
        self._lock = threading.Lock()
        self._follower = Follower(control, "clocks", self._look, mover)
        self.close, self.join = self._follower.close, self._follower.join

    def follow(self, number: int) -> None:
        """A table has joined the exchange between hosts."""
        with self._lock:
            self._tables.add(number)
        self._follower.wake()

    def forget(self, number: int) -> None:
        """It is about to leave."""
        with self._lock:
            self._tables.discard(number)
            self._reported.pop(number, None)
            self._received.pop(number, None)

    def hear(self, lines: Reached) -> None:
        """Another host has reported how far its workers are; what they have added is at the homes."""
        with self._lock:
            for number, workers in lines.items():
                self._received.setdefault(number, {}).update(workers)
        self._follower.wake()

    def _look(self) -> float | None:
        return 0.0 if self._show() | self._say() else None

    def _show(self) -> bool:
        """Takes what the reporting hosts have added, and shows how far they are."""
        with self._lock:
            heard = {number: lines for number, lines in self._received.items() if number in self._tables}
            for number in heard:
                del self._received[number]
        if not heard:
            return False
        self._fabric.take(move_deadline(), heard)
        shards = self._shards()
        with self._lock:  # one that is forgotten after this may be freed, and its memory another's
            for number, lines in heard.items():
                if number in self._tables and number in shards:
                    for worker, progress in lines.items():
                        write_progress(shards[number], worker, progress)
        self._follower.wake()
        return True

    def _say(self) -> bool:
        """Reports how far this host's workers are, once what they have added is at the homes."""
        shards = self._shards()
        with self._lock:
            tables = [number for number in self._tables if number in shards]
        found = {number: {i: read_progress(shards[number], i) for i in self._local} for number in tables}
        changed = {number: lines for number, lines in found.items() if lines != self._reported.get(number)}
        if not changed:
            return False
        self._fabric.settle(move_deadline(), changed)
        self._tell(ClocksReport(changed))
        with self._lock:
            self._reported.update({number: lines for number, lines in changed.items() if number in self._tables})
        return True
