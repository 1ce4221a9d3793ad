"""A benchmark's result as readable tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


def render(result: dict[str, Any]) -> RenderableType:
    """Returns the result as tables for a terminal."""
    machine = result["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']:.1f} at the end)"
    single = _table(f"one worker, microseconds a call: {title}", "operation", "size", "shared", "private", "ratio")
    for row in result["single"] + result["rows"]:
        size = f"{row['elements']:,}" if "elements" in row else f"{row['rows']:,} rows of 64"
        times = (f"{row[key]:,.2f}" for key in ("microseconds", "limit_microseconds", "ratio"))
        single.add_row(row["operation"], size, *times)
    columns = ("operation", "size", "workers", "us", "GB/s of all")
    together = _table("workers at once, microseconds a call of each", *columns)
    for row in result["together"] + result["rounds"]:
        speed = f"{row['gigabytes_a_second']:.1f}" if "gigabytes_a_second" in row else ""
        size = f"{row['elements']:,}" if row["elements"] else ""
        together.add_row(row["operation"], size, str(row["workers"]), f"{row['microseconds']:,.2f}", speed)
    steps = result["steps"]
    title = f"{steps['compute_seconds'] * 1e3:.0f} ms of slept compute, then an exchange"
    loops = _table(title, "workers", "steps/s", "speed-up")
    loops.add_row("without multiverso", f"{steps['steps_a_second_without']:.2f}", "")
    for number, rate in steps["steps_a_second"].items():
        loops.add_row(str(number), f"{rate:.2f}", f"{steps['speed_up'][number]:.3f}")
    return Group(single, together, loops)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    return table
