"""Prints which modules a frame passes between two hosts, from a worker's add to the other host's copy.

    python scripts/frame_path.py

Two hosts are two fabrics of this process. A module counts where one of its functions is called; it is entered again
where its function is called, in one stack, by that of another module which it has called itself.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "hosts"))

from fabric_support import Adder, barrier, fabrics, new_shard  # noqa: E402

from multiverso.spec.table import TableSpec  # noqa: E402

PACKAGE = str(ROOT / "src" / "multiverso" / "hosts") + "/"


class Trace:
    """Notes the modules of `hosts/` that threads pass while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.passed: dict[str, None] = {}
        self.again: set[tuple[str, ...]] = set()

    def look(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        stack: list[str] = []
        caller: FrameType | None = frame
        while caller is not None:
            name = caller.f_code.co_filename
            if name.startswith(PACKAGE) and stack[-1:] != [name.removeprefix(PACKAGE)]:
                stack.append(name.removeprefix(PACKAGE))
            caller = caller.f_back
        for name in reversed(stack):
            self.passed.setdefault(name)
        if stack[0] in stack[1:]:
            self.again.add(tuple(reversed(stack)))


def main() -> None:
    """Prints the path of a push, and of the answer to it."""
    trace = Trace()
    threading.setprofile(trace.look)
    with ExitStack() as stack:
        made = stack.enter_context(fabrics(2, share=0))
        shards = [new_shard(TableSpec("array", 1, 1000)) for _ in made]
        for fabric, shard in zip(made, shards, strict=True):
            fabric.attach(1, shard)
        barrier(made)
        time.sleep(0.5)  # nothing is under way
        trace.on = True
        for shard in shards:
            Adder(shard).add([1.0] * 1000)
        while not all((shard.values() == 2).all() for shard in shards):
            time.sleep(0.001)
        trace.on = False
    print(f"{len(trace.passed)} modules: {' '.join(trace.passed)}")
    print(f"{len(trace.again)} stacks with a module that is entered again")
    for found in sorted(trace.again):
        print("  " + " > ".join(found))


main()
