"""Workers that end badly, each at an exact place. They run in processes forked from one that has all loaded."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import multiverso as mv
from multiverso.compiling.on_demand import load_module
from multiverso.kernels import dense, rows, waits
from multiverso.kernels.rounds import calls as rounds
from multiverso.layout import words as at
from multiverso.memory.words import load32, load64, store64
from multiverso.runtime import Node, Session
from multiverso.runtime.session.node_link import NodeLink
from multiverso.testing import faults

for module in (dense, rows, rounds):
    load_module(module.__name__, "float32")
for module in (waits, rounds):
    load_module(module.__name__, None)

SIZE = 100_000  # four stripes
Victim = Callable[[Session, Any], None]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def run(address: str, worker_id: int, end: str, pipe: Connection, make: bool = True, **options: Any) -> None:
    """A process: joins, creates the table, says that it is there, and meets its end."""
    session = Session(address, worker_id, timeout_seconds=60, start_timeout_seconds=60, **options)
    table = mv.ArrayTableHandler(SIZE, 1.0, session=session) if make else None
    pipe.send("there")
    pipe.recv()
    ENDS[end](session, table)
    pipe.send("over")
    pipe.recv()


def while_attaching(address: str, worker_id: int, end: str, pipe: Connection) -> None:
    """A process that dies before the others know that it is ready."""
    ask = NodeLink.ask

    def dying(self: NodeLink, message: Any, *rest: Any) -> Any:
        if type(message).__name__.lower() == end:
            pipe.send("there")
            die()
        return ask(self, message, *rest)

    NodeLink.ask = dying  # type: ignore[method-assign]
    Session(address, worker_id)


def shard_of(session: Session) -> Any:
    """The memory of its only table."""
    [shard] = session.tables().values()
    return shard


def _publish(session: Session, base: int) -> None:
    """Says that what was added is ready for the first round, as a worker that leaves does."""
    progress = np.zeros(at.ROUND_MEMBERS, np.int64)
    progress[at.ROUND_STAGED] = progress[at.ROUND_NUMBER] = 1
    rounds.leave.compiled()(session.control.address, base, session.worker_id, progress)


def alone_in_a_round(address: str, end: str, pipe: Connection) -> None:
    """The only one in a round, which is decided; dies before or while it folds when it is told to."""
    session = Session(address, sync=True, start_timeout_seconds=60)
    table = mv.ArrayTableHandler(SIZE, 1.0, name="t", session=session)
    shard = shard_of(session)
    base, line = shard.base, shard.line(0)
    table.add(np.full(SIZE, 10.0))
    _publish(session, base)
    store64(line + at.PROPOSALS + 8, 1)
    store64(base + at.DECISIONS + 8, 1 << 16 | 1)
    pipe.send("decided")
    pipe.recv()
    if end == "while_folding":
        shard.segment.array(shard.places.buffers[1], SIZE, "f4")[:] = -1
    die()


def node(workers: int, pipe: Connection) -> None:
    """A node in a process of its own."""
    with Node(workers) as made:
        pipe.send(made.address)
        pipe.recv()


def holding_a_lock(session: Session, table: Any) -> None:
    """In the middle of an add: two stripes done, the third one half written under its lock."""
    shard = shard_of(session)
    stripe = load64(shard.base + at.STRIPE_SIZE)
    for number in range(3):
        faults.hold_stripe(table, number)
        shard.values()[number * stripe :][: 10 if number == 2 else stripe] += 1
        if number == 2:
            die()
        faults.free_stripe(table, number)


def stopped_with_a_lock(session: Session, table: Any) -> None:
    faults.hold_stripe(table)
    os.kill(os.getpid(), signal.SIGSTOP)
    faults.free_stripe(table)


def before_its_slot_is_ready(session: Session, table: Any) -> None:
    table.add(np.full(SIZE, 10.0))
    die()


def staged(session: Session, table: Any) -> None:
    """Its slot is ready, and it dies before anything is decided or after, as it happens."""
    table.add(np.full(SIZE, 10.0))
    _publish(session, shard_of(session).base)
    die()


def _decided(session: Session, table: Any) -> int:
    """Takes part in the first step up to its decision, and returns its members."""
    table.add(np.full(SIZE, 10.0))
    shard = shard_of(session)
    _publish(session, shard.base)
    while (seen := load64(shard.base + at.DECISIONS + 8)) >> 16 < 1:
        time.sleep(0.001)
    return load64(shard.line((seen & 0xFF) - 1) + at.PROPOSALS + 8)


def before_folding(session: Session, table: Any) -> None:
    _decided(session, table)
    die()


def while_folding(session: Session, table: Any) -> None:
    """Half of its part is written, with something wrong."""
    lo, hi = _part(session, _decided(session, table))
    shard = shard_of(session)
    new = shard.segment.array(shard.places.buffers[1], SIZE, "f4")
    new[lo : (lo + hi) // 2] = -1
    die()


def _part(session: Session, members: int) -> tuple[int, int]:
    number = bin(members).count("1")
    length = (SIZE + number - 1) // number
    length = (length + 15) // 16 * 16
    lo = length * bin(members & ((1 << session.worker_id) - 1)).count("1")
    return lo, min(SIZE, lo + length)


def while_gathering(session: Session, table: Any) -> None:
    """Its part is folded, and others' are not."""
    members = _decided(session, table)
    shard = shard_of(session)
    part = slice(*_part(session, members))
    old, new = (shard.segment.array(shard.places.buffers[i], SIZE, "f4") for i in (0, 1))
    slots = [
        shard.segment.array(shard.places.slots + shard.places.slot_stride * i, SIZE, "f4")
        for i in range(shard.workers)
        if members >> i & 1 and load32(shard.line(i) + at.SOURCES + 4) != 0
    ]
    new[part] = old[part]
    for slot in slots:
        new[part] += slot[part]
    store64(shard.line(session.worker_id) + at.FOLDED, 1)
    session.control.notify()
    die()


