"""Lines for people, on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes a line, at once and in one piece. Any thread."""
    sys.stderr.write(f"multiverso: {text}\n")
    sys.stderr.flush()
