"""What a worker's bytes mean as lines: pure functions and one small machine."""

import re

_BEGINS_TRACEBACK = re.compile(
    rb"Traceback \(most recent call last\):|Exception ignored |Error in atexit|Process [\w-]+:$"
)

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


class Interruptions:
    """Takes the tracebacks of KeyboardInterrupt out of one worker's lines: nobody asked where it was."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def without(self, lines: list[bytes]) -> list[bytes]:
        """Returns the lines, without newlines, that are to be shown; the beginning of a traceback waits for its end."""
        shown: list[bytes] = []
        for line in lines:
            if _BEGINS_TRACEBACK.match(line):
                if any(held.startswith(b"Traceback") for held in self._held):
                    shown += self.rest()
                self._held.append(line)
            elif not self._held:
                shown.append(line)
            else:
                self._held.append(line)
                # an interrupt at the beginning of a function has a blank line in its traceback
                if line and not line.startswith((b" ", b"\t")):
                    text = self.rest()
                    shown += [] if line.startswith(b"KeyboardInterrupt") else text
        return shown

    def rest(self) -> list[bytes]:
        """Returns what was held back, because its end does not come."""
        held, self._held = self._held, []
        return held
