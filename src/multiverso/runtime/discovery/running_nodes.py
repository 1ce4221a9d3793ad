"""The nodes that run here, found by their sockets' names in /proc."""

from __future__ import annotations

from pathlib import Path

_ACCEPTS_CONNECTIONS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix


def node_addresses(table: str | None = None) -> list[str]:
    """Lists the abstract sockets on which nodes listen, also other users'.

    Args:
        table: The text of /proc/net/unix, which is read by default.
    """
    text = Path("/proc/net/unix").read_text() if table is None else table
    found = set()
    for row in text.splitlines()[1:]:
        columns = row.split(maxsplit=7)
        listens = len(columns) == 8 and int(columns[3], 16) & _ACCEPTS_CONNECTIONS
        if listens and columns[7].startswith("@multiverso-"):
            found.add(columns[7][1:])
    return sorted(found)
