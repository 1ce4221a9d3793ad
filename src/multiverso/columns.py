"""Rows of text as columns, for terminals and pipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from click import style, unstyle


def in_columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: bool = False) -> str:
    """Lays out a table: lines without an end, each column as wide as its widest cell.

    Args:
        head: what stands above each column; it becomes bold.
        rows: cells, which may be styled as `click.style` does it.
        right: all but the first column end at the right, as numbers do.
    """
    lines = [[style(name, bold=True) for name in head], *rows]
    widths = [max(len(unstyle(cell)) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(_line(line, widths, right) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: bool) -> str:
    line = ""
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        gap = " " * (width - len(unstyle(cell)))
        line += (gap + cell if right and place else cell + gap) + "  "
    return line.rstrip()
