"""Where each shared word lies: the control segment and a table's header, in bytes.

The kernels, the node and the sessions all read this page; nothing else knows an offset. Every word has one
writer (a worker writes its own, the node the rest) unless it says otherwise, so a death leaves nothing
half-updated. Words of different writers lie on different cache lines.
"""

from __future__ import annotations

CACHE_LINE = 64
PAGE = 4096
MUTEX_BYTES = 64  # pthread_mutex_t has 40 bytes on x86-64 and 48 on aarch64
MAX_WORKERS = 64  # a round's members are the bits of one 64-bit word

# -- the control segment -----------------------------------------------------------------------------------
EVENT = 0  # int32, all writers: bumped (atomically) by whatever could let a waiter go on; waiters sleep on it
WAITERS = (
    64  # int32, all writers: how many may sleep; a killed waiter leaves it too high, which only costs a wake
)
CAPACITY = 128  # int32: worker blocks in this segment
CONTINUE_WITHOUT_LOST = 132  # int32: 1 when waits go on without lost workers
NODE_LIFE = 192  # robust mutex, held by a thread of the node for as long as it lives
JOB_LOCK = 256  # robust mutex for whoever needs one lock per job

WORKERS = 4096  # the first worker's block
WORKER_STRIDE = 512
LIFE = 0  # robust mutex, held by a thread of the worker for as long as the session lives
FATE = 64  # int32, the node's word: FREE, ALIVE, LOST, GONE
PID = 68  # int32, the node's word
STATE = 128  # int32, the worker's word: NEVER, ACTIVE, LEFT
THREADED = 132  # int32: 1 once several threads used the session, so that one waiting does not mean all wait
BARRIER = 136  # int64: barriers reached
CREATED = 144  # int64: tables asked for by order
WAIT_KIND = 192  # int32: what this worker waits for, a WaitKind
WAIT_SEQ = 196  # int32: bumped before and after the words below change, so that it is odd meanwhile
WAIT_TABLE = 200  # int32: number of the table, or of the shared memory (below 0)
WAIT_STAGE = 204  # int32: of a round: 0 collecting it, 1 folding it; of a reduction: how many take part
WAIT_TARGET = 208  # int64: number of the barrier, step, clock or table; of a lock: its offset in the table
WAIT_SINCE = 216  # int64: CLOCK_MONOTONIC nanoseconds
WAITED_NS = 224  # int64: time spent in finished waits
GAVE_UP = 232  # int64: CLOCK_MONOTONIC nanoseconds of its last DeadlockError, for the others in the deadlock

# FATE
FREE, ALIVE, LOST, GONE = 0, 1, 2, 3
# STATE
NEVER, ACTIVE, LEFT = 0, 1, 2
# WAIT_KIND
NOTHING, FOR_BARRIER, FOR_ROUND, FOR_CLOCK, FOR_TABLE, FOR_LOCK, FOR_REDUCTION = range(7)

# -- a table -----------------------------------------------------------------------------------------------
# int64 words at the table's first byte; offsets are from there
MAGIC, ELEMENTS, STRIPE, STRIPES, ITEMSIZE, COLUMNS, TABLE_WORKERS, MODE = (8 * word for word in range(8))
LOCKS, BUFFER_0, BUFFER_1, STATE_0, STATE_1, STATES, SLOTS, SLOT_STRIDE, LINES = (
    64 + 8 * w for w in range(9)
)
TABLE_ID = 136
CHUNK, CHUNKS, SMALL_SLOTS = (
    144,
    152,
    160,
)  # elements of a chunk, chunks of a round, where a slot's small ones begin
MEAN = 168  # 1 when the updater gets the mean of a round's contributions instead of their sum
COMMITTED = 192  # int64: the last finished round; all members write the same value
DECISIONS = 256  # 2 x int64, compare-and-swap: see rounds._step_in; for even and odd steps
HYPER = 320  # up to 16 hyperparameters in the table's dtype
TABLE_HEADER = 512

# a worker's line in a table
LINE_STRIDE = 256
ENROLLED = 0  # int32: takes part in this table's rounds and clocks
SOURCES = 4  # 2 x int32, for even and odd rounds: what the slot of the round holds, see kernels/rounds.py
PROPOSALS = 16  # 2 x int64: members of a step, for even and odd steps
STAGED = 32  # int64: the last step of which this worker's slot is ready
FOLDED = 40  # int64: the last step of which this worker's part is folded
FIRST_STEP = 48  # int64: the first step in which this worker takes part
CLOCK = 64  # int64: ticks done (bounded staleness)
ADDS, GETS, EXCHANGES, BYTES, WAITED, RECOVERED = (72 + 8 * word for word in range(6))  # int64
STALENESS_LAST, STALENESS_MAX, STALENESS_SUM, STALENESS_COUNT, SEEN = (128 + 8 * w for w in range(5))  # int64

# a worker's line in the memory of a reduction
REDUCTION_STRIDE = 128
PHASE = 0  # int64: how far it is
SIGNATURES = 8  # 2 x int64, for even and odd phases: what it reduces

# MODE
ASYNCHRONOUS, SYNCHRONOUS, BOUNDED = 0, 1, 2

TABLE_MAGIC = 0x6D756C7469763031
STRIPE_BYTES = 128 * 1024
CHUNK_BYTES = (
    512 * 1024
)  # measured, rounds of 1e7 floats, 2 workers: 11.8 ms with 256 KiB, 9.1, 10.6 with 1 MiB, 15.1 with 2


def round_up(value: int, to: int) -> int:
    """Returns the smallest multiple of ``to`` that is at least ``value``."""
    return -(-value // to) * to


def worker_block(worker_id: int) -> int:
    """Returns the offset of a worker's block in the control segment."""
    return WORKERS + WORKER_STRIDE * worker_id


def control_bytes(capacity: int) -> int:
    """Returns the size of a control segment for ``capacity`` workers."""
    return round_up(WORKERS + WORKER_STRIDE * capacity, PAGE)
