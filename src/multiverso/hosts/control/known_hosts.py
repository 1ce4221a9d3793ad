"""The coordinator's records of the hosts."""

from __future__ import annotations

from dataclasses import dataclass, field

from multiverso.hosts.control.messages import Address, Line, Order, ToHost


@dataclass
class KnownHost:
    """The coordinator's record of one host.

    Attributes:
        address: where its copies are reached, once its node has begun.
        workers: their lines, by number.
        settled: the last barrier that all of them have reached.
        gone: whether all of them have left, and what they added is at the homes.
        lost: whether the others no longer wait for it.
        told: how many news of workers it has been told.
    """

    address: Address | None = None
    workers: dict[int, Line] = field(default_factory=dict)
    settled: int = 0
    gone: bool = False
    lost: bool = False
    told: int = 0

    @property
    def is_live(self) -> bool:
        """Whether a worker of it lives and has not left."""
        return any(line.is_live for line in self.workers.values())


class KnownHosts(list[KnownHost]):
    """All hosts of a job, by number."""

    def left(self) -> list[int]:
        """Returns those that are not lost."""
        return [host for host, known in enumerate(self) if not known.lost]

    def there(self) -> list[int]:
        """Returns those whose workers have not all gone, and that are not lost."""
        return [host for host, known in enumerate(self) if not (known.lost or known.gone)]

    @property
    def all_came(self) -> bool:
        """Whether every host has come, or was lost before it did."""
        return not any(known.address is None and not known.lost for known in self)

    def to_all(self, order: Order, but: int | None = None) -> list[ToHost]:
        """Returns an order to each host that is not lost, one left out."""
        return [(host, order) for host in self.left() if host != but]
