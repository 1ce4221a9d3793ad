"""A worker's desk: where it asks its node for rows on other hosts; ``layout/desk.py`` says what lies there."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import MultiversoError, OutOfMemoryError, TableMismatchError, WorkerLostError
from multiverso.hosts.spread.placement import groups_of
from multiverso.layout import desk
from multiverso.layout import words as at
from multiverso.layout.keyed import GROUPS
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import bump_and_wake, load32, load64, store32, store64, wait_for_change
from multiverso.runtime.session.session import Session
from multiverso.runtime.session.waiting import Patience
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.keyed.progress import done

Bytes = npt.NDArray[np.uint8]
MOST_KEYS = desk.ROOM // 8
_Lane = Literal[0, 1]
_WAIT: _Lane = 0
_LATER: _Lane = 1


class Desk:
    """Owner: the table of its session that was made first; one thread at a time may call.

    Args:
        session: the worker's.
        memory: all workers' desks for this table on this host.
        bell: wakes the node.
        what: the table, in words.
        row_bytes: of a whole row, values and state.

    Attributes:
        homes: the host of each group of keys; it changes when a host is lost or returns.
        here: whether that is this one, as int64.
    """

    def __init__(self, session: Session, memory: SharedMemory, bell: SharedMemory, what: str, row_bytes: int) -> None:
        self._kept, self._bell, self._here = bell, bell.address, session.control.here
        self._session, self._memory, self._what, self._row_bytes = session, memory, what, row_bytes
        self.homes: npt.NDArray[np.int16] = memory.array[desk.HOMES : desk.HOMES + 2 * GROUPS].view(np.int16)
        self.here: Keys = memory.array[desk.HERE : desk.HERE + 8 * GROUPS].view(np.int64)
        self._most_rows = desk.ROOM // (8 + row_bytes)
        # the number of a question, and where the flags that it is answered with go
        self._marks: tuple[int, Keys] | None = None

    def say_added(self) -> None:
        """Says that rows were added to, which the node finds by itself unless it rests."""
        if load32(self._bell + desk.RESTS):
            store32(self._bell + desk.RESTS, 0)
            bump_and_wake(self._bell + desk.RUNG)

    def fetch(self, keys: Keys, deadline: Deadline) -> None:
        """Waits until this host has copies of the rows of keys, which live elsewhere."""
        for low in range(0, keys.size, MOST_KEYS):
            self._ask(desk.FETCH, keys[low : low + MOST_KEYS], deadline)

    def prefetch(self, keys: Keys) -> None:
        """Asks for the rows of keys, and does not wait; nothing happens while the same was asked for before."""
        lane = self._lane(_LATER)
        if load64(lane + desk.ASKED) == load64(lane + desk.DONE):
            self._put(_LATER, desk.FETCH, keys[:MOST_KEYS], 0)

    def flags(self, what: int, keys: Keys, marks: Keys, deadline: Deadline | None) -> None:
        """Writes for each key what the homes answer: REMOVE, whether it had a row, or CONTAINS, whether it has one.

        Args:
            what: it.
            keys: of rows that live elsewhere.
            marks: of each key; those that are not NOT_YET are answers of a call that raised, and stay.
            deadline: None: the session's own time.
        """
        if not keys.size:
            return
        deadline = deadline or self._session.start_deadline()
        self._clear(deadline, keys)
        for low in range(done(marks), keys.size, MOST_KEYS):
            part = slice(low, low + MOST_KEYS)
            self._ask(what, keys[part], deadline, marks=marks[part])

    def is_asking(self, marks: Keys) -> bool:
        """Whether a call of `flags` has raised after it had asked for these."""
        if self._marks is None or self._marks[1].base is not marks:
            return False
        return bool(load64(self._lane(_WAIT) + desk.ASKED) == self._marks[0])

    def count(self, deadline: Deadline) -> int:
        """Returns how many keys have a row on the other hosts."""
        number, _ = self._ask(desk.COUNT_KEYS, self._room(0), deadline)
        return number

    def set_word(self, place: int, value: int, deadline: Deadline) -> None:
        """Sets a word of the table's header on the other hosts."""
        self._ask(desk.SET_WORD, np.array([place, value]), deadline)

    def list_keys(self, host: int, pattern: int, deadline: Deadline) -> tuple[int, Keys]:
        """Returns some keys of a host, candidates too, from a hash pattern on, and where to continue; -1: all came."""
        number, n = self._ask(desk.LIST, self._room(0), deadline, host << 48 | pattern)
        return number, self._room(n).copy()

    def read_whole(self, host: int, keys: Keys, deadline: Deadline) -> tuple[Keys, Bytes]:
        """Returns those of the keys that have a row on a host, and their rows with the updater's state."""
        found, rows = [], []
        for low in range(0, keys.size, self._most_rows):
            _, n = self._ask(desk.READ, keys[low : low + self._most_rows], deadline, host << 48)
            found.append(self._room(n).copy())
            rows.append(self._bytes(n * (8 + self._row_bytes))[8 * n :].reshape(n, self._row_bytes).copy())
        return np.concatenate(found or [keys]), np.concatenate(rows or [np.empty((0, self._row_bytes), np.uint8)])

    def overwrite(self, keys: Keys, rows: Bytes, deadline: Deadline) -> None:
        """Gives keys that live elsewhere these rows, with their state."""
        for low in range(0, keys.size, self._most_rows):
            part = slice(low, low + self._most_rows)
            some = np.ascontiguousarray(rows[part]).reshape(-1)
            self._bytes(8 * keys[part].size + some.size)[8 * keys[part].size :] = some
            self._ask(desk.OVERWRITE, keys[part], deadline)

    @property
    def view(self) -> int:
        """Counted up when `homes` have changed."""
        return load64(self._memory.address + desk.VIEW)

    def raise_if_moved(self, view: int) -> None:
        """In what goes through all rows: raises if they have other homes than in a view before."""
        if self.view != view:
            raise self._error(desk.MOVED, self._session.hosts.index(self._here))

    def raise_if_in_trouble(self) -> None:
        """Before an add, and at a barrier: raises while a host takes none."""
        if code := load64(self._memory.address + desk.TROUBLE):
            raise self._error(code, load64(self._memory.address + desk.TROUBLE_HOST))

    # -- inside ----------------------------------------------------------------------------------------------

    def _lane(self, lane: int) -> int:
        return self._memory.address + desk.lane_at(self._session.index, lane)

    def _bytes(self, count: int) -> Bytes:
        begin = desk.lane_at(self._session.index, _WAIT) + desk.LANE.size
        return self._memory.array[begin : begin + count]

    def _room(self, keys: int) -> Keys:
        return self._bytes(8 * keys).view(np.int64)

    def _put(self, lane: _Lane, what: int, keys: Keys, argument: int) -> int:
        base = self._lane(lane)
        begin = desk.lane_at(self._session.index, lane) + desk.LANE.size
        self._memory.array[begin : begin + 8 * keys.size].view(np.int64)[:] = keys
        number = load64(base + desk.ASKED) + 1
        for word, value in ((desk.WHAT, what), (desk.COUNT, keys.size), (desk.ARGUMENT, argument)):
            store64(base + word, value)
        store64(base + desk.ASKED, number)
        bump_and_wake(self._bell + desk.RUNG)
        return number

    def _ask(
        self, what: int, keys: Keys, deadline: Deadline, argument: int = 0, marks: Keys | None = None
    ) -> tuple[int, int]:
        """Asks the node, and waits; returns a number, and how many keys lie in the room."""
        self._session.check_may_wait()
        lane = self._lane(_WAIT)
        self._clear(deadline, keys)
        if marks is not None:
            self._marks = load64(lane + desk.ASKED) + 1, marks
        self._await(self._put(_WAIT, what, keys, argument), deadline, keys)
        if code := load64(lane + desk.CODE):
            self._marks = None
            raise self._error(code, load64(lane + desk.RESULT))
        answer = (load64(lane + desk.RESULT), load64(lane + desk.FOUND))
        self._take_marks()
        return answer

    def _clear(self, deadline: Deadline, keys: Keys) -> None:
        """Waits for the answer to what a call that raised has asked."""
        self._await(load64(self._lane(_WAIT) + desk.ASKED), deadline, keys)
        self._take_marks()

    def _take_marks(self) -> None:
        if self._marks is not None:
            lane = self._lane(_WAIT)
            number, marks = self._marks
            if load64(lane + desk.ASKED) == number and not load64(lane + desk.CODE):
                marks[:] = self._room(marks.size)
            self._marks = None

    def _await(self, number: int, deadline: Deadline, keys: Keys) -> None:
        done, event = self._lane(_WAIT) + desk.DONE, self._session.control.address + at.EVENT
        if load64(done) >= number:
            return
        hosts = np.unique(self.homes[groups_of(keys)]) if keys.size else range(len(self._session.hosts))
        names = ", ".join(self._session.hosts[host] for host in hosts if self._session.hosts[host] != self._here)
        what = f"rows of the {self._what} that live on {names} (where a worker has to make the table, too)"
        patience = Patience(self._session, deadline, what)
        with self._session.waiting(at.FOR_OTHER_HOSTS, self._memory.number, 0):
            while True:
                seen = load32(event)
                if load64(done) >= number:
                    return
                patience.raise_if_over()
                wait_for_change(event, seen, deadline.slice_left())

    def _error(self, code: int, host: int) -> MultiversoError:
        name = self._session.hosts[host]
        gone = [i for i, place in enumerate(self._session.control.places) if place == name]
        if code == desk.NO_TABLE:
            return WorkerLostError(
                f"no worker of {name} has made the {self._what}, and none is left there that could: there are no rows "
                "of the keys that live there",
                gone,
            )
        if code == desk.HOST_LOST:
            return WorkerLostError(
                f"{name} is lost, and with it the rows of the {self._what} that lived there: load what was saved last "
                "in a new job",
                gone,
            )
        if code == desk.MOVED:
            return WorkerLostError(
                f"a host was lost or has come again while this call went through all rows of the {self._what}, some of "
                "which have moved: call it again",
                self._session.control.lost(),
            )
        if code == desk.OTHER_TABLE:
            return TableMismatchError(
                f"{name} has made a table there with other arguments than the {self._what}: dim, dtype, initial, seed, "
                "updater, admission and copies must be equal in all workers"
            )
        if code == desk.HOST_FULL:
            return OutOfMemoryError(
                f"{name} has no memory for more rows of the {self._what}: what it could not take is kept here, unsent"
            )
        return MultiversoError(f"{name} could not answer what was asked about the {self._what}: see its log")
