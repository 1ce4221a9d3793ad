"""The protocols of the kernels as short threads, what must never be seen of each, and a table of both.

python tests/litmus/protocols.py

That writes the table in README.md anew, which a test compares with this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memory_models import Outcome, Step, armv8, fence, outcomes, read, swap, weakened, write, x86

PAGE = Path(__file__).resolve().parent / "README.md"
BEGIN, END = "<!-- made by tests/litmus/protocols.py -->\n\n", "\n<!-- end -->\n"
MODELS = {"x86-64": x86, "Armv8": armv8}

Threads = Sequence[Sequence[Step]]
Bad = Callable[[Outcome], bool]


class Protocol(NamedTuple):
    """What must never be seen, the threads, and whether an outcome shows it."""

    never: str
    threads: Threads
    bad: Bad


def allows(model: Callable[..., bool], threads: Threads, bad: Bad) -> bool:
    return any(bad(outcome) for outcome in outcomes(threads, model))


def both(a: str, b: str, one: int = 1, other: int = 0) -> Bad:
    return lambda o: o[a] == one and o[b] == other


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
PROTOCOLS: dict[str, Protocol] = {
    # kernels/stripe_words.py, keyed/row_words.py and read_only.py: numbers under a word, read by who never takes it
    "a reader without the word": Protocol(
        "numbers of two moments between two equal words",
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
    "a staged part": Protocol(
        "the stage without the part",
        [[write("part", 1), write("stage", 1, "release")], [read("stage", "staged", "acquire"), read("part", "seen")]],
        both("staged", "seen"),
    ),
    # kernels/stripe_words.py: the next holder sees all that the one before it wrote
    "from one holder to the next": Protocol(
        "the word without the numbers",
        [[write("number", 1), write("word", 2, "release")], [swap("word", 2, 3, "taken"), read("number", "seen")]],
        both("taken", "seen", 2, 0),
    ),
    # kernels/stripe_words.py: what to put back lies there before the first number is changed
    "an undo slot": Protocol(
        "a changed number without what to put back",
        [
            [write("slot", 1), fence("release"), write("number", 1)],
            [read("number", "changed"), fence("acquire"), read("slot", "seen")],
        ],
        both("changed", "seen"),
    ),
    # kernels/keyed/fresh.py: `pin` against `safe_epoch`, each behind a fence
    "a pinned row": Protocol(
        "a row that a call has found, and that its remover takes for free",
        [
            [write("pin", 1), fence("seq_cst"), read("link", "unlinked")],
            [write("link", 1), fence("seq_cst"), read("pin", "pinned")],
        ],
        both("unlinked", "pinned", 0, 0),
    ),
    # kernels/publications.py: `pin` against `make_current` and `free_slot`, and the writing of the slot that was free
    "a pinned slot": Protocol(
        "new numbers in a slot that a reader has pinned and checked",
        [
            [write("pin", 1), fence("seq_cst"), read("current", "moved"), read("slot", "seen")],
            [write("current", 1), fence("seq_cst"), read("pin", "pinned"), write("slot", 1, after=("pinned",))],
        ],
        lambda o: (o["moved"], o["pinned"], o["seen"]) == (0, 0, 1),
    ),
    # the same: what was published is whole; a slot whose pin is seen to be gone is not read any more
    "a published version": Protocol(
        "the version without its numbers",
        [
            [write("slot", 1), write("current", 1, "release")],
            [read("current", "there", "acquire"), read("slot", "seen")],
        ],
        both("there", "seen"),
    ),
    "a pin given back": Protocol(
        "a reader still meets the numbers that come after its pin is gone",
        [[read("slot", "seen"), write("given", 1, "release")], [read("given", "back", "acquire"), write("slot", 1)]],
        both("back", "seen", 1, 1),
    ),
    "a split, for a key that moves": Protocol(
        "a reader finds it neither in the new segment nor in the old one", MOVES, missed_moved
    ),
    "a split, for a key that stays": Protocol(
        "a reader passes the near slot before, the far one afterwards, and the word is the same", STAYS, missed_still
    ),
    # kernels/keyed/buckets.py, `fill`, and `seek`: a reader has found a key in a slot that another key gets meanwhile
    "a slot's next key": Protocol(
        "a key with the other one's row",
        [[write("key", 1), write("value", 1, "release")], [read("value", "got", "acquire"), read("key", "again")]],
        both("got", "again"),
    ),
    # kernels/waits.py: a sleeper says that it sleeps and looks once more; a waker writes and looks for sleepers
    "a wake-up": Protocol(
        "the sleeper misses the word, and the waker the sleeper",
        [
            [write("sleeps", 1, "seq_cst"), read("word", "old", "seq_cst")],
            [write("word", 1, "seq_cst"), read("sleeps", "sleeper", "seq_cst")],
        ],
        both("old", "sleeper", 0, 0),
    ),
}


def needed(protocol: Protocol) -> Iterator[tuple[str, list[str]]]:
    """Yields each ordering of a protocol, and the models that let the worst be seen without it."""
    for less, fewer in weakened(protocol.threads):
        yield less, [name for name, model in MODELS.items() if allows(model, fewer, protocol.bad)]


def table() -> str:
    """Returns the verdicts on all protocols, as Markdown."""
    rows = ["| protocol | must not be seen | " + " | ".join(MODELS) + " | is seen if one of these is left out |"]
    rows.append("|" + "---|" * (3 + len(MODELS)))
    for name, protocol in PROTOCOLS.items():
        seen = [allows(model, protocol.threads, protocol.bad) for model in MODELS.values()]
        without: dict[str, list[str]] = {}
        for ordering, models in needed(protocol):
            without.setdefault(" and ".join(models), []).append(ordering)
        found = "; ".join(f"on {models}: {', '.join(orderings)}" for models, orderings in without.items())
        verdicts = ["seen" if bad else "never" for bad in seen]
        rows.append("| " + " | ".join([name, protocol.never, *verdicts, found]) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
