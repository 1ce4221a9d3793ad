"""What has to hold in every schedule: a law is ``law(source, seed, how)``, which raises AssertionError."""

from __future__ import annotations

from collections.abc import Callable

from interleavings.laws.gates import gates
from interleavings.laws.locking import locks
from interleavings.laws.publishing import publications
from interleavings.laws.quorum import quorum, quorum_joining, quorum_replayed, quorum_stopped
from interleavings.laws.reducing import reduce_in_chunks, reduce_small
from interleavings.laws.rounds import alone, corners, exchanges_and_reads, joining, latecomers, stopped
from interleavings.laws.rows import rows
from interleavings.laws.waiting import barriers, clocks

Law = Callable[..., int]

LAWS: dict[str, Law] = {
    "rounds": exchanges_and_reads,
    "latecomers": latecomers,
    "joining": joining,
    "stopped": stopped,
    "corners": corners,
    "alone": alone,
    "quorum": quorum,
    "quorum_joining": quorum_joining,
    "quorum_stopped": quorum_stopped,
    "quorum_replayed": quorum_replayed,
    "barriers": barriers,
    "gates": gates,
    "clocks": clocks,
    "locks": locks,
    "rows": rows,
    "reduce_small": reduce_small,
    "reduce_in_chunks": reduce_in_chunks,
    "publications": publications,
}
