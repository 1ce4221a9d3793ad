"""Raises an exception in the middle of a call: at its k-th point at which that can happen, or whenever a signal comes.

CPython runs the handlers of signals at certain points only: at the beginning of a function, after a call of a function
that is not written in Python, and at a jump backwards. ``At`` goes through all of them, one by one, in the functions of
the package; ``Storm`` sends real signals at random moments.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import multiverso

PACKAGE = str(Path(multiverso.__file__).parent)


class Interruption(Exception):
    """What a handler raises: an exception that code which catches all of them would swallow, as a TimeoutError is."""


@functools.cache
def _calls(code: CodeType) -> frozenset[int]:
    """Where its instructions that call stand."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL"))


class At:
    """Interrupts a call at its k-th point, and so many points further, if that is in the same call, once more.

    ``happened``: whether it had so many.
    """

    def __init__(self, number: int, further: int) -> None:
        self.happened = False
        self._left = number
        self._further: int | None = further
        self._last: dict[FrameType, int] = {}

    def __call__(self, call: Callable[[], Any]) -> Any:
        if self.happened:  # and happens once
            return call()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)
            self._last.clear()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        caller = frame.f_back
        if caller is not None:
            self._last.pop(caller, None)  # after this call, which is one of Python's own, nothing is looked at
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._point()
        return self._look

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            now, last = frame.f_lasti, self._last.get(frame)
            if last is not None and (now < last or last in _calls(frame.f_code)):
                self._point()
            self._last[frame] = now
        return self._look

    def _point(self) -> None:
        if self._left >= 0:
            self._left -= 1
        elif self._further is not None:
            self._further = self._further - 1 if self._further else None
            if self._further is not None:
                return
        else:
            return
        if self._left < 0:
            self.happened = True
            raise Interruption


class Storm:
    """Interrupts calls by SIGALRM at random moments, up to six times each. A context; ``number``: how often it did."""

    def __init__(self, seed: int) -> None:
        self.number = 0
        self._random = random.Random(seed)
        self._armed, self._more = False, 0

    def __enter__(self) -> Storm:
        gc.disable()  # an exception in somebody's callback of a collection is printed and lost, not raised
        self._before = signal.signal(signal.SIGALRM, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        gc.enable()

    def __call__(self, call: Callable[[], Any]) -> Any:
        self._armed, self._more = True, self._random.choice((0, 0, 1, 2, 5))
        try:
            self._arm()
            return call()
        finally:
            self._armed = False

    def _arm(self) -> None:
        seconds = self._random.choice((2e-6, 1e-5, 5e-5, 2e-4)) * self._random.random()
        signal.setitimer(signal.ITIMER_REAL, seconds + 1e-6)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        inside = frame if self._armed else None  # a late one hits whatever comes after the call
        while inside is not None:
            if inside.f_code.co_filename.startswith(PACKAGE):
                self.number += 1
                if self._more:  # while this one is on its way
                    self._more -= 1
                    self._arm()
                raise Interruption
            inside = inside.f_back
