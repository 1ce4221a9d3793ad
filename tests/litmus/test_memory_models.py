"""The protocols of the kernels on the memory models of x86-64 and Armv8, and what each ordering in them is for.

First the models give the published verdicts on the classic tests: Maranget, Sarkar and Sewell, "A tutorial introduction
to the ARM and POWER relaxed memory models" (2012), and Pulte et al. (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from memory_models import Outcome, Step, armv8, fence, outcomes, read, swap, weakened, write, x86

Threads = Sequence[Sequence[Step]]
Bad = Callable[[Outcome], bool]


def allows(model: Callable[..., bool], threads: Threads, bad: Bad) -> bool:
    return any(bad(outcome) for outcome in outcomes(threads, model))


X, Y = "x", "y"


def both(a: str, b: str, one: int = 1, other: int = 0) -> Bad:
    return lambda o: o[a] == one and o[b] == other


MP_SEEN = both("r1", "r2")
SB_SEEN = both("r1", "r2", 0, 0)
LB_SEEN = both("r1", "r2", 1, 1)
IRIW_SEEN: Bad = lambda o: (o["r1"], o["r2"], o["r3"], o["r4"]) == (1, 0, 1, 0)  # noqa: E731
CLASSIC: dict[str, tuple[Threads, Bad, bool, bool]] = {  # whether x86 and Armv8 allow it
    "MP": ([[write(X, 1), write(Y, 1)], [read(Y, "r1"), read(X, "r2")]], MP_SEEN, False, True),
    "MP+release+acquire": (
        [[write(X, 1), write(Y, 1, "release")], [read(Y, "r1", "acquire"), read(X, "r2")]],
        MP_SEEN,
        False,
        False,
    ),
    "MP+release+plain": ([[write(X, 1), write(Y, 1, "release")], [read(Y, "r1"), read(X, "r2")]], MP_SEEN, False, True),
    "MP+dmb+addr": (
        [[write(X, 1), fence("seq_cst"), write(Y, 1)], [read(Y, "r1"), read(X, "r2", by="r1")]],
        MP_SEEN,
        False,
        False,
    ),
    "MP+dmb+dmb.ld": (
        [[write(X, 1), fence("release"), write(Y, 1)], [read(Y, "r1"), fence("acquire"), read(X, "r2")]],
        MP_SEEN,
        False,
        False,
    ),
    "SB": ([[write(X, 1), read(Y, "r1")], [write(Y, 1), read(X, "r2")]], SB_SEEN, True, True),
    "SB+dmbs": (
        [[write(X, 1), fence("seq_cst"), read(Y, "r1")], [write(Y, 1), fence("seq_cst"), read(X, "r2")]],
        SB_SEEN,
        False,
        False,
    ),
    "SB+releases+acquires": (
        [[write(X, 1, "release"), read(Y, "r1", "acquire")], [write(Y, 1, "release"), read(X, "r2", "acquire")]],
        SB_SEEN,
        True,
        False,
    ),
    "LB": ([[read(X, "r1"), write(Y, 1)], [read(Y, "r2"), write(X, 1)]], LB_SEEN, False, True),
    "LB+ctrls": (
        [[read(X, "r1"), write(Y, 1, after=("r1",))], [read(Y, "r2"), write(X, 1, after=("r2",))]],
        LB_SEEN,
        False,
        False,
    ),
    "LB+datas": ([[read(X, "r1"), write(Y, "r1")], [read(Y, "r2"), write(X, "r2")]], LB_SEEN, False, False),
    "S": ([[write(X, 2), write(Y, 1)], [read(Y, "r1"), write(X, 1)]], both("r1", X, 1, 2), False, True),
    "S+release+data": (
        [[write(X, 2), write(Y, 1, "release")], [read(Y, "r1"), write(X, "r1")]],
        both("r1", X, 1, 2),
        False,
        False,
    ),
    "R": ([[write(X, 1), write(Y, 1)], [write(Y, 2), read(X, "r1")]], both(Y, "r1", 2, 0), True, True),
    "R+dmbs": (
        [[write(X, 1), fence("seq_cst"), write(Y, 1)], [write(Y, 2), fence("seq_cst"), read(X, "r1")]],
        both(Y, "r1", 2, 0),
        False,
        False,
    ),
    "2+2W": ([[write(X, 1), write(Y, 2)], [write(Y, 1), write(X, 2)]], both(X, Y, 1, 1), False, True),
    "2+2W+releases": (
        [[write(X, 1), write(Y, 2, "release")], [write(Y, 1), write(X, 2, "release")]],
        both(X, Y, 1, 1),
        False,
        False,
    ),
    "IRIW": (
        [[write(X, 1)], [write(Y, 1)], [read(X, "r1"), read(Y, "r2")], [read(Y, "r3"), read(X, "r4")]],
        IRIW_SEEN,
        False,
        True,
    ),
    "IRIW+acquires": (
        [
            [write(X, 1)],
            [write(Y, 1)],
            [read(X, "r1", "acquire"), read(Y, "r2")],
            [read(Y, "r3", "acquire"), read(X, "r4")],
        ],
        IRIW_SEEN,
        False,
        False,
    ),
    "CoRR": ([[write(X, 1)], [read(X, "r1"), read(X, "r2")]], MP_SEEN, False, False),
    "two swaps": ([[swap(X, 0, 1, "r1")], [swap(X, 0, 2, "r2")]], SB_SEEN, False, False),
    # A compare-and-swap is no fence on Armv8: what comes after may overtake its write.
    "SB+swaps": ([[swap(X, 0, 1, "r3"), read(Y, "r1")], [swap(Y, 0, 1, "r4"), read(X, "r2")]], SB_SEEN, False, True),
}


@pytest.mark.parametrize("name", list(CLASSIC))
def test_the_models_give_the_published_verdicts(name: str) -> None:
    threads, bad, on_x86, on_armv8 = CLASSIC[name]
    assert allows(x86, threads, bad) == on_x86
    assert allows(armv8, threads, bad) == on_armv8


def torn(o: Outcome) -> bool:
    """A reader has met the same even word before and after, and numbers of two writers' moments."""
    return o["before"] == o["after"] != 1 and {o["a1"], o["b1"]} != {o["before"] // 2}


# kernels/keyed/index.py, `split` and `seek`: the old segment's word is free (0), held (1), free and one deeper (2). A
# reader may only say that a key is absent if the word was free and the same before and after it looked.
MOVES: list[list[Step]] = [  # a key that goes to the new segment, and is looked for in either
    [swap("word", 0, 1, "held"), write("copy", 1), write("new", 1, "release"), write("old_slot", 1, "release")],
    [
        read("new", "published", "acquire"),
        read("copy", "copied"),
        read("word", "before"),
        read("old_slot", "removed", "acquire"),
        read("word", "after"),
    ],
]
STAYS: list[list[Step]] = [  # a key that stays and comes nearer to its home
    [swap("word", 0, 1, "held"), write("near", 1), write("far_slot", 1, "release"), write("word", 2, "release")],
    [
        read("word", "before", "acquire"),
        read("near", "nearer"),
        read("far_slot", "left", "acquire"),
        read("word", "after"),
    ],
]


def missed_moved(o: Outcome) -> bool:
    in_new, in_old = o["published"] and not o["copied"], o["before"] == o["after"] == 0 and o["removed"]
    return bool(in_new or in_old)


def missed_still(o: Outcome) -> bool:
    return bool(o["before"] == o["after"] != 1 and o["left"] and not o["nearer"])


# What is not in the code by its name is named where it is.
PROTOCOLS: dict[str, tuple[Threads, Bad]] = {
    # kernels/stripe_words.py, keyed/row_words.py and read_only.py: numbers under a word, read by who never takes it
    "a reader without the word": (
        [
            [swap("word", 0, 1, "held"), fence("release"), write("a", 1), write("b", 1), write("word", 2, "release")],
            [
                read("word", "before", "acquire"),
                read("a", "a1"),
                read("b", "b1"),
                fence("acquire"),
                read("word", "after"),
            ],
        ],
        torn,
    ),
    # kernels/rounds: a worker stages its part and says so; another reads it
    "a staged part": (
        [[write("part", 1), write("stage", 1, "release")], [read("stage", "staged", "acquire"), read("part", "seen")]],
        both("staged", "seen"),
    ),
    # kernels/stripe_words.py: the next holder sees all that the one before it wrote
    "from one holder to the next": (
        [[write("number", 1), write("word", 2, "release")], [swap("word", 2, 3, "taken"), read("number", "seen")]],
        both("taken", "seen", 2, 0),
    ),
    # kernels/stripe_words.py: what to put back lies there before the first number is changed
    "an undo slot": (
        [
            [write("slot", 1), fence("release"), write("number", 1)],
            [read("number", "changed"), fence("acquire"), read("slot", "seen")],
        ],
        both("changed", "seen"),
    ),
    # kernels/keyed/fresh.py: `pin` against `safe_epoch`, each behind a fence
    "a pinned row": (
        [
            [write("pin", 1), fence("seq_cst"), read("link", "unlinked")],
            [write("link", 1), fence("seq_cst"), read("pin", "pinned")],
        ],
        both("unlinked", "pinned", 0, 0),
    ),
    # kernels/publications.py: `pin` against `make_current` and `free_slot`, and the writing of the slot that was free
    "a pinned slot": (
        [
            [write("pin", 1), fence("seq_cst"), read("current", "moved"), read("slot", "seen")],
            [write("current", 1), fence("seq_cst"), read("pin", "pinned"), write("slot", 1, after=("pinned",))],
        ],
        lambda o: (o["moved"], o["pinned"], o["seen"]) == (0, 0, 1),
    ),
    # the same: what was published is whole; a slot whose pin is seen to be gone is not read any more
    "a published version": (
        [
            [write("slot", 1), write("current", 1, "release")],
            [read("current", "there", "acquire"), read("slot", "seen")],
        ],
        both("there", "seen"),
    ),
    "a pin given back": (
        [[read("slot", "seen"), write("given", 1, "release")], [read("given", "back", "acquire"), write("slot", 1)]],
        both("back", "seen", 1, 1),
    ),
    "a split, for a key that moves": (MOVES, missed_moved),
    "a split, for a key that stays": (STAYS, missed_still),
    # kernels/keyed/buckets.py, `fill`, and `seek`: a reader has found a key in a slot that another key gets meanwhile
    "a slot's next key": (
        [[write("key", 1), write("value", 1, "release")], [read("value", "got", "acquire"), read("key", "again")]],
        both("got", "again"),
    ),
    # kernels/waits.py: a sleeper says that it sleeps and looks once more; a waker writes and looks for sleepers
    "a wake-up": (
        [
            [write("sleeps", 1, "seq_cst"), read("word", "old", "seq_cst")],
            [write("word", 1, "seq_cst"), read("sleeps", "sleeper", "seq_cst")],
        ],
        both("old", "sleeper", 0, 0),
    ),
}


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_a_protocol_holds_and_needs_each_of_its_orderings(name: str) -> None:
    threads, bad = PROTOCOLS[name]
    models = {"x86-64": x86, "Armv8": armv8}
    assert not [model for model, allowed in models.items() if allows(allowed, threads, bad)]
    for less, fewer in weakened(threads):
        assert any(allows(allowed, fewer, bad) for allowed in models.values()), f"{name} does not need {less}"


def reordered(threads: Threads, *positions: int) -> Threads:
    return [[threads[0][i] for i in positions], *threads[1:]]


SPOILT: dict[str, tuple[Threads, Bad]] = {
    "published before it is copied": (reordered(MOVES, 0, 2, 1, 3), missed_moved),
    "removed without the word": ([[read("word", "held"), *MOVES[0][1:]], MOVES[1]], missed_moved),
    "released before all is in place": (reordered(STAYS, 0, 2, 3, 1), missed_still),
    "word read once": (STAYS, lambda o: missed_still({**o, "after": o["before"]})),
}


@pytest.mark.parametrize("name", list(SPOILT))
def test_a_spoilt_split_loses_keys_on_every_processor(name: str) -> None:
    assert allows(x86, *SPOILT[name])
    assert allows(armv8, *SPOILT[name])


# Two defects of others, by their reports: the protocols as they stood have to fail here.
DEFECTS: dict[str, tuple[Threads, Bad]] = {
    # vllm#27858, #29389: a ring in shared memory whose flags were plain writes
    "a ring with plain flags": (
        [[write("data", 1), write("flag", 1)], [read("flag", "ready"), read("data", "seen")]],
        both("ready", "seen"),
    ),
    # dora#3288: a sequence lock whose reader and writer had no fence between words and numbers
    "a sequence lock without fences": (
        [
            [write("word", 1), write("a", 1), write("b", 1), write("word", 2, "release")],
            [read("word", "before", "acquire"), read("a", "a1"), read("b", "b1"), read("word", "after", "acquire")],
        ],
        torn,
    ),
}


@pytest.mark.parametrize("name", list(DEFECTS))
def test_known_defects_of_other_projects_are_found(name: str) -> None:
    assert allows(armv8, *DEFECTS[name])
    assert not allows(x86, *DEFECTS[name])  # where they were developed, and passed
