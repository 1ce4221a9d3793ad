"""What the laws would notice: the kernels' source with one store, wake, swap or check spoilt at a time.

``make mutants`` looks for a schedule that catches each and writes them to ``mutants.json``; the tests run those. A
mutant that no schedule catches is a line that is not needed, or one that only saves time: then it stands in
``TOLERATED`` with the reason.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from interleavings.laws import LAWS
from interleavings.source import Source, path_of, text_of, tree_of, with_function
from interleavings.tolerated import TOLERATED
from interleavings.world import MEMORY

TABLE = Path(__file__).parent.parent / "mutants.json"
# the modules whose lines are spoilt, and the laws that may notice, the likeliest first
LAWS_OF = {
    "rounds.steps": ("rounds", "joining", "corners", "stopped", "latecomers", "alone"),
    "rounds.calls": ("rounds", "joining", "corners", "stopped", "latecomers", "alone"),
    "quorum": ("quorum", "quorum_stopped", "quorum_joining", "quorum_replayed"),
    "waits": ("barriers", "clocks", "gates", "rounds", "latecomers", "reduce_small", "quorum"),
    "reduce": ("reduce_small", "reduce_in_chunks"),
    "stripe_words": ("rows", "locks"),
    "publications": ("publications",),
}
# of which only what is written out below is spoilt: a search through all their lines has not been made
WRITTEN_ONLY = {"stripe_words"}
# Words that only tell people and the search for deadlocks something: no wait and no value depends on them.
TOLD = {
    "ADDS", "BYTES", "EXCHANGES", "GETS", "COUNTS", "TAKEN_OVER", "PUT_BACK", "WAITS", "WAITED", "WAITED_NS",
    "WAIT_KIND", "WAIT_SEQ", "WAIT_SINCE", "WAIT_STAGE", "WAIT_TABLE", "WAIT_TARGET", "NOT_WAITING",
}  # fmt: skip
TELLING = {"describe_wait", "publish_wait", "end_wait", "end_table_wait", "_note_wait", "begin_wait", "finish_wait"}
# Not in rounds and waits proper: the loops over data and what wraps one call.
LEFT_OUT = {
    "stage", "stage_difference", "stage_rows", "take_rows", "read_rows", "copy_rows", "committed_rows", "_end",
    "committed_copy", "committed_put", "again", "rows_again", "_copy_rows", "apply_rule", "set_word", "set_long",
    "begin_wait", "finish_wait", "describe_wait", "publish_wait", "end_wait", "end_table_wait", "monotonic_ns",
    "wake", "_multiply_into", "_maximum_into", "_minimum_into", "_add_both", "_combine", "_part", "_reduce_part",
}  # fmt: skip
LOOK_SECONDS = 0.25  # of processor time: from one step to the next a schedule takes less than a thirtieth of it


@dataclass(frozen=True)
class Mutant:
    """One spoilt line. ``name`` tells which, in words that a change elsewhere in the file does not alter.

    ``code`` makes the module's code when it is needed: to compile what is spoilt takes most of the time.
    """

    name: str
    module: str
    code: Callable[[], CodeType]


class NoEnd(AssertionError):
    """A mutant that loops without taking steps."""


def mutants() -> Iterator[Mutant]:
    """Yields each mutant of today's source, in its order."""
    for module in LAWS_OF:
        full = f"multiverso.kernels.{module}"
        if module in WRITTEN_ONLY or not path_of(full).exists():
            continue
        used: dict[str, int] = {}
        for function in tree_of(full).body:
            if not isinstance(function, ast.FunctionDef) or function.name in LEFT_OUT | TELLING:
                continue
            for what, change in _changes(function):
                name = f"{module}.{function.name}: {what}"
                used[name] = used.get(name, 0) + 1
                if used[name] > 1:
                    name += f" ({used[name]})"
                yield Mutant(name, full, partial(_spoilt, full, function.name, change))
    yield from written()


