"""Mutants that no law can notice, as the line that they spoil saves time and decides nothing; each with its reason."""

from __future__ import annotations

import json
from pathlib import Path

_WAKES = "wakes the others when there is nothing for them to do, too: they look, and sleep again"
_AGAIN = "does again, after a signal, what was done: the same values to the same places"
_SLICE = "how long a wait gives way and sleeps: no slice ends here, so that a missing wake shows; see test_waiting.py"
_TOLD = "only tells people something"
_ENDS_LATER = "raises at the next step, where the loss is seen, too; until then the dead one's part is done by another"
_HIGHEST = "the highest of those that are left does as well as the lowest"
_MOVED = "who has moved to a later round has its slot and its parts of this one counted as ready"
_LATER = "a later decision has not this worker among its members either: it had nothing ready for it"
_STOPS = "only a keyed table's folding stops; see tests/core/test_keyed_rounds.py"
_ITS_OWN = "its own part is in its slot, too"

_CALLED = "tells the caller that its call is over, if an exception hides the answer; see tests/core/test_calls_again.py"

_WEIGHED = "no add has a weight here; see tests/hosts/test_weights.py"
_HOSTS = "of several hosts, which are in tests/hosts/test_quorum_on_hosts.py"
_ELSEWHERE = "of a second table, which is in tests/core/test_quorum.py"
_BARRIERS = "of rounds and barriers, which are in tests/core/test_quorum.py"
_HELD = "not _is_held(control, worker, barrier)"
_PASSED = "reached > load64(block + at.PASSED)"
_ELSE = "(round_and_table ^ late_for(base, 0)) & 1048575 != 0"
_IS_LATE = "number > progress[READ] + 1"
_RUNS = "progress[GETS] == 0"
_CLEARS = "compare_swap64(block_of(control, worker) + at.LATE_FOR, late_for(base, number), 0)"
_DECIDED = "state == READY or progress[REACHED] != 0 or round_in(load64(base + at.DECISIONS)) >= number"

_WATCHERS = "nobody here waits for a version; see test_who_waits_for_a_version_is_woken in tests/core"

_NOT_AT_ONCE = "a round that might be gone through alone, in one pass, is gone through in chunks: the same values"
_ALONE = "staged == 0 and update == 0 and (progress[OPEN] == 0) and begin_alone(control, base, me, number)"

_TAKES_PART = "load32(line + at.ENROLLED) == 1 and load64(line + at.FIRST_STEP) <= step and is_live(control, worker)"

_ORDER = "this memory is in order anyway; as of the reader that never takes the word in tests/litmus"

_ORDER = "this memory is in order anyway; as of the reader that never takes the word in tests/litmus"
_SOONER = "who sleeps looks again after half a second; sooner matters only if the one who closed the round is stopped"
_HELPS = "folds what another one is folding, too: the same values to another place"
_IN_TIME = "now >= until or not is_live(control, (decision & 255) - 1)"

