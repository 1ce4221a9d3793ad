"""Where each shared word lies: the control segment, a table's header, a worker's line in a table, in bytes.

The kernels, the node and the sessions all read this page; nothing else knows an offset. A new word is one line here.
Every word has one writer (a worker writes its own, the node the rest) unless it says otherwise, so a death leaves
nothing half-updated. Words of different writers lie on different cache lines (``apart``)::

    control segment                                 a table, somewhere in an arena
    +--------------------------------+              +---------------------------------------------+
    | CONTROL: event, waiters, ...   |  4096 bytes  | TABLE: sizes, places, decisions, hyper      |  768 bytes
    +--------------------------------+              +---------------------------------------------+
    | WORKER 0: life, liveness, ...  |  512 bytes   | LINE of worker 0, 1, ...: rounds, statistics|  LINES
    +--------------------------------+              +---------------------------------------------+
    | WORKER 1                       |              | without rounds: a word for each stripe      |  WORDS
    +--------------------------------+              +---------------------------------------------+
    | ... and one of the node        |              | without rounds: undo slots of worker 0, 1.. |  UNDO_SLOTS
    +--------------------------------+              +---------------------------------------------+
                                                    | values (in rounds: twice)                   |  BUFFER_0, _1
                                                    +---------------------------------------------+
                                                    | the updater's arrays (in rounds: twice)     |  STATE_0, _1
                                                    +---------------------------------------------+
                                                    | in rounds: a slot for each worker           |  SLOTS
                                                    +---------------------------------------------+
                                                    | each worker's local state (of a rule)        |
                                                    +---------------------------------------------+

A table's parts begin where ``multiverso.spec.table.Places`` puts them; its header says where that is.
"""

from __future__ import annotations

from multiverso.layout import records
from multiverso.layout.records import Record

CACHE_LINE = records.CACHE_LINE
PAGE = 4096
HUGE_PAGE = 2 * 1024 * 1024
# Values begin in the middle of a page: a load looks to the processor as if it hit a store that is on its way when the
# low 12 bits of both addresses agree, and large arrays of NumPy begin 16 bytes into a page, torch's and JAX's 64
SKEW = 2048
MUTEX_BYTES = 64  # pthread_mutex_t has 40 bytes on x86-64 and 48 on aarch64
MAX_WORKERS = 64  # of a host: a round's members there are the bits of one 64-bit word
MOST_WORKERS = 4096  # of a job, on all its hosts together

# -- the control segment -----------------------------------------------------------------------------------
CONTROL = Record(4096)
# all writers: bumped (atomically) by whatever could let a waiter continue; waiters sleep on it
EVENT = CONTROL.int32("event", apart=True)
# all writers: how many may sleep; a killed waiter leaves it too high, which only costs a wake
WAITERS = CONTROL.int32("waiters", apart=True)
CAPACITY = CONTROL.int32("capacity", apart=True)  # indexes of workers, see ``worker_index.py``
CONTINUE_WITHOUT_LOST = CONTROL.int32("continue_without_lost")  # 1 when waits continue without lost workers
NODE_BLOCK = CONTROL.int32("node_block")  # the node's index: how many workers this host has
NODE_LIFE = CONTROL.mutex("node_life")  # held by a thread of the node for as long as it lives
# 1 in a job on several hosts: barriers end when the node says so, as then the others' adds are here, too
SPANS_HOSTS = CONTROL.int32("spans_hosts", apart=True)
RELEASED = CONTROL.int64("released")  # the last barrier that the node has let workers pass
GATHERED = CONTROL.int64("gathered")  # the last gathering that a worker here asked for and that is done
# all writers: 1 when the node sleeps, on this word, until a worker changes a table; who does makes it 0
NODE_RESTS = CONTROL.int32("node_rests", apart=True)