def _spoilt(module: str, name: str, change: Callable[[ast.AST], None]) -> CodeType:
    function = copy.deepcopy(next(node for node in tree_of(module).body if getattr(node, "name", "") == name))
    assert isinstance(function, ast.FunctionDef)
    change(function)
    return with_function(module, function)


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Yields what can be spoilt in a function, and how; a node is told by its place in the walk through it."""
    tests: set[int] = set()  # nodes that are a condition, or a part of one: they are spoilt as such
    for place, node in enumerate(ast.walk(function)):
        text = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
        text = " ".join(text.split())
        if isinstance(node, ast.If):
            text = " ".join(ast.unparse(node.test).split())
        if any(f"at.{word}" in text.replace(")", " ").replace(",", " ").split() for word in TOLD):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func.id if isinstance(node.value.func, ast.Name) else ""
            if called not in TELLING:
                yield (f"without {text}", _at(place, lambda node: _become(node, ast.Pass())))
            if called == "compare_swap64":
                yield f"a store for {text}", _at(place, _store_for_swap)
        elif isinstance(node, ast.If):
            tests.add(id(node.test))
            yield f"never {text}", _at(place, lambda node: _decide(node, False))
            yield f"always {text}", _at(place, lambda node: _decide(node, True))
        elif isinstance(node, ast.Compare) and id(node) not in tests:
            yield (f"not {text}", _at(place, lambda node: _become(node, ast.UnaryOp(ast.Not(), _copy(node)))))
        elif isinstance(node, ast.BoolOp):
            tests.update(id(value) for value in node.values)
            for index, operand in enumerate(node.values):
                yield (f"without '{ast.unparse(operand)}' in {text}", _at(place, partial(_leave_out, index)))


def _at(place: int, change: Any) -> Any:
    def apply(function: ast.FunctionDef) -> None:
        for number, node in enumerate(ast.walk(function)):
            if number == place:
                change(node)
                return

    return apply


def _copy(node: Any) -> Any:
    return copy.deepcopy(node)


def _become(node: Any, other: Any) -> None:
    place = {key: value for key, value in vars(node).items() if key in ("lineno", "col_offset")}
    node.__class__ = other.__class__
    node.__dict__.clear()
    node.__dict__.update({**vars(other), **place})


def _leave_out(operand: int, node: Any) -> None:
    node.values.pop(operand)
    if len(node.values) == 1:
        _become(node, node.values[0])


def _store_for_swap(node: Any) -> None:
    node.value.func = ast.Name("store64", ast.Load())
    del node.value.args[1]


def _decide(node: Any, always: bool) -> None:
    node.test = ast.Constant(always)


# Defects that were there once: (name, module, what stands there now, what stood there).
WRITTEN = (
    (
        "who came and left between two looks is lost",
        "reduce",
        "if _is_gone(control, worker) and _is_behind(base, worker, phase):",
        "if _is_gone(control, worker):",
    ),
    (
        "the part of one that folded and left is folded again",
        "rounds.steps",
        """                gone = (members >> worker) & 1 and not is_live(control, worker)
                if gone and load64(line_of(base, worker) + at.FOLDED) < step:
""",
        """                late = (members >> worker) & 1 and load64(line_of(base, worker) + at.FOLDED) < step
                if late and not is_live(control, worker):
""",
    ),
    (
        "a decision that was collected before a latecomer left its add is valid",
        "rounds.calls",
        "if compare_swap64(decision, seen, touched) == seen:",
        "if touched >= seen - 0xFF00:",
    ),
    (
        "a row is kept before its first byte changes",
        "stripe_words",
        "    store_release64(undo + at.UNDO_ROW, row + 1)\n    fence_release()\n",
        "    fence_release()\n",
    ),
    ("an undo slot names its word before it takes it", "stripe_words", "        name_word(undo, row >> shift)\n", ""),
    (
        "an undo slot has its call's position before it says who uses it",
        "stripe_words",
        """                store_release64(undo + at.UNDO_POSITION, position)
                store_release64(user, attachment)
""",
        """                store_release64(user, attachment)
