"""The protocols of the kernels on the memory models of x86-64 and Armv8, and what each ordering in them is for.

First the models give the published verdicts on the classic tests: Maranget, Sarkar and Sewell, "A tutorial introduction
to the ARM and POWER relaxed memory models" (2012), and Pulte et al. (2018).
"""

from __future__ import annotations

import pytest
from memory_models import armv8, fence, read, swap, write, x86
from protocols import (
    BEGIN,
    END,
    MODELS,
    MOVES,
    PAGE,
    PROTOCOLS,
    STAYS,
    Bad,
    Threads,
    allows,
    both,
    missed_moved,
    missed_still,
    needed,
    table,
    torn,
)

X, Y = "x", "y"
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


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_a_protocol_holds_and_needs_each_of_its_orderings(name: str) -> None:
    protocol = PROTOCOLS[name]
    assert not [model for model, allowed in MODELS.items() if allows(allowed, protocol.threads, protocol.bad)]
    for ordering, models in needed(protocol):
        assert models, f"{name} does not need {ordering}"


def test_the_page_says_what_the_models_do() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()


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