WORKERS = CONTROL.size  # the first worker's block
WORKER_STRIDE = 512
WORKER = Record(WORKER_STRIDE)
LIFE = WORKER.mutex("life")  # held by a thread of the worker for as long as the session lives
LIVENESS = WORKER.int32("liveness", apart=True)  # the node's word: FREE, ALIVE, LOST, GONE
PID = WORKER.int32("pid")  # the node's word
# the node's word: 1 .. 255, a new one for each process that attaches, so that a dead owner's words are known
ATTACHMENT = WORKER.int64("attachment")
PARTICIPATION = WORKER.int32("participation", apart=True)  # the worker's word: NEVER, ACTIVE, LEFT
# 1 once several threads used the session: one's waiting is not the worker's
THREADED = WORKER.int32("threaded")
BARRIER = WORKER.int64("barrier")  # barriers reached
PASSED = WORKER.int64("passed")  # the last barrier that it has passed
CREATED = WORKER.int64("created")  # tables asked for by order
# with a quorum: (round << 20) | (1 + table), see kernels/quorum.py; 0 once the worker was in it. Others clear it
LATE_FOR = WORKER.int64("late_for")
INCARNATION = WORKER.int32("incarnation")  # how many processes had its number before
# what this worker waits for, one of the FOR_ below, or NOT_WAITING
WAIT_KIND = WORKER.int32("wait_kind", apart=True)
# bumped before and after the words below change, so that it is odd meanwhile
WAIT_SEQ = WORKER.int32("wait_seq")
WAIT_TABLE = WORKER.int32("wait_table")  # number of the table, or of the shared memory (below 0)
# of a round: 0 collecting it, 1 folding it; of a reduction: how many take part; of a word: the index
# of who holds it; of batches and other hosts: of which 64 workers the target has bits
WAIT_STAGE = WORKER.int32("wait_stage")
# number of the barrier, step, clock or table; of a lock or word: its offset; of batches, and of a reduction with other
# hosts: whom it waits for, a bit each, by number
WAIT_TARGET = WORKER.int64("wait_target")
WAIT_SINCE = WORKER.int64("wait_since")  # CLOCK_MONOTONIC nanoseconds
WAITED_NS = WORKER.int64("waited_ns")  # time spent in finished waits
# CLOCK_MONOTONIC nanoseconds of its last DeadlockError, for the others in it
GAVE_UP = WORKER.int64("gave_up")
# CLOCK_MONOTONIC nanoseconds: when a wait of it has to look at its deadline, if that is before its slice is over
LOOK_AT = WORKER.int64("look_at")
CHECKPOINT = WORKER.int64("checkpoint")  # what it has handed over, see checkpoints/board.py

# LIVENESS
FREE, ALIVE, LOST, GONE = 0, 1, 2, 3
# PARTICIPATION
NEVER, ACTIVE, LEFT = 0, 1, 2
# WAIT_KIND
NOT_WAITING, FOR_BARRIER, FOR_ROUND, FOR_CLOCK, FOR_TABLE = 0, 1, 2, 3, 4
FOR_LOCK, FOR_REDUCTION, FOR_BATCHES, FOR_WORD, FOR_OTHER_HOSTS = 5, 6, 7, 8, 9

