"""What a benchmark says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def give_report(report: Any, file: Path | None, indent: int | None = 1) -> None:
    """Prints a report as JSON, with ``indent=None`` in one line, and writes it to a file where one was asked for."""
    text = json.dumps(report, indent=indent)
    print(text)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
