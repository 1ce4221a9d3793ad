"""Which hosts a job has, and which worker is on which: plain data, the same on every host."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from multiverso.errors import StartupError
from multiverso.layout.words import MAX_WORKERS, MOST_WORKERS

ROSTER_VARIABLE = "MULTIVERSO_ROSTER"
LISTENER_VARIABLE = "MULTIVERSO_ROSTER_LISTENER"


def spread(workers: int, hosts: int) -> tuple[int, ...]:
    """Returns how many workers each host gets: as evenly as can be, the first hosts one more.

    Raises:
        StartupError: a host would have none.
    """
    if hosts < 1 or workers < hosts:
        raise StartupError(
            f"{workers} worker(s) cannot be spread over {hosts} hosts: each needs one; give -n {hosts} or more"
        )
    each, more = divmod(workers, hosts)
    return tuple(each + (host < more) for host in range(hosts))


@functools.lru_cache
def _hosts_of(workers: tuple[int, ...], order: tuple[int, ...]) -> dict[int, int]:
    hosts = [host for host, count in enumerate(workers) for _ in range(count)]
    return dict(zip(order or range(len(hosts)), hosts, strict=True))


@dataclass(frozen=True)
class Roster:
    """Everything that a host needs before its node begins.

    Attributes:
        host: this host's number, from 0; host 0 is the coordinator.
        names: the hosts' names, in their order: what errors call them.
        workers: how many workers each has; they are numbered in host order, unless ``order`` says otherwise.
        coordinator: where the coordinator listens: address and port.
        credentials: the job's secret, certificate and key, as text.
        bind: the address at which the nodes listen.
        addresses: where each host's node is reached by the others.
        rehearsal: whether all hosts are really one machine, whose cores and devices they part between them.
        order: the workers' numbers, the first host's before the second's, where their launcher has dealt them out in
            another way; empty for 0, 1, 2, ...
        grace: seconds without a word of a host until it counts as lost.
        times_replaced: how often this host was lost and started again in this job: its node takes the lost one's place.
    """

    host: int
    names: tuple[str, ...]
    workers: tuple[int, ...]
    coordinator: tuple[str, int]
    credentials: str = field(default="", repr=False)
    bind: str = "127.0.0.1"
    addresses: tuple[str, ...] = ()
    rehearsal: bool = False
    order: tuple[int, ...] = ()
    grace: float = 30.0
    times_replaced: int = 0

    def __post_init__(self) -> None:
        if not (len(self.names) == len(self.workers) and 0 <= self.host < len(self.names)):
            raise StartupError(f"this is not a roster of hosts: {self}")
        if not all(1 <= count <= MAX_WORKERS for count in self.workers) or self.workers_num > MOST_WORKERS:
            raise StartupError(
                f"each host of a job has 1 to {MAX_WORKERS} workers, and the job {MOST_WORKERS} at most; got "
                f"{', '.join(map(str, self.workers))}: start fewer, and give each more threads (OMP_NUM_THREADS)"
            )
        if self.order and sorted(self.order) != list(range(self.workers_num)):
            raise StartupError(f"each worker of a job is on one host; got {self.order} for {self.workers}")

    @property
    def job(self) -> str:
        """What the job is called, the same on all hosts: by its secret, which it does not reveal."""
        return hashlib.sha256(self.credentials.encode()).hexdigest()[:16]

    @property
    def token(self) -> str:
        """What followers of the workers' publications know; it does not reveal the secret either."""
        return hashlib.sha256(f"publications {self.credentials}".encode()).hexdigest()

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return len(self.names)

    @property
    def workers_num(self) -> int:
        """How many workers the job has, on all hosts together."""
        return sum(self.workers)

    @property
    def leads(self) -> bool:
        """Whether this host's node is the coordinator."""
        return self.host == 0

    @property
    def local(self) -> Sequence[int]:
        """The numbers of this host's workers."""
        return self.workers_of(self.host)

    def on(self, host: int) -> Roster:
        """Returns the same for another host."""
        return replace(self, host=host)

    def workers_of(self, host: int) -> Sequence[int]:
        """Returns the numbers of a host's workers."""
        first = sum(self.workers[:host])
        numbers: Sequence[int] = self.order or range(self.workers_num)
        return numbers[first : first + self.workers[host]]

    def host_of(self, worker_id: int) -> int:
        """Returns the number of a worker's host."""
        return _hosts_of(self.workers, self.order)[worker_id]

    def places(self) -> tuple[str, ...]:
        """Returns the name of each worker's host, by the worker's number."""
        return tuple(self.names[self.host_of(worker_id)] for worker_id in range(self.workers_num))

    def as_text(self) -> str:
        """Returns it as one line."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_text(cls, text: str) -> Roster:
        """The inverse of `as_text`.

        Raises:
            StartupError: it is not a roster.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StartupError(f"{ROSTER_VARIABLE} is not a roster of hosts ({error!r})") from error