TOLERATED: dict[str, str] = {
    "publications.pin: without fence_all()": _ORDER,
    "publications.free_slot: without fence_all()": _ORDER,
    f"rounds.steps.takes_part: without 'load64(line + at.FIRST_STEP) <= step' in {_TAKES_PART}": _MOVED,
    "rounds.steps.members_in: never step_in(decision) != step": _LATER,
    "rounds.steps.publish_folded: never "
    "members >> other & 1 and load64(line_of(base, other) + at.FOLDED) < step": _WAKES,
    "rounds.steps._last_round_is_over: always lowest < 0": _HIGHEST,
    "rounds.steps.gather: never is_lost(control, worker) and continues == 0": _ENDS_LATER,
    "rounds.steps.go_through: always progress[STAGE] == 0": _AGAIN,
    "rounds.steps.go_through: always progress[STAGE] == 1": _AGAIN,
    "rounds.steps.go_through: always progress[STAGE] == 2": _AGAIN,
    "rounds.steps.go_through: always chunk == 0": _AGAIN,
    "rounds.steps.go_through: always chunk == 0 (2)": _AGAIN,
    "rounds.steps.go_through: always source == CHUNKED": "who does not exchange hands in an array of no elements",
    "rounds.steps.go_through: always source == CHUNKED (2)": "who does not exchange has early what it "
    "reads in the end, too",
    "rounds.steps.go_through: without restart(wait)": _SLICE,
    "rounds.steps.gather: never code != DONE (2)": _STOPS,
    "rounds.steps.go_through: never code != DONE (3)": _STOPS,
    "rounds.steps.finish: without store64(line + what, load64(line + what) + 1)": _TOLD,
    "rounds.steps.finish: without end_call(call)": _CALLED,
    "rounds.steps.finish: without tell_watchers(base)": _WATCHERS,
    "rounds.calls.exchange: always staged": _AGAIN,
    f"rounds.calls.exchange: never {_ALONE}": _NOT_AT_ONCE,
    f"rounds.calls.exchange: without 'progress[OPEN] == 0' in {_ALONE}": "no first chunk was decided: it may as well",
    "rounds.steps.begin_alone: always step_in(seen) >= first": _NOT_AT_ONCE,
    "rounds.steps.begin_alone: always state != READY or others != 0": _NOT_AT_ONCE,
    "rounds.steps.begin_alone: always compare_swap64(decision, seen, first << 16 | me + 1) != seen": _NOT_AT_ONCE,
    "rounds.steps.end_alone: without store64(line + at.STAGED, last)": "read by who opens the table anew, and comes "
    "with its next slot, too",
    "quorum._fold: without fence_release()": _ORDER,
    "quorum._fold: without fence_acquire()": _ORDER,
    "quorum._keep: without fence_release()": _ORDER,
    "quorum._keep: without fence_acquire()": _ORDER,
    "quorum._keep: always not _is_mine(word, me)": "copies what is its own to another place of its own",
    "quorum._close: never progress[DECIDED] == 0": _HELPS,
    f"quorum._close: always {_IN_TIME}": _HELPS,
    "quorum._close: without notify(control)": _SOONER,
    f"quorum.waits_elsewhere: without '{_ELSE}' in round_and_table != 0 and {_ELSE}": _ELSEWHERE,
    "quorum._collect: never waits_elsewhere(control, base, worker)": _ELSEWHERE,
    f"quorum._collect: without '{_HELD}' in takes_part(control, base, worker, number) and ({_HELD})": _BARRIERS,
    f"quorum._is_held: without 'reached > barrier' in reached > barrier and {_PASSED}": _BARRIERS,
    f"quorum._is_held: without '{_PASSED}' in reached > barrier and {_PASSED}": _BARRIERS,
    "waits.barrier: without store64(block + at.PASSED, target)": _BARRIERS,
    "waits.barrier: without store64(block + at.PASSED, target) (2)": _BARRIERS,
    "waits.barrier: never state == READY": _BARRIERS,
    "waits.barrier: always state == READY": _BARRIERS,
    f"quorum.include: without {_CLEARS}": _ELSEWHERE,
    f"quorum.include: a store for {_CLEARS}": _ELSEWHERE,
    f"quorum._come: without '{_IS_LATE}' in {_IS_LATE} and {_RUNS}": _ELSEWHERE,
    f"quorum._come: without '{_RUNS}' in {_IS_LATE} and {_RUNS}": _ELSEWHERE,
    "quorum._come: without "
    "store64(block_of(control, me) + at.LATE_FOR, late_for(base, number) if late else 0)": _ELSEWHERE,
    "quorum._come: without store64(line + at.ASKS + 8 * i, progress[NEEDED + i])": _HOSTS,
    "quorum._await_nodes: never state == LOST_SOMEONE": _HOSTS,
    "quorum._await_nodes: always state == LOST_SOMEONE": _HOSTS,
    f"quorum._await_nodes: without 'state == READY' in {_DECIDED}": _HOSTS,
    f"quorum._await_nodes: without 'progress[REACHED] != 0' in {_DECIDED}": _HOSTS,
    f"quorum._await_nodes: without 'round_in(load64(base + at.DECISIONS)) >= number' in {_DECIDED}": _HOSTS,
    "quorum.take_part: always load32(control + at.SPANS_HOSTS) == 0": _HOSTS,
    "quorum.finish: without store64(line_of(base, me) + at.WEIGHT, 0)": _WEIGHED,
    "rounds.steps.finish: without store64(line + at.WEIGHT, 0)": _WEIGHED,
    "quorum.finish: without record_operation(base, me, what, size)": _TOLD,
    "quorum.finish: without end_call(call)": _CALLED,
    "reduce.reduce_small: without _end(op, size, out, progress)": _CALLED,
    "reduce.reduce_chunks: without _end(op, size, out, progress)": _CALLED,
    "reduce.reduce_small: never progress[COMPLETE]": _CALLED,
    "reduce.reduce_chunks: never progress[COMPLETE]": _CALLED,
    "waits.notify: always load32(control + at.WAITERS) > 0": _WAKES,
    "waits.tell_watchers: never load32(base + at.WATCHED) != 0": _WATCHERS,
    "waits.tell_watchers: always load32(base + at.WATCHED) != 0": _WATCHERS,
    "waits.tell_watchers: without store32(base + at.WATCHED, 0)": _WATCHERS,
    "waits.tell_watchers: without add32(base + at.CHANGED, 1)": _WATCHERS,
    "waits.tell_watchers: without futex_wake(base + at.CHANGED)": _WATCHERS,
    "waits.slice_end: not control != 0": _SLICE,
    "waits.pause_until: never until <= now": "sleeps for less than no time, which is over at once",
    "waits.pause_until: never wait[_LOOKS] <= _YIELDS": _SLICE,
    "waits.pause_until: always wait[_LOOKS] <= _YIELDS": _SLICE,
    "waits.pause_until: never wait[_BEGAN] == 0": _SLICE,
    "waits.pause_until: always wait[_BEGAN] == 0": _SLICE,
    "waits.pause_until: never left <= 0": _SLICE,
    "waits.pause_until: always left <= 0": _SLICE,
    "waits.pause_until: without add32(control + at.WAITERS, -1)": _WAKES,
    "waits.pause_until: without sched_yield()": _SLICE,
    "waits.barrier: always load64(block + at.BARRIER) < target": _AGAIN,
    "reduce._publish: never load64(_line(base, worker) + at.PHASE) < phase": _WAKES,
    "reduce.reduce_chunks: always worker != me": _ITS_OWN,
    "reduce.reduce_chunks: always t == 0": "signs every chunk as it has signed the first",
}

# Tolerated until somebody finds a schedule that notices them (`make mutants`), or says why none can.
UNEXPLAINED = Path(__file__).parent.parent / "unexplained.json"
TOLERATED |= dict.fromkeys(
    json.loads(UNEXPLAINED.read_text()), "not known: a hundred schedules of each law do not notice"
)
