"""A keyed table in a synchronous job: adds go to this worker's log, and a read ends a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from multiverso.compiling.on_demand import compile_update
from multiverso.consistency.protocol import Array, Call, RowIds, TableAccess
from multiverso.consistency.synchronous import Synchronous
from multiverso.deadline import Deadline
from multiverso.errors import OutOfMemoryError
from multiverso.kernels.codes import FULL
from multiverso.kernels.keyed import rounds as kernels
from multiverso.layout.words import PAGE, ROUND_STAGED, round_up
from multiverso.memory.segment import SharedMemory
from multiverso.memory.words import store64
from multiverso.runtime.session.session import Session
from multiverso.shards.shard import Shard
from multiverso.signal_safety import turn
from multiverso.spec.table import ROUNDS_OF, TableSpec
from multiverso.tables.held import access_to
from multiverso.tables.keyed.calls import KeyedCalls
from multiverso.tables.keyed.memory import KeyedMemory, memory_name, physical_memory
from multiverso.tables.keyed.spec import KeyedSpec
from multiverso.tables.operations import Operations
from multiverso.updaters import Updater

_MOST_BYTES = 1 << 44  # of addresses for all logs


class KeyedRounds(Synchronous):
    """A keyed table's rounds in this worker: those of a small table beside it, gone through with other kernels.

    Owner: the session, which flushes and ends it as it does a handler. See ``kernels/keyed/rounds.py``.

    Args:
        session: the worker's.
        called: what the job calls the keyed table.
        access: to the small table.
        number: the small table's.
        memory, calls: of the keyed table.
        logs: memory for what each worker adds in a round.
    """

    def __init__(
        self,
        session: Session,
        called: str,
        access: TableAccess,
        number: int,
        memory: KeyedMemory,
        calls: KeyedCalls,
        logs: SharedMemory,
    ) -> None:
        super().__init__(access)
        self.called, self.operations = called, Operations(self, access.name)
        self.memory, self.calls = memory, calls
        self._session, self._number, self._logs = session, number, logs
        self._lock = calls.lock  # a worker has one undo slot in the table
        calls.refuse = self._refuse_in_round
        self._none = np.empty(0, self._dtype)
        kernels.go.compiled(self._dtype)

    @classmethod
    def of(cls, session: Session, called: str, spec: KeyedSpec, updater: Updater) -> KeyedRounds:
        """Opens a keyed table with its rounds; in this worker they are not open yet, or only since a call that raised.

        Raises:
            TableMismatchError: other workers asked for another table.
        """
        for handle in session.handles:
            if isinstance(handle, KeyedRounds) and handle.called == called:
                return handle
        # all workers make a table without a name together, as they make others in such a job
        small = TableSpec(
            "array",
            1,
            kernels.PARTS,
            spec.dtype,
            name=spec.name and f"keyed table {spec.name}",
            mean=updater.mean,
            rule=f"the rounds of a {replace(spec, name=None)}",
            holds=ROUNDS_OF + called,
        )
        number, shard = session.open_table(small, _leave_zeros)
        memory = KeyedMemory.of(session, called, spec)
        update = 0 if updater.name == "add" else compile_update(updater.apply, spec.dtype)
        name = small.name or f"the {spec}"
        access = access_to(session, shard, update, name)
        calls = KeyedCalls(session, memory, spec)
        logs = _open_logs(session, f"{memory_name(called)}-logs", spec)
        rounds = cls(session, called, access, number, memory, calls, logs)
        session.adopt(rounds, number, shard)
        return rounds

    def add_rows(
        self, ids: RowIds, delta: Array, call: Call, deadline: Deadline | None = None, weight: int = 0
    ) -> None:
        """Adds to this worker's log of the round."""
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            self.calls.make_room(ids.size)
            code = kernels.stage.compiled(self._dtype)(
                self.memory.address, self._logs.address, self._me, self._progress, ids, delta, call.address
            )
            if code == FULL:
                raise OutOfMemoryError(f"{self.access.name} has no room for so many keys in one round")

    def get_rows(self, ids: RowIds, out: Array, call: Call, deadline: Deadline | None) -> None:
        """Goes through a round, or through what is left of it, and reads rows of keys."""
        places = (self._control, self._base, self.memory.address, self._logs.address, self._update)
        go, end = kernels.go.compiled(self._dtype), kernels.end.compiled()

        def go_and_read() -> int:
            code = go(*places, self._me, self._progress, self._none)
            if code == FULL:
                raise self.calls.full()
            if code == 0:
                self.calls.read(ids, out.ctypes.data, deadline)
                end(self._base, self._me, self._progress, out.size, call.address)
            return code

        self._read("get", go_and_read, deadline)

    def get_rows_again(self, ids: RowIds, out: Array) -> None:
        """Reads what the last round has left: no other round ends without this worker."""
        with turn(self._lock, self.access.name):
            self.calls.read(ids, out.ctypes.data, None)

    def logged(self) -> tuple[Array, Array] | None:
        """Returns a copy of what this worker has added since its last read, (n, dim) and its keys (n,), or None."""
        with turn(self._lock, self.access.name):
            self._refuse_in_round()
            if not self._progress[ROUND_STAGED]:
                return None
            logs = self._logs.array
            stride, keys, deltas, _ = (int(word) for word in logs[: kernels.CAPACITY + 8].view(np.int64))
            log = kernels.FIRST + stride * self._me
            count, dim = int(logs[log : log + 8].view(np.int64)[0]), self.memory.word("COLUMNS")
            end = log + deltas + count * dim * np.dtype(self._dtype).itemsize
            found = logs[log + deltas : end].view(self._dtype).reshape(count, dim)
            return found.copy(), logs[log + keys : log + keys + 8 * count].view(np.int64).copy()

    def log_again(self, deltas: Array, keys: RowIds) -> None:
        """Adds what `logged` returned."""
        self.add_rows(keys, deltas.reshape(-1), Call())

    def close(self) -> None:
        """Ends this worker's part; may be called again."""
        self._session.close_memory(self._logs)
        self._session.dismiss(self, self._number)

    def _flush_until(self, deadline: Deadline) -> None:
        self.operations.settle(deadline)

    def _raise_if_unsent(self) -> None:
        """Nothing is kept from other hosts."""

    def _leave(self) -> None:
        self.leave()


def _open_logs(session: Session, name: str, spec: KeyedSpec) -> SharedMemory:
    """Returns memory for a log of each worker; pages that are not written take none."""
    workers = session.control.capacity
    room = min(_MOST_BYTES // workers, physical_memory())
    capacity = room // (spec.log_bytes + spec.row_bytes)
    keys = round_up(kernels.INDEX + 8 * kernels.places_for(capacity), PAGE)
    deltas = round_up(keys + 8 * capacity, PAGE)
    stride = round_up(deltas + (capacity + 1) * spec.dim * np.dtype(spec.dtype).itemsize, PAGE)

    def initialise(memory: SharedMemory) -> None:
        for word, value in (
            (kernels.STRIDE, stride),
            (kernels.KEYS, keys),
            (kernels.DELTAS, deltas),
            (kernels.CAPACITY, capacity),
        ):
            store64(memory.address + word, value)

    size = kernels.FIRST + stride * workers
    return session.shared_memory(name, size, initialise, sparse=True, once=spec.name is None)


def _leave_zeros(shard: Shard, last: bool, number: int) -> None:
    """The values of the small table mean nothing."""