# -- a table -----------------------------------------------------------------------------------------------
TABLE_HEADER = 768
TABLE = Record(TABLE_HEADER)
# written once, before anyone else sees the table
MAGIC = TABLE.int64("magic")
ELEMENTS = TABLE.int64("elements")
STRIPE_SIZE = TABLE.int64("stripe_size")  # elements of a stripe
STRIPE_COUNT = TABLE.int64("stripe_count")
ITEMSIZE = TABLE.int64("itemsize")
COLUMNS = TABLE.int64("columns")
TABLE_WORKERS = TABLE.int64("table_workers")  # indexes of workers
NODE_LINE = TABLE.int64("node_line")  # the node's: so many workers of this host come before it
MODE = TABLE.int64("mode")
LINES = TABLE.int64("lines")  # from here to SLOTS: where parts begin, from the table's first byte
# one for each stripe: lock, version and owner at once, see kernels/stripe_words.py
WORDS = TABLE.int64("words")
UNDO_SLOTS = TABLE.int64("undo_slots")
BUFFER_0 = TABLE.int64("buffer_0")
BUFFER_1 = TABLE.int64("buffer_1")
STATE_0 = TABLE.int64("state_0")
STATE_1 = TABLE.int64("state_1")
SLOTS = TABLE.int64("slots")
SLOT_STRIDE = TABLE.int64("slot_stride")
SMALL_SLOTS = TABLE.int64("small_slots")  # where a slot's small ones begin
STATE_COUNT = TABLE.int64("state_count")  # arrays that the updater keeps
SHIFT = TABLE.int64("shift")  # a row's word is number row >> SHIFT
UNDO_STRIDE = TABLE.int64("undo_stride")  # from one undo slot to the next
KEPT = TABLE.int64("kept")  # bytes of a row that an undo slot keeps, and of each of its updater's arrays; 0: none
TABLE_ID = TABLE.int64("table_id")
CHUNK_SIZE = TABLE.int64("chunk_size")  # elements of a chunk
CHUNK_COUNT = TABLE.int64("chunk_count")  # chunks of a round, which goes through them; with a quorum 1
MEAN = TABLE.int64("mean")  # 1 when the updater gets the mean of a round's contributions instead of their sum
# 1 + place of the count of steps behind the hyperparameters that an updater gets; 0 when it gets none
STEP_PLACE = TABLE.int64("step_place")
HYPER = TABLE.int64("hyper", 8)  # up to 8 hyperparameters in the table's dtype
# written while it is used
# the last finished round; all members write the same value. With a quorum: compare-and-swap, where its values lie, too
COMMITTED = TABLE.int64("committed", apart=True)
# who loads: how many steps there were before those that this table's workers have done
STEPS_BEFORE = TABLE.int64("steps_before")
WRITTEN = TABLE.int64("written")  # all writers: times that the values were overwritten (atomically)
WATCHED = TABLE.int32("watched")  # all writers: 1 when a process sleeps until the table has another version
# all writers: bumped (atomically) when it has; who waits for that sleeps on it
CHANGED = TABLE.int32("changed")
# compare-and-swap, see kernels/rounds/steps.py; for even and odd steps
DECISIONS = TABLE.int64("decisions", 2, apart=True)
# in rounds on several hosts, see kernels/between_hosts/rounds.py; the node's words
TOTALS = TABLE.int64("totals", apart=True)  # where sums of all hosts lie for the updater, from the first byte
ARRIVED = TABLE.int64("arrived")  # the last step whose sum is here
DECIDED = TABLE.int64("decided")  # the last round of which it is known who of this host takes part
TAKING_PART = TABLE.int64("taking_part", 2)  # who that is, a bit each, for even and odd rounds

# a worker's line in a table
LINE_STRIDE = 256
LINE = Record(LINE_STRIDE)
ENROLLED = LINE.int32("enrolled")  # takes part in this table's rounds and clocks
# for even and odd rounds: what the slot of the round holds, see kernels/rounds/folding.py
SOURCES = LINE.int32("sources", 2)
PROPOSALS = LINE.int64("proposals", 2)  # members of a step, for even and odd steps
STAGED = LINE.int64("staged")  # the last step of which this worker's slot is ready
FOLDED = LINE.int64("folded")  # the last step of which this worker's part is folded
FIRST_STEP = LINE.int64("first_step")  # the first step in which this worker takes part
# of another host's worker, the node's word: 1 + its clock as that host says it while it waits, long before what it
# has added is here and CLOCK shows it; 0: not known
REACHED = LINE.int64("reached")
CLOCK = LINE.int64("clock", apart=True)  # ticks done (bounded staleness)
ADDS = LINE.int64("adds")
GETS = LINE.int64("gets")
EXCHANGES = LINE.int64("exchanges")
BYTES = LINE.int64("bytes")
# of words, one after another: those of dead owners, rows that these had half written, waits, nanoseconds waited
COUNTS = LINE.int64("counts", 4)
TAKEN_OVER, PUT_BACK, WAITS, WAITED = (8 * i for i in range(4))
LINE_WAITED = COUNTS + WAITED  # and those of clocks
STALENESS_LAST = LINE.int64("staleness_last")
STALENESS_MAX = LINE.int64("staleness_max")
STALENESS_SUM = LINE.int64("staleness_sum")
STALENESS_COUNT = LINE.int64("staleness_count")
SEEN = LINE.int64("seen")
# with a quorum, see kernels/quorum.py. All writers, and it only grows: the last round that this worker's slot
# has been in
INCLUDED = LINE.int64("included", apart=True)
LATE = LINE.int64("late")  # reads that came after a round was closed without this worker; its own word
# what it asks of the round that it has come to, for the nodes of several hosts: how many have to come, of how many,
# and nanoseconds of grace
ASKS = LINE.int64("asks", 3)
# nanoseconds from when and until when it is expected at the next one; until 0: nobody knows
EXPECTED = LINE.int64("expected", 2)
WEIGHT = LINE.int64("weight")  # in rounds: what its slot counts in a mean; 0: as one

