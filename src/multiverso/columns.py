"""Rows of text as columns, for terminals and pipes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from click import style, unstyle

_STYLE = re.compile(r"(\x1b\[[\d;]*m)")


def in_columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Lays out a table: lines without an end, each column as wide as its widest cell.

    Args:
        head: what stands above each column; it becomes bold.
        rows: cells, which may be styled as `click.style` does it.
        right: all but the first column end at the right, as numbers do.
    """
    lines = [[style(name, bold=True) for name in head], *rows]
    widths = [max(width(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: bool) -> str:
    line = ""
    for place, (cell, wide) in enumerate(zip(cells, widths, strict=True)):
        gap = " " * (wide - width(cell))
        line += (gap + cell if right and place else cell + gap) + "  "
    return line.rstrip()


def width(text: str) -> int:
    """Returns how many columns of a terminal a line takes, whatever its style."""
    return sum(map(_columns_of, unstyle(text)))


def cut(line: str, most: int) -> str:
    """Returns as much of a line as fits into so many columns, in its styles."""
    if width(line) <= most:
        return line
    kept, left = "", most
    for part in _STYLE.split(line):
        if part.startswith("\x1b"):
            kept += part  # also the one that ends it
            continue
        for character in part:
            left -= _columns_of(character)
            if left < 0:
                break
            kept += character
    return kept


def _columns_of(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # drawn over the one before
        return 0
    return 1 + (unicodedata.east_asian_width(character) in "WF")
