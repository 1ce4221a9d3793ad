"""What a link has to send, and in which order: words, answers, what is sent again, what somebody waits for, passes.

Owner: the link, whose lock guards it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from multiverso.hosts.peer.frames import Outgoing
from multiverso.hosts.values.pace import Pace
from multiverso.hosts.values.state import Away, LinkTable, UnderWay


class Queues:
    """A link's queues.

    Args:
        window: chunks that are under way at a time, at most.
        pace: the node's budget, for what nobody waits for.
    """

    def __init__(self, window: int, pace: Pace) -> None:
        self.words: deque[Outgoing] = deque()
        self.answers: deque[Outgoing] = deque()
        self.bytes_window: float = math.inf  # no chunk begins while so many bytes are under way
        self._window = window
        self._under_way = self._bytes_under_way = 0
        self._pace = pace
        self._again: deque[UnderWay] = deque()
        self._urgent: deque[tuple[LinkTable, Away]] = deque()
        self._todo: deque[tuple[LinkTable, Away]] = deque()

    @property
    def someone_waits(self) -> bool:
        """Whether somebody here waits for a settle."""
        return bool(self._urgent)

    def ask(self, table: LinkTable, part: Away) -> None:
        """Somebody waits for a chunk; one that is under way is asked for when it comes back."""
        if not part.urgent and not part.busy:
            part.urgent = True
            self._urgent.append((table, part))

    def begin_pass(self, table: LinkTable, parts: Iterable[Away], rest: bool) -> None:
        """Chunks of a table that go when the budget allows; ``rest``: what earlier pushes have left."""
        for part in parts:
            part.passing = part.queued = True
            part.rest = rest
            table.passing += 1
            self._todo.append((table, part))

    def passed(self, table: LinkTable, part: Away, again: bool) -> bool:
        """A chunk has come back, and goes ``again`` with the next pass. Returns whether a pass is over."""
        if again:
            table.again.add(part.chunk.number)
        if not part.passing or part.queued:
            return False
        part.passing = False
        table.passing -= 1
        return table.passing == 0

    def send_again(self, table: LinkTable) -> None:
        """A connection, or new homes, have begun: what is under way may never have arrived."""
        self._again.extend(part.frame for part in table.away.values() if part.frame is not None)

    def drop_again(self) -> None:
        """The connection has ended."""
        self._again.clear()

    def forget(self, table: LinkTable) -> None:
        """Drops all frames of a table."""
        for queue in (self._urgent, self._todo):
            kept = [entry for entry in queue if entry[0] is not table]
            queue.clear()
            queue.extend(kept)
        mine = [part.frame for part in table.away.values() if part.frame is not None]
        kept_again = [frame for frame in self._again if frame not in mine]
        self._again.clear()
        self._again.extend(kept_again)
        for part in table.away.values():
            if part.frame is not None:
                # a part of it may still be to send: its memory is not used again
                self._end(part)
            part.urgent = part.queued = part.passing = False
        table.passing = 0

    @property
    def has_something(self) -> bool:
        """Whether any queue has something."""
        return bool(self.answers or self._todo or self._urgent or self.words or self._again)

    def wait(self, now: float) -> float | None:
        """Returns the seconds until there is something to send: 0 for at once, None when only an event can tell."""
        if self.words or self.answers or self._again:
            return 0.0
        if self._is_full:
            return None
        if any(table.ready for table, _ in self._urgent):
            return 0.0
        return self._pace.wait(now) if self._todo else None

    def take_made(self) -> Outgoing | None:
        """Returns the first frame that need not be made first."""
        if self.words:
            return self.words.popleft()
        if self.answers:
            return self.answers.popleft()
        if self._again:
            frame = self._again.popleft()
            return Outgoing(frame.header, frame.body)
        return None

    def choose(self, now: float, most: int) -> tuple[LinkTable, Away] | None:
        """Returns the chunk to push next, which is under way from now on."""
        if self._is_full:
            return None
        found = self._choose_urgent(most) or self._choose_todo(now, most)
        if found is not None:
            found[1].busy = True
            self._under_way += 1
            self._bytes_under_way += found[1].agreed.nbytes
        return found

    @property
    def _is_full(self) -> bool:
        return self._under_way >= self._window or self._bytes_under_way >= self.bytes_window

    def _choose_urgent(self, most: int) -> tuple[LinkTable, Away] | None:
        for _ in range(len(self._urgent)):
            table, part = self._urgent.popleft()
            if table.ready and table.chunk_bytes <= most:
                part.urgent = False
                if not part.busy:
                    return table, part
            else:
                self._urgent.append((table, part))
        return None

    def _choose_todo(self, now: float, most: int) -> tuple[LinkTable, Away] | None:
        while self._todo and self._todo[0][0].chunk_bytes <= most and self._pace.wait(now) == 0.0:
            table, part = self._todo.popleft()
            part.queued = False
            if table.ready and not part.busy:
                return table, part
            self.passed(table, part, again=True)  # under way for a settle: the next pass has the rest
        return None

    def came_back(self, part: Away) -> None:
        """A chunk is under way no more."""
        if part.frame is not None and part.frame in self._again:  # its answer crossed new homes
            self._again.remove(part.frame)
        self._end(part)

    def _end(self, part: Away) -> None:
        part.frame, part.busy = None, False
        self._under_way -= 1
        self._bytes_under_way -= part.agreed.nbytes
