"""The interface of the exchange of values between hosts, implemented for one host."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.hosts.control import messages
from multiverso.runtime.node.catalogue import Piece


class Exchange:
    """Moves a table's values between hosts: of a job on one, nothing. `ExchangedTables` is for several.

    Attributes:
        several: whether there are other hosts.
        name: what errors call this one.
    """

    several = False
    name = ""

    def report(self, *reports: messages.Report) -> None:
        """Reports to the coordinator, after what this host's workers have done so far."""
        raise AssertionError("there is nobody to report to")

    def move(self, step: str, piece: Piece, then: Callable[[], None]) -> None:
        """Does a step of a table's life between the hosts, then calls ``then`` in the node's thread.

        Args:
            step: ``"join"``, ``"push"`` or ``"finish"``, as in `messages.Begin`; ``"part"``: nothing waits for its
                values any more; ``"free"``: it leaves the exchange.
            piece: the table.
            then: what is to be done after that.
        """
        then()

    def refill(self, number: int, then: Callable[[bool], None]) -> None:
        """Holds a synchronous table's rounds with its values here, calls ``then`` as above, and lets them continue."""
