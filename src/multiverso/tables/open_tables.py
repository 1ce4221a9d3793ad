"""The tables that this worker has open, by their kinds."""

from __future__ import annotations

from multiverso.runtime.session.session import Session
from multiverso.tables.handler import TableHandler
from multiverso.tables.keyed.table import KeyedTable


def handlers(session: Session) -> list[TableHandler]:
    """Returns the handlers of a session's arrays and matrices, in the order in which the tables were made."""
    return [handle for handle in session.handles if isinstance(handle, TableHandler)]


def keyed_tables(session: Session) -> dict[str, KeyedTable]:
    """Returns the first open object of each keyed table, by what the job calls the table."""
    found: dict[str, KeyedTable] = {}
    for handle in session.handles:
        if isinstance(handle, KeyedTable):
            found.setdefault(handle._called, handle)
    return found
