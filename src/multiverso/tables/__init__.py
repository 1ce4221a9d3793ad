"""Tables: what a user holds."""

from __future__ import annotations

from multiverso.tables.array import ArrayTableHandler
from multiverso.tables.counter import Counter
from multiverso.tables.handler import TableHandler
from multiverso.tables.keyed.keys import keys
from multiverso.tables.keyed.spec import Eviction
from multiverso.tables.keyed.table import KeyedTable
from multiverso.tables.matrix import MatrixTableHandler
from multiverso.tables.pending import Pending
from multiverso.tables.read_only import ReadOnlyKeyedTable, attach_read_only

__all__ = [
    "ArrayTableHandler",
    "Counter",
    "Eviction",
    "KeyedTable",
    "MatrixTableHandler",
    "Pending",
    "ReadOnlyKeyedTable",
    "TableHandler",
    "attach_read_only",
    "keys",
]
