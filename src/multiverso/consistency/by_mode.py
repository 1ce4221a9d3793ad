"""The consistencies by mode. A new one is a file beside these, a mode in ``spec/modes.py`` and a line here."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.consistency.asynchronous import Asynchronous
from multiverso.consistency.bounded import Bounded
from multiverso.consistency.protocol import Consistency, TableAccess
from multiverso.consistency.quorum import QuorumRounds
from multiverso.consistency.synchronous import Synchronous
from multiverso.layout import words as at

OF_MODE: dict[int, Callable[[TableAccess], Consistency]] = {
    at.ASYNCHRONOUS: Asynchronous,
    at.BOUNDED: Bounded,
    at.SYNCHRONOUS: Synchronous,
    at.QUORUM: QuorumRounds,
}
