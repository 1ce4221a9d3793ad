"""Splits workers' output into lines: pure functions and two small state machines."""

import re
import time
from collections.abc import Sequence

_BEGINS_TRACEBACK = re.compile(
    rb"Traceback \(most recent call last\):|Exception ignored |Error in atexit|Process [\w-]+:$"
)

_LEADING_ON = (b"During handling of the above", b"The above exception was")
# What differs in the same error of another worker, beside its number: no number that an error is about.
_OWN = re.compile(rb"(?<= at )0x[0-9a-f]+|(?<=\(pid )\d+")
_TRACEBACK = re.compile(rb"(?: *[+|] )?(?:Exception Group )?Traceback \(most recent call last\):")
# around the errors of an exception group
_FRAME, _IN_FRAME = re.compile(rb" +\+[-+]+(?: [\d.]+ -+)?"), re.compile(rb"^ +\| (?=\S)")
_LONGEST_TRACEBACK = 2000
_HELD_SECONDS = 0.5  # the beginning of a traceback waits for its end
# How a host's launcher writes a worker's line; its own have no number.
_PREFIXED = re.compile(rb"(?s)(?:\[(\d{1,9})\] )?(.*)")
Seen = dict[bytes, tuple[bytes, list[int]]]
_WIDEST = 4096


def last_state(line: bytes) -> bytes:
    """Returns what a line without its newline looks like at its end: a progress bar goes back and draws over itself.

    A carriage return at the end belongs to the newline and stays.
    """
    if b"\r" not in line:
        return line
    text = line.rstrip(b"\r")
    states = [state for state in text.split(b"\r") if state.strip()]
    return (states[-1] if states else b"") + line[len(text) :]


def kept(begun: bytes) -> bytes:
    """Returns the part of an unfinished line that still matters: from its last visible state on."""
    if b"\r" not in begun:
        return begun
    start = max((m.start() for m in re.finditer(rb"[^\r]+", begun) if m.group().strip()), default=0)
    return begun[start:]


def seen_now(begun: bytes) -> bytes:
    """Returns what a terminal would show of an unfinished line; empty when it was drawn over with blanks."""
    states = [state for state in begun.split(b"\r") if state]
    return states[-1][:_WIDEST] if states else b""


def drawn(lines: Sequence[bytes], in_traceback: bool) -> tuple[list[bytes], bool]:
    """Returns what lines look like at their ends (`last_state`), and whether a traceback has begun and not ended there.

    No progress bar draws a traceback: its lines are whole, whatever its error's message has in it.
    """
    shown = []
    for line in lines:
        shown.append(b" ".join(line.split(b"\r")).rstrip() if in_traceback else last_state(line))
        in_traceback = bool(_TRACEBACK.match(line)) or (in_traceback and (not line or line.startswith(b" ")))
    return shown, in_traceback


def words_of(line: bytes) -> bytes:
    """Returns what a line says, without the frame of an exception group's traceback; nothing of the frame itself."""
    return b"" if _FRAME.fullmatch(line) else _IN_FRAME.sub(b"", line).strip()


class Tracebacks:
    """One worker's lines, in which the same traceback as another worker's is left out, and each is in one piece.

    Args:
        worker_id: whose they are.
        seen: for all workers of a job: each traceback's last line, and who has written it, the first one first; None:
            nothing is left out.

    Attributes:
        interrupted: whether those of KeyboardInterrupt are left out, too: they say nothing but where a worker was.
        holds: whether the beginning of a traceback waits for its end.
    """

    def __init__(self, worker_id: int, seen: Seen | None = None) -> None:
        self.interrupted = False
        self._worker_id, self._seen = worker_id, seen
        self._held: list[bytes] = []
        self._held_since = 0.0
        self._between: list[bytes] | None = None  # what has come since one was left out, if it may belong to another

    @property
    def holds(self) -> bool:
        """Whether the beginning of a traceback waits for its end."""
        return bool(self._held)

    def take(self, lines: list[bytes]) -> list[bytes]:
        """Returns the lines, without newlines, that are to be shown now."""
        shown: list[bytes] = []
        for line in lines:
            if _BEGINS_TRACEBACK.match(line):
                if any(held.startswith(b"Traceback") for held in self._held):
                    shown += self.rest()
                if not self._held:
                    self._held_since = time.monotonic()
                self._held.append(line)
            elif not self._held:
                shown += self._behind(line)
            else:
                self._held.append(line)
                # an interrupt at the beginning of a function has a blank line in its traceback
                if line and not line.startswith((b" ", b"\t")):
                    shown += self._judged(line)
                elif len(self._held) > _LONGEST_TRACEBACK:
                    shown += self.rest()
        return shown

    def rest(self) -> list[bytes]:
        """Returns what was held back, because its end does not come."""
        held, self._held = [*(self._between or []), *self._held], []
        self._between = None
        return held

    def late(self) -> list[bytes]:
        """Returns what was held back for too long."""
        return self.rest() if self._held and time.monotonic() - self._held_since > _HELD_SECONDS else []

    def _behind(self, line: bytes) -> list[bytes]:
        """A line outside of tracebacks: behind one that was left out, what leads to the next one waits for it."""
        if self._between is not None and (not line or line.startswith(_LEADING_ON)):
            self._between.append(line)
            return []
        self._between = None
        return [line]

    def _without_its_own(self, block: list[bytes]) -> bytes:
        return re.sub(rb"(?<=worker )%d\b" % self._worker_id, b"", _OWN.sub(b"", b"\n".join(block)))

    def _judged(self, last: bytes) -> list[bytes]:
        block, between = self._held, self._between or []
        self._held, self._between = [], None
        if self.interrupted and last.startswith(b"KeyboardInterrupt"):
            return between
        if self._seen is not None:
            _, workers = self._seen.setdefault(self._without_its_own(block), (last, []))
            if workers and self._worker_id not in workers:
                workers.append(self._worker_id)
                self._between = []
                return []
            if not workers:
                workers.append(self._worker_id)
        return between + block


def whose(line: bytes) -> tuple[int, bytes, bytes]:
    """Returns of a line of a host's launcher the worker, or -1, what stands before its text, and the text."""
    found = _PREFIXED.fullmatch(line)
    assert found
    return int(found[1] or -1), line[: found.start(2)], found[2]


def folded(seen: Seen) -> list[tuple[int, bytes]]:
    """Returns what to say of the tracebacks that were left out: who wrote the first one, and a line."""
    said = []
    for last, (first, *others) in seen.values():
        if others:
            names = ", ".join(map(str, sorted(others)))
            who = f"worker {names}" if len(others) == 1 else f"{len(others)} others (workers {names})"
            said.append((first, f"the same from {who}: ".encode() + last))
    return said