""",
    ),
    (
        "the updater's arrays are put back with the row",
        "stripe_words",
        "move(place, undo + rows.copy + (state + 1) * rows.kept, rows.kept)",
        "pass",
    ),
    (
        "who takes over has the copy in its own undo slot first",
        "stripe_words",
        "(1 + rows.states))\n            store_release64(undo + at.UNDO_ROW, row + 1)\n",
        "(1 + rows.states))\n",
    ),
    (
        "a row that is read is looked at again",
        "stripe_words",
        "                if load_acquire64(address) == value:\n",
        "                if value >= 0:\n",
    ),
    (
        "a word that is given back has another version",
        "stripe_words",
        "store_release64(address, value + VERSION)",
        "store_release64(address, value)",
    ),
    (
        "a word is taken by one swap",
        "stripe_words",
        "        if value & OWNER != 0 or compare_swap64(address, value, value | owner) != value:",
        "        if value & OWNER != 0 or store_release64(address, value | owner):",
    ),
    (
        "a new attachment settles what any earlier one had begun",
        "stripe_words",
        "if undo_slot_in(value) == undo_slot_in(owner) and value & OWNER != owner:",
        "if value == -1:",
    ),
    (
        "an owner whose number has another attachment is dead",
        "stripe_words",
        "        return True\n    return load32(block",
        "        pass\n    return load32(block",
    ),
)


def written() -> Iterator[Mutant]:
    """Yields the mutants that are written out above."""
    for name, module, now, then in WRITTEN:
        full = f"multiverso.kernels.{module}"
        text = text_of(full)
        assert text.count(now) == 1, f"{module}.py has no longer the one place for the mutant {name!r}"
        yield Mutant(f"{module}: {name}", full, partial(compile, text.replace(now, then), str(path_of(full)), "exec"))


def catches(mutant: Mutant, source: Source, law: str, seed: int) -> bool:
    """Returns whether a schedule breaks the law with this mutant."""

    check, ended, seen = LAWS[law], False, (MEMORY.scheduler, -1)

    def look(signum: int, frame: Any) -> None:
        """A schedule that only takes long ends with its steps; here is one that takes none any more."""
        nonlocal seen
        if not ended and seen == (MEMORY.scheduler, MEMORY.scheduler.steps):
            raise NoEnd(f"no end, and no step after step {MEMORY.scheduler.steps}")
        seen = (MEMORY.scheduler, MEMORY.scheduler.steps)

    signal.signal(signal.SIGVTALRM, look)  # and stays, as one that comes late would end the process
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        check(source, seed)
        ended = True
    except Exception:  # an array that does not fit is memory overwritten in the compiled kernel
        ended = True
        return True
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return False


def search(mutant: Mutant, first: tuple[str, int] | None, seeds: range) -> tuple[str, int] | None:
    """Returns a schedule that catches a mutant: the given one, or the first of those with these seeds."""
    source = Source(MEMORY, {mutant.module: mutant.code()})
    if first is not None and first[0] in LAWS and catches(mutant, source, *first):
        return first
    laws = LAWS_OF[mutant.module.removeprefix("multiverso.kernels.")]
    for seed in seeds:
        for law in laws:
            if catches(mutant, source, law, seed):
                return law, seed
    return None


def kept() -> dict[str, tuple[str, int]]:
    """Returns the table: which schedule catches which mutant."""
    return {name: (law, seed) for name, (law, seed) in json.loads(TABLE.read_text()).items()}


def main() -> int:
    """Looks for a schedule for each mutant; returns how many are not caught and not tolerated."""
    parser = argparse.ArgumentParser(prog="interleavings.mutants", description="Which schedule catches which mutant")
    parser.add_argument("--seeds", type=int, default=3000, help="tried for each law")
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    options = parser.parse_args()
    before = kept() if TABLE.exists() else {}
    found: dict[str, tuple[str, int]] = {} if not options.only else dict(before)
    missed, began = [], time.monotonic()
    for mutant in mutants():
        if options.only not in mutant.name:
            continue
        schedules = range(options.seeds if mutant.name not in TOLERATED else 20)
        caught = search(mutant, before.get(mutant.name), schedules)
        said = f"{caught[0]} {caught[1]}" if caught else "NOT CAUGHT"
        if mutant.name in TOLERATED:
            said = f"{'CAUGHT though tolerated by ' + said if caught else 'tolerated'}: {TOLERATED[mutant.name]}"
        elif caught:
            found[mutant.name] = caught
        else:
            missed.append(mutant.name)
            found.pop(mutant.name, None)
        print(f"{mutant.name:90} {said}", flush=True)
    there = {mutant.name for mutant in mutants()}
    found = {name: caught for name, caught in found.items() if name in there}
    TABLE.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{len(found)} caught, {len(missed)} not, in {time.monotonic() - began:.0f} s")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
