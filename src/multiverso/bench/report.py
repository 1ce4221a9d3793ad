"""A benchmark's result as readable tables."""

from __future__ import annotations

from typing import Any

from multiverso.columns import in_columns


def render(result: dict[str, Any]) -> str:
    """Returns the result as tables for a terminal."""
    machine = result["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']:.1f} at the end)"
    single = []
    for row in result["single"] + result["rows"]:
        size = f"{row['elements']:,}" if "elements" in row else f"{row['rows']:,} rows of 64"
        times = (f"{row[key]:,.2f}" for key in ("microseconds", "limit_microseconds", "ratio"))
        single.append([row["operation"], size, *times])
    together = []
    for row in result["together"] + result["rounds"]:
        speed = f"{row['gigabytes_a_second']:.1f}" if "gigabytes_a_second" in row else ""
        size = f"{row['elements']:,}" if row["elements"] else ""
        together.append([row["operation"], size, str(row["workers"]), f"{row['microseconds']:,.2f}", speed])
    steps = result["steps"]
    loops = [["without multiverso", f"{steps['steps_a_second_without']:.2f}", ""]]
    for number, rate in steps["steps_a_second"].items():
        loops.append([str(number), f"{rate:.2f}", f"{steps['speed_up'][number]:.3f}"])
    tables = {
        f"one worker, microseconds a call: {title}": (("operation", "size", "shared", "private", "ratio"), single),
        "workers at once, microseconds a call of each": (
            ("operation", "size", "workers", "us", "GB/s of all"),
            together,
        ),
        f"{steps['compute_seconds'] * 1e3:.0f} ms of slept compute, then an exchange": (
            ("workers", "steps/s", "speed-up"),
            loops,
        ),
    }
    return "\n\n".join(f"{title}\n{in_columns(head, rows, right=True)}" for title, (head, rows) in tables.items())