# a worker's undo slot in a table: what it is about to change, for the worker that takes over if it dies
UNDO_SLOTS_EACH = 2  # of a worker: so many of its threads change a table at once
UNDO_BYTES = 64
UNDO = Record(UNDO_BYTES)
UNDO_WORD = UNDO.int64("undo_word")  # 1 + number of the word that is about to be held; 0: none
UNDO_ROW = UNDO.int64("undo_row")  # 1 + number of the row whose copy follows; 0: none
UNDO_POSITION = UNDO.int64("undo_position")  # how far the call has come: rows before this are done; -1: it changes none
UNDO_USER = UNDO.int64(
    "undo_user"
)  # the attachment whose thread is using it; 0: nobody; below 0: a thread has taken it and set no position yet

# a word that guards a stripe, a block of rows or a segment of an index: its version, and below that its holder, as the
# attachment of a worker's number and 1 + the number of one of its undo slots; 0: nobody. See kernels/stripe_words.py
UNDO_BITS, ATTACHMENT_BITS = 12, 8
OWNER_BITS = ATTACHMENT_BITS + UNDO_BITS
OWNER = (1 << OWNER_BITS) - 1
VERSION = 1 << OWNER_BITS

# a worker's line in the memory of a reduction
REDUCTION_STRIDE = 128
REDUCTION = Record(REDUCTION_STRIDE)
PHASE = REDUCTION.int64("phase")  # how far it is
SIGNATURES = REDUCTION.int64("signatures", 2)  # for even and odd phases: what it reduces

# a call's record, in the caller's own memory: see consistency/protocol.py
CALL_DONE = 0  # int64: stripes or rows done
CALL_COMPLETE = 8  # int64: 1 once all is done

# an unfinished round, in the caller's own memory, in int64 words: see kernels/rounds/steps.py
ROUND_OPEN, ROUND_CHUNK, ROUND_NUMBER, ROUND_STAGE, ROUND_STAGED, ROUND_MEMBERS = range(6)
# and with a quorum, in the place of the members: see kernels/quorum.py
ROUND_VALUES, ROUND_READ, ROUND_READS, ROUND_NEEDED, ROUND_OF, ROUND_GRACE = range(5, 11)
ROUND_REACHED, ROUND_DECIDED, ROUND_GETS, ROUND_UNTIL, ROUND_LATENESS, QUORUM_WORDS = range(11, 17)

# MODE
ASYNCHRONOUS, SYNCHRONOUS, BOUNDED, QUORUM = 0, 1, 2, 3

TABLE_MAGIC = 0x6D756C7469763031
STRIPE_BYTES = 128 * 1024  # of an array
BLOCK_BYTES = 8 * 1024  # of a matrix: its stripes
WORD_SPACING = 6  # word w lies w << 6 bytes behind the first: in a cache line of its own
MOST_KEPT = 64 * 1024  # of a row with its state: wider ones are not kept while they are changed
# measured, rounds of 1e7 floats, 2 workers: 11.8 ms with 256 KiB, 9.1, 10.6 with 1 MiB, 15.1 with 2
CHUNK_BYTES = 512 * 1024


def round_up(value: int, to: int) -> int:
    """Returns the smallest multiple of ``to`` that is at least ``value``."""
    return -(-value // to) * to


def worker_block(index: int) -> int:
    """Returns the offset of a worker's block in the control segment."""
    return WORKERS + WORKER_STRIDE * index


def control_bytes(workers: int) -> int:
    """Returns the size of a control segment for so many workers, and the node."""
    return round_up(WORKERS + WORKER_STRIDE * (workers + 1), PAGE)
