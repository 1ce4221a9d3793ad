"""Reads Slurm's compressed lists of a step's hosts and tasks, and checks them against each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from multiverso.errors import StartupError

_MOST_NAMES = 65_536


def expand_nodes(text: str) -> list[str]:
    """Returns the names that a list of nodes stands for: ``"n[08-10,12],gpu1"`` is n08, n09, n10, n12, gpu1.

    Raises:
        StartupError: it is no such list.
    """
    pieces = re.findall(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)", text)
    if ",".join(pieces) != text or not text:
        raise StartupError(f"SLURM_STEP_NODELIST is {text!r}: this is not a list of nodes")
    names: list[str] = []
    for piece in pieces:
        parts = re.split(r"\[([^\]]*)\]", piece)  # names' parts and, between them, what stood in brackets
        choices = [list(_numbers(part)) if odd % 2 else [part] for odd, part in enumerate(parts)]
        names += itertools.islice(map("".join, itertools.product(*choices)), _MOST_NAMES)
    return names


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()) or int(last) - int(first) > _MOST_NAMES:
            raise StartupError(f"a list of Slurm's nodes has [{text}]: these are not numbers")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}}"


def expand_counts(text: str) -> list[int]:
    """Returns the numbers that ``"4(x2),3"`` stands for: 4, 4, 3.

    Raises:
        StartupError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None or int(found[2] or 1) > _MOST_NAMES:
            raise StartupError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; it must be such as '4(x2),3'")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def deal(counts: Sequence[int], distribution: str) -> tuple[int, ...]:
    """Returns the numbers of the tasks on the first node, then those on the second...

    Args:
        counts: how many tasks each node has.
        distribution: between nodes, as ``srun --distribution`` names it: "block", "cyclic" or "plane=2".
    """
    if distribution.startswith("plane"):
        _, _, size = distribution.partition("=")
        most = int(size) if size.isdecimal() and int(size) else 1
    else:
        most = 1 if distribution == "cyclic" else max(counts)
    hands: list[list[int]] = [[] for _ in counts]
    numbers = iter(range(sum(counts)))
    while any(len(hand) < count for hand, count in zip(hands, counts, strict=True)):
        for hand, count in zip(hands, counts, strict=True):
            hand += itertools.islice(numbers, min(most, count - len(hand)))
    return tuple(itertools.chain(*hands))


def ports_of(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the ports that the step has to itself (``srun --resv-ports``): none, if it did not ask for any."""
    found: list[int] = []
    for part in re.findall(r"\d+(?:-\d+)?", environ.get("SLURM_STEP_RESV_PORTS", "")):
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), 65_535) + 1)
    return tuple(found)
