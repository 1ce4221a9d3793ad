"""Which outcomes of a few small threads the memory models of x86-64 and Armv8 allow: all executions, one by one.

An execution is which write each read reads (rf) and in which order the writes to each place become visible (co). The
models are axioms over these, as in Alglave, Maranget and Tautschnig, "Herding cats" (TOPLAS 2014), section 4; for
x86-TSO: Owens, Sarkar and Sewell (TPHOLs 2009); for Armv8: Pulte et al., "Simplifying ARM concurrency" (POPL 2018),
figure 4, without instruction barriers and weaker acquires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product
from typing import Literal

Order = Literal["", "acquire", "release", "seq_cst"]
Fence = Literal["acquire", "release", "seq_cst"]
Outcome = Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """One step of a thread.

    Attributes:
        kind: a read (R), a write (W), a fence (F), or a compare-and-swap (C), which reads and may write.
        place: what is read or written.
        value: what is written: a number, or a register, on which it depends then.
        into: the register that is read into.
        order: how it is ordered, as in C11; a compare-and-swap always is seq_cst.
        expects: what a compare-and-swap replaces.
        after: registers that decide whether this step is done: it depends on them by control.
        by: a register from which the place's address is computed.
    """

    kind: Literal["R", "W", "F", "C"]
    place: str = ""
    value: int | str = 0
    into: str = ""
    order: Order = ""
    expects: int = 0
    after: tuple[str, ...] = ()
    by: str = ""


def read(place: str, into: str, order: Order = "", by: str = "") -> Step:
    return Step("R", place, into=into, order=order, by=by)


def write(place: str, value: int | str, order: Order = "", after: tuple[str, ...] = ()) -> Step:
    return Step("W", place, value, order=order, after=after)


def fence(order: Fence) -> Step:
    return Step("F", order=order)


def swap(place: str, expects: int, value: int, into: str) -> Step:
    return Step("C", place, value, into, "seq_cst", expects)


@dataclass(frozen=True)
class _Event:
    """What one step does to memory, or a fence; thread -1 writes what is there at first."""

    thread: int
    position: int
    part: Literal["R", "W", "F"]
    step: Step

    @property
    def is_acquire(self) -> bool:
        return self.part == "R" and self.step.order in ("acquire", "seq_cst")

    @property
    def is_release(self) -> bool:
        return self.part == "W" and self.step.order in ("release", "seq_cst")


Pairs = set[tuple[_Event, _Event]]


@dataclass(frozen=True)
class _Execution:
    events: Sequence[_Event]
    rf: Pairs
    co: Pairs
    fr: Pairs

    def po(self) -> Iterator[tuple[_Event, _Event]]:
        """All pairs of one thread in the order of its program; of a compare-and-swap, its read comes first."""
        for a, b in product(self.events, repeat=2):
            if a.thread == b.thread >= 0 and (a.position, a.part) < (b.position, b.part):
                yield a, b


def outcomes(threads: Sequence[Sequence[Step]], model: Callable[[_Execution], bool]) -> Iterator[Outcome]:
    """Yields how the registers, and the places after the end, can look; all places and registers are 0 at first."""
    steps = [(t, p, step) for t, thread in enumerate(threads) for p, step in enumerate(thread)]
    places = sorted({step.place for *_, step in steps if step.place})
    first = [_Event(-1, 0, "W", write(place, 0)) for place in places]
    swaps = [(t, p) for t, p, step in steps if step.kind == "C"]
    for succeed in product((True, False), repeat=len(swaps)):
        succeeds = dict(zip(swaps, succeed, strict=True))
        events = [*first]
        for t, p, step in steps:
            events += [_Event(t, p, "F", step)] if step.kind == "F" else []
            events += [_Event(t, p, "R", step)] if step.kind in "RC" else []
            events += [_Event(t, p, "W", step)] if step.kind == "W" or succeeds.get((t, p)) else []
        writes = {place: [e for e in events if e.part == "W" and e.step.place == place] for place in places}
        reads = [event for event in events if event.part == "R"]
        orders = [[(w[0], *rest) for rest in permutations(w[1:])] for w in writes.values()]
        chosen = product(list(product(*orders)), list(product(*(writes[event.step.place] for event in reads))))
        for order, sources in chosen:
            ranks = {event: rank for line in order for rank, event in enumerate(line)}
            co = {(a, b) for line in order for a, b in product(line, repeat=2) if ranks[a] < ranks[b]}
            rf = set(zip(sources, reads, strict=True))
            fr = {(r, b) for w, r in rf for b in writes[w.step.place] if ranks[b] > ranks[w]}
            values = _values(rf, reads)
            if values is None or any(
                succeeds[r.thread, r.position] != (values[r] == r.step.expects) for r in reads if r.step.kind == "C"
            ):
                continue
            if model(_Execution(events, rf, co, fr)):
                registers = {r.step.into: values[r] for r in reads}
                yield registers | {line[-1].step.place: _written(line[-1], registers) for line in order}


def _written(event: _Event, registers: Mapping[str, int]) -> int:
    value = event.step.value
    return registers[value] if isinstance(value, str) else value


def _values(rf: Pairs, reads: Sequence[_Event]) -> dict[_Event, int] | None:
    """What each read reads; None where values would have to come out of thin air."""
    values: dict[_Event, int] = {}
    for _ in reads:
        registers = {r.step.into: value for r, value in values.items()}
        for w, r in rf:
            if not isinstance(w.step.value, str) or w.step.value in registers:
                values[r] = _written(w, registers)
    return values if len(values) == len(reads) else None


def _is_acyclic(pairs: Iterable[tuple[_Event, _Event]]) -> bool:
    after: dict[_Event, set[_Event]] = {}
    for a, b in pairs:
        after.setdefault(a, set()).add(b)
        after.setdefault(b, set())
    while ends := [event for event, later in after.items() if not later]:
        for event in ends:
            del after[event]
        for later in after.values():
            later.difference_update(ends)
    return not after


def _external(pairs: Pairs) -> Pairs:
    return {(a, b) for a, b in pairs if a.thread != b.thread}


def _is_coherent(e: _Execution) -> bool:
    """One place by itself is as if each step came after another, and nothing comes between a swap's two parts."""
    same = {(a, b) for a, b in e.po() if a.step.place == b.step.place != ""}
    torn = any(
        (r, w) in e.fr and (w, own) in e.co
        for r, own in same
        if r.position == own.position and r.step.kind == "C"
        for w in e.events
        if w.thread != r.thread
    )
    return not torn and _is_acyclic(chain(same, e.rf, e.co, e.fr))


