"""A keyed table's kernels as a worker calls them: one at a time, each to its end, with deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from multiverso.deadline import Deadline
from multiverso.errors import ClosedError, OutOfMemoryError
from multiverso.hosts.spread.placement import groups_of
from multiverso.kernels.codes import FULL
from multiverso.kernels.keyed import calls as kernels
from multiverso.kernels.keyed import removal as removal
from multiverso.layout.keyed import ELSEWHERE
from multiverso.memory.heap import Budget
from multiverso.memory.words import store64
from multiverso.runtime.session.session import Session
from multiverso.signal_safety import holds, new_lock, turn
from multiverso.tables.convert import Array
from multiverso.tables.keyed.keys import Keys
from multiverso.tables.keyed.memory import Growth, KeyedMemory
from multiverso.tables.keyed.progress import Adding, Call, Evicting, Removing, done
from multiverso.tables.keyed.spec import KeyedSpec

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
_MOST_AT_ONCE = 1 << 16
SHORT_SECONDS = 0.001  # what an add spends on keys beyond the most that there may be
_ALL = np.empty(0, np.int64)


class _Mine(threading.local):
    """Each thread's call that has begun and not returned to its caller; it raised, or is interrupted just now."""

    call: Call | None = None


class KeyedCalls:
    """This worker's calls on a keyed table. Owner: the table of its session that was made first.

    A worker has one undo slot, so it makes one call at a time, whatever its threads ask for. An add or a removal that
    raised with a part of it done is finished before anything else is (`settle`), and recognised when its thread makes
    it again (`make`). What works on the table as a whole goes
    through `alone`.

    Attributes:
        is_here: of each group of keys, whether the table has it: an add may name others, which it leaves out. Empty: it
            has all.
        lock: held by the call that is under way.
        refuse: raises where no call may be made: in the middle of a round of a synchronous job.
    """

    def __init__(self, session: Session, memory: KeyedMemory, spec: KeyedSpec, is_here: Keys = _ALL) -> None:
        self._session, self._memory, self._spec = session, memory, spec
        self.is_here = is_here
        self._is_here_at = is_here.ctypes.data if is_here.size else 0  # as the kernel takes it
        self.lock = new_lock()
        self.refuse: Callable[[], None] = _allow
        self._mine = _Mine()
        self._unfinished: Adding | Removing | None = None
        self._closed: str | None = None  # why nothing is done any more
        self._rows_done = memory.position(session.index)  # of the add that is under way
        self._growth = Growth(memory, spec.row_bytes)
        self._budget = Budget()
        self._most_keys = (spec.eviction.most_keys if spec.eviction else None) or 0
        enter = kernels.enter.compiled()
        arguments = (session.control.address, memory.address, session.index)
        code = enter(*arguments)
        if code:
            session.resume(code, lambda: enter(*arguments), None, f"a row of the {spec}")

    # -- rows ------------------------------------------------------------------------------------------------

    def get(self, keys: Keys, out: Array, deadline: Deadline | None) -> None:
        """Writes the rows of keys, or their initial rows."""
        with turn(self.lock, self._spec):
            self.ready(deadline)
            self.read(keys, out.ctypes.data, deadline)

    def read(self, keys: Keys, out: int, deadline: Deadline | None) -> None:
        """As `get`, under the lock, to an address."""
        try:
            rows = self._find(keys, deadline)
            self.run(kernels.read, (keys, rows, out), deadline)
        except BaseException:
            self.release()
            raise

    def add(self, call: Call, deadline: Deadline | None) -> None:
        """Gives each key's delta to the updater, once it has a row. Within `make`, as are `remove` and `evict`."""
        self._do(call, deadline)
        if self._most_keys and self.excess() > self._most_keys // 16:
            self.evict_excess()

    def overwrite(self, keys: Keys, rows: npt.NDArray[np.uint8]) -> None:
        """Gives each key these bytes as its row, while the table is not used otherwise."""
        self.alone(self._overwrite, keys, rows)

    def _overwrite(self, keys: Keys, rows: npt.NDArray[np.uint8]) -> None:
        new = Adding.of(0, keys, rows, 1)
        self._admit(new, None)
        here = new.rows != ELSEWHERE
        places, rows = new.rows[here], rows[here]
        self._memory.rows()[places, : rows.shape[1]] = rows
        stamps = self._memory.stamps()
        stamps[places] = self._memory.word("GENERATION")

    def set_word(self, place: int, value: int) -> None:
        """Sets a word of the table's header, on all hosts."""
        store64(self.address + place, value)

    def contains(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Returns whether each key has a row."""
        found: npt.NDArray[np.bool_] = self.find(keys) >= 0
        return found

    def find(self, keys: Keys) -> Keys:
        """Returns the rows of keys (-1: none), which may be other keys' by the time that it returns."""
        return self.alone(self._find, keys, None)

    # -- going -----------------------------------------------------------------------------------------------

    def remove(self, call: Call, deadline: Deadline | None) -> npt.NDArray[np.bool_]:
        """Removes keys; returns which of them had a row."""
        work = self._do(call, deadline)
        assert isinstance(work, Removing)
        gone: npt.NDArray[np.bool_] = work.removed != 0
        return gone

    def evict(self, call: Call, seconds: float | None) -> int:
        """Evicts keys until all of the table was looked at, or a time is over: how many.

        Before that a tick advances the table's time, also of a table that evicts nothing.
        """
        turn(self.lock, self._spec)  # refuses before the time advances
        self._begin(call)
        work = call.work
        assert isinstance(work, Evicting)
        if work.tick is not None:
            self._memory.set_word("TICK", work.tick)
        return self._evict(work.seen, seconds) if self._spec.eviction is not None else 0

    def evict_excess(self) -> None:
        """Evicts keys for a moment, as a part of another call, after which a thread may have closed the table."""
        with suppress(ClosedError):
            self._evict(np.zeros(2, np.int64), SHORT_SECONDS)

    def _evict(self, seen: Keys, seconds: float | None) -> int:
        end = 2**62 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)
        evict, places = removal.evict.compiled(), (self._session.control.address, self._memory.address)
        with turn(self.lock, self._spec):
            while seen[0] < removal.WHOLE:
                self._clear(None)  # a slice at a time: the interpreter may have a signal to handle
                slice_end = min(end, time.monotonic_ns() + 50_000_000)
                evict(*places, self._session.index, seen, slice_end)
                if time.monotonic_ns() >= end:
                    break
        return int(seen[1])

    def excess(self) -> int:
        """Returns how many keys there are beyond what the table's eviction allows, roughly; of a closed table none."""
        with turn(self.lock, self._spec):
            return 0 if self._closed is not None else removal.excess.compiled()(self._memory.address)

    # -- one kernel at a time --------------------------------------------------------------------------------

    def alone(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Calls a function with none of this worker's other calls meanwhile, and none half done before.

        Rows that it finds are no other key's until it ends.
        """
        with turn(self.lock, self._spec):
            self.ready(None)
            try:
                return work(*arguments, **named)
            finally:
                self.release()

    def bytes_of(self, rows: Keys, size: int) -> npt.NDArray[np.uint8]:
        """Returns the first bytes of rows that are pinned."""
        out = np.empty((rows.size, size), np.uint8)
        self.run(kernels.read_whole, (np.ascontiguousarray(rows), out.ctypes.data, size), None)
        return out

    def run(
        self, kernel: Any, arguments: tuple[Any, ...], deadline: Deadline | None, *updater: int, progress: int = 0
    ) -> None:
        """Runs a kernel to its end, from some progress on; under the lock."""
        compiled, session = kernel.compiled(), self._session
        control, base, me = session.control.address, self._memory.address, session.index
        code = [compiled(control, base, *updater, me, *arguments, progress)]
        if code[0] & 0xFFFF == FULL:
            raise self.full()
        if code[0]:

            def again() -> int:
                code[0] = compiled(control, base, *updater, me, *arguments, code[0] >> 16)
                if code[0] & 0xFFFF == FULL:
                    raise self.full()
                return int(code[0])

            session.resume(code[0], again, deadline, self.what)

    # -- calls that raised -----------------------------------------------------------------------------------

    def settle(self, deadline: Deadline | None) -> None:
        """Finishes what an exception has left half."""
        if self._unfinished is not None and not holds(self.lock):  # else this is inside of that call
            with turn(self.lock, self._spec):
                self.ready(deadline)

    def make(self, work: Adding | Removing | Evicting, do: Callable[[Call, D], T], until: D) -> T:
        """Makes a user's call by ``do(call, until)``; if that raises, the same again continues with what was done.

        Its last step calls no function: no signal's handler runs between it and the user's return.
        """
        call = Call(work)
        try:
            result = do(call, until)
        except BaseException:
            call.raised = True  # in one step: everything else is recorded already
            call.work.keep()
            raise
        self._mine.call = call.outer
        return result

    def _begin(self, call: Call) -> None:
        """Notes a call of this thread's; it continues with what one that raised has done, if it is its repetition."""
        before = self._mine.call
        if before is not None:
            call.outer = self._interrupted()
        while before is not None and before is not call.outer:  # those that raised, a handler's before what it was in
            if before.work.is_same(call.work):
                call.work = before.work
                break
            before = before.outer
        self._mine.call = call

    def _interrupted(self) -> Call | None:
        """Returns the call of this thread that is under way, outside of the lock, while a handler makes another."""
        call = self._mine.call
        while call is not None and call.raised:
            call = call.outer
        return call

    def ready(self, deadline: Deadline | None) -> None:
        """Before a call that reads, under the lock. Its caller has continued without repeating one that raised."""
        self._clear(deadline)
        if self._mine.call is not None:
            self._mine.call = self._interrupted()

    def _clear(self, deadline: Deadline | None) -> None:
        """Before each call, under the lock: session and table are open, and nothing is half done."""
        self._session.check()
        if self._closed is not None:
            raise ClosedError(self._closed)
        self.refuse()
        if self._unfinished is not None:
            self._finish(self._unfinished, deadline)

    def _do(self, call: Call, deadline: Deadline | None) -> Adding | Removing:
        """Makes an add or a removal, or what is left of one."""
        with turn(self.lock, self._spec):  # a handler's call, refused or made while this waits, leaves no trace
            self._begin(call)
            work = call.work
            assert not isinstance(work, Evicting)
            self.finish(work, deadline)
        return work

    def finish(self, work: Adding | Removing, deadline: Deadline | None) -> None:
        """Does an add or a removal, or what is left of one, under the lock."""
        if self._unfinished is not work:
            self._clear(deadline)
        if not work.complete:
            self._finish(work, deadline)

    def _finish(self, call: Adding | Removing, deadline: Deadline | None) -> None:
        """Does what is left of a call. If that raises, it is kept, unless nothing was done or nothing can be."""
        if self._unfinished is not call:
            self._rows_done.value = 0
        try:
            self._unfinished = call
            self._session.check()
            if isinstance(call, Adding):
                self._finish_add(call, deadline)
            else:
                self._finish_removal(call, deadline)
            call.complete = True
            self._unfinished = None
        except BaseException as error:
            if isinstance(error, OutOfMemoryError) or not self.has_begun(call):
                self._unfinished = None
                call.forget()
                self.release()
            else:
                call.keep()
            raise

    def has_begun(self, call: Adding | Removing) -> bool:
        """Returns whether any of a call is done that is to be finished even if it is not repeated."""
        return call.has_begun(self._rows_done.value)

    def is_half_done(self, call: Adding | Removing) -> bool:
        """Returns whether a call raised with a part of it done."""
        return self._unfinished is call

    def abandon(self) -> None:
        """What is left of a call that raised is not to be done any more."""
        self._unfinished = None

    def _finish_removal(self, call: Removing, deadline: Deadline | None) -> None:
        self.run(removal.remove, (call.keys, call.removed), deadline, progress=done(call.removed))

    def _finish_add(self, call: Adding, deadline: Deadline | None) -> None:
        self._admit(call, deadline)
        rows, progress = call.rows, self._rows_done.value
        if not rows.size or progress < rows.size:
            arguments = (rows, call.delta.ctypes.data)
            self.run(kernels.add, arguments, deadline, call.updater, progress=progress)

    def close(self, reason: str) -> None:
        """Finishes what is half done; every later call raises ClosedError. May be called again."""
        with turn(self.lock, self._spec):
            if self._closed is None:
                self.ready(None)
                self._closed = reason

    # -- inside ----------------------------------------------------------------------------------------------

    def _find(self, keys: Keys, deadline: Deadline | None) -> Keys:
        rows = np.empty(keys.size, np.int64)
        self.run(kernels.find, (keys, rows), deadline)
        return rows

    def _admit(self, call: Adding, deadline: Deadline | None) -> None:
        """Enters the keys of a call that have no entry yet, and writes the rows of all."""
        most = min(_MOST_AT_ONCE, self._growth.most_at_once)
        for start in range(done(call.rows), call.keys.size, most):
            part = slice(start, start + most)
            keys = call.keys[part]
            if number := int(np.count_nonzero(self.is_here[groups_of(keys)])) if self._is_here_at else keys.size:
                self.make_room(number)
            self.run(kernels.admit, (self._is_here_at, keys, call.rows[part], call.call), deadline)

    def make_room(self, keys: int) -> None:
        """Gets memory ready for so many more rows, if the machine has it, which is looked at now and then."""
        free = self._budget.shortage(keys * self._memory.bytes_a_key)
        if free is not None:
            raise OutOfMemoryError(
                f"{self._spec!s} has {self._memory.rows_handed_out():,} rows, and only {free / 1e6:,.0f} MB of memory "
                "are available: no rows can be added to new keys"
            )
        self._growth.prepare(keys)

    def hold(self) -> None:
        """From here on no row of a removed key is another key's, and what lives here does, until `release`."""
        kernels.hold.compiled()(self._memory.address, self._session.index)

    def release(self) -> None:
        """Ends what pins the rows that were found; under the lock."""
        kernels.release.compiled()(self._memory.address, self._session.index)

    @property
    def address(self) -> int:
        """Where the table begins."""
        return self._memory.address

    @property
    def what(self) -> str:
        """The thing that a wait is for, in words."""
        return f"a row of the {self._spec}"

    def full(self) -> OutOfMemoryError:
        """Returns the error for keys that there is no row for."""
        return OutOfMemoryError(
            f"the {self._spec} is full, or the machine's memory is: it has {self._memory.rows_handed_out():,} rows"
        )


def _allow() -> None:
    """Calls may be made at any time."""