def in_the_barrier(session: Session, table: Any) -> None:
    _die_while_waiting(session, at.FOR_BARRIER)
    session.barrier()


def in_a_round(session: Session, table: Any) -> None:
    _die_while_waiting(session, at.FOR_ROUND)
    table.add(np.full(SIZE, 10.0))
    table.get()


def in_a_clock(session: Session, table: Any) -> None:
    _die_while_waiting(session, at.FOR_CLOCK)
    for _ in range(10):
        table.get()


def in_a_creation(session: Session, table: Any) -> None:
    _die_while_waiting(session, at.FOR_TABLE)
    mv.ArrayTableHandler(3, session=session)


def _die_while_waiting(session: Session, kind: int) -> None:
    def look() -> None:
        while load32(session.control.block(session.worker_id) + at.WAIT_KIND) != kind:
            time.sleep(0.001)
        die()

    threading.Thread(target=look, daemon=True).start()


def _in_its_turn(session: Session, initial: str) -> None:
    """Its initial value is half written."""
    from multiverso.spec.table import TableSpec

    def fill(shard: Any, last: bool, of: int) -> None:
        shard.values()[: SIZE // 2] += 7
        die()

    session.open_table(TableSpec("array", 1, SIZE, initial=initial), fill)


def in_its_turn_of_a_sum(session: Session, table: Any) -> None:
    _in_its_turn(session, "sum")


def in_its_turn_of_a_mean(session: Session, table: Any) -> None:
    _in_its_turn(session, "mean")


def exits(session: Session, table: Any) -> None:
    os._exit(0)


def exits_from_the_main_thread(session: Session, table: Any) -> None:
    raise SystemExit(3)


def killed(session: Session, table: Any) -> None:
    die()


def forks(session: Session, table: Any) -> None:
    """A child keeps all its descriptors, and lives on."""
    kept = [os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if _is_socket(fd)]
    assert kept
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0)
        time.sleep(float(os.environ.get("LIVES_SECONDS", "3")))
        os._exit(0)
    die()


def _is_socket(descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:
        return False


def adds_until_killed(session: Session, table: Any) -> None:
    one = np.ones(SIZE, "f4")
    while True:
        table.add(one)


ENDS: dict[str, Victim] = {
    function.__name__: function
    for function in (
        holding_a_lock,
        stopped_with_a_lock,
        before_its_slot_is_ready,
        staged,
        before_folding,
        while_folding,
        while_gathering,
        in_the_barrier,
        in_a_round,
        in_a_clock,
        in_a_creation,
        in_its_turn_of_a_sum,
        in_its_turn_of_a_mean,
        exits,
        exits_from_the_main_thread,
        killed,
        forks,
        adds_until_killed,
    )
}