def _between(e: _Execution, kinds: Sequence[Order]) -> Pairs:
    """Steps of one thread with such a fence between them."""
    fences = [f for f in e.events if f.part == "F" and f.step.order in kinds]
    return {
        (a, b)
        for a, b in e.po()
        for f in fences
        if f.thread == a.thread and a.position < f.position < b.position and "F" not in (a.part, b.part)
    }


def x86(e: _Execution) -> bool:
    """x86-TSO: a read may overtake an earlier write, unless a fence or a locked instruction stands between."""
    ordered = {(a, b) for a, b in e.po() if "F" not in (a.part, b.part) and (a.part, b.part) != ("W", "R")}
    locked = [x for x in e.events if x.step.kind == "C" or (x.part == "W" and x.step.order == "seq_cst")]
    full = {
        (a, b)
        for a, b in e.po()
        if "F" not in (a.part, b.part)
        and any(x.thread == a.thread and a.position <= x.position <= b.position for x in locked)
    }
    return _is_coherent(e) and _is_acyclic(chain(ordered, full, _between(e, ["seq_cst"]), _external(e.rf), e.co, e.fr))


def armv8(e: _Execution) -> bool:
    """Armv8, with compare-and-swap as a pair of exclusive instructions, the weaker of its two forms."""
    po = [(a, b) for a, b in e.po() if "F" not in (a.part, b.part)]
    by_data = {(a, b) for a, b in po if a.part == "R" and b.part == "W" and a.step.into == b.step.value}
    by_address = {(a, b) for a, b in po if a.part == "R" and a.step.into == b.step.by != ""}
    by_control = {
        (a, b)
        for a, b in po
        if a.part == "R"
        and b.part == "W"
        and any(
            a.step.into in c.step.after
            for c in e.events
            if c.thread == b.thread and a.position < c.position <= b.position
        )
    }
    dependent = by_data | by_address | by_control
    dependent |= {(a, c) for a, b in by_address for b2, c in po if b2 == b and c.part == "W"}
    dependent |= {(a, c) for a, b in by_data | by_address for w, c in e.rf if w == b and c.thread == b.thread}
    own_co = [(a, b) for a, b in e.co if a.thread == b.thread]
    dependent |= {(a, c) for a, b in by_data | by_control for b2, c in own_co if b2 == b}
    pairs = {(a, b) for a, b in po if a.step.kind == "C" and a.position == b.position}
    atomic = pairs | {(w, r) for _, w in pairs for w2, r in e.rf if w2 == w and r.thread == w.thread and r.is_acquire}
    barriers = _between(e, ["release", "seq_cst"])  # both are `dmb ish`
    barriers |= {(a, b) for a, b in _between(e, ["acquire"]) if a.part == "R"}  # `dmb ishld`
    barriers |= {(a, b) for a, b in po if a.is_acquire or b.is_release or (a.is_release and b.is_acquire)}
    barriers |= {(a, c) for a, b in po if b.is_release for b2, c in own_co if b2 == b}
    observed = chain(_external(e.rf), _external(e.fr), _external(e.co))
    return _is_coherent(e) and _is_acyclic(chain(observed, dependent, atomic, barriers))


def weakened(threads: Sequence[Sequence[Step]]) -> Iterator[tuple[str, Sequence[Sequence[Step]]]]:
    """Yields the same threads with one ordering less, once for each: a fence left out, or a plain read or write."""
    for t, thread in enumerate(threads):
        for p, step in enumerate(thread):
            if step.kind == "F":
                less = [*thread[:p], *thread[p + 1 :]]
            elif step.order and step.kind != "C":
                less = [*thread[:p], replace(step, order=""), *thread[p + 1 :]]
            else:
                continue
            number = ("first", "second", "third", "fourth")[t]
            kind = "read" if step.kind == "R" else "write"
            what = f"{kind} of `{step.place}`" if step.place else f"fence of the {number} thread"
            yield f"{step.order} {what}", [*threads[:t], less, *threads[t + 1 :]]
