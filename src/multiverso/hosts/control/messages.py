"""The messages between the coordinator and the nodes, one record each.

Reports go to the coordinator, orders come from it. A message travels as a JSON object whose ``do`` names its record.
Anything else ends the connection, and has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from multiverso.hosts.peer.frames import ProtocolError
from multiverso.layout import words as at

_Any = TypeVar("_Any")
Key = tuple[str, int | str]
Address = tuple[str, int]
Reached = dict[int, dict[int, list[int]]]
"""By table and worker, how far the worker is."""
Step = Literal["make", "join", "push"]


class _Message(Struct, tag_field="do", tag=str.lower, forbid_unknown_fields=True):
    pass


class _OfTable(_Message):
    key: Key


class _OfNumber(_OfTable):
    number: int


class WaitOf(Struct, array_like=True, forbid_unknown_fields=True):
    """What a worker waits for, as ``layout/words.py`` names it, and since when on its host's clock."""

    kind: int
    table: int
    stage: int
    target: int
    since_ns: int


class Publication(Struct, forbid_unknown_fields=True):
    """What a process on a host publishes, or follows for the readers there, as `watching.snapshot.Published` has it."""

    name: str
    version: int
    step: int | None
    readers: int
    left_out: int
    memory_bytes: int
    sent_bytes: int = 0
    oldest_version: int = 0
    oldest_pid: int = 0


class HostFacts(Struct, forbid_unknown_fields=True):
    """Facts about a host that it tells the others.

    Attributes:
        busy_seconds: for how long its busiest way to another host was busy.
        behind_seconds: how old its copies of values, and the others' of its own, are at most.
        publications: those that its processes publish or follow.
    """

    busy_seconds: float = 0.0
    behind_seconds: float = 0.0
    publications: list[Publication] = []


class Note(Struct, forbid_unknown_fields=True):
    """A host's figures of a worker's process, and of its operations on each table.

    Attributes:
        logged: the step and the values that it has given to `mv.log`.
        tables: by number.
        keyed: of those whose rows live on one host each, by what the job calls them; of a host's first worker also how
            many ``rows`` live there.
        host: of a host's first worker: what there is to say of the host.
    """

    program: str
    cpu_seconds: float
    resident_bytes: int
    logged: dict[str, Any] | None
    tables: dict[int, dict[str, int | float]]
    keyed: dict[str, dict[str, int | float]] = {}
    host: HostFacts | None = None


class Line(Struct, array_like=True, forbid_unknown_fields=True):
    """A worker as its node sees it: some of the words of its block of the control segment (``layout/words.py``).

    Attributes:
        pid: of its process; 0 of one that never came, of which nothing else is known.
        progress: how far it is in each synchronous table, by the table's number; while it waits, in those with a bound.
        note: now and then.
        read_ns: its host's clock when it was read; 0: now.
    """

    worker_id: int
    pid: int = 0
    liveness: int = at.FREE
    participation: int = at.NEVER
    barrier: int = 0
    created: int = 0
    incarnation: int = 0
    checkpoint: int = 0
    threaded: bool = False
    gave_up_ns: int = 0
    waited_ns: int = 0
    wait: WaitOf | None = None
    progress: dict[int, list[int]] = {}
    note: Note | None = None
    read_ns: int = 0

    @property
    def is_live(self) -> bool:
        """Alive and not left: others wait for it."""
        return self.liveness == at.ALIVE and self.participation == at.ACTIVE


# -- both ways ---------------------------------------------------------------------------------------------------


class Workers(_Message):
    """The state of the sending host's workers; from the coordinator, of all workers that have changed."""

    workers: list[Line]


class Clocks(_Message):
    """Workers' clocks in tables with a bound; their adds up to these clocks are at the homes."""

    tables: Reached


class Used(_OfNumber):
    """A worker asks again for a table that its host had said to be unused; or: the host's workers may have it."""


class Part(_OfNumber):
    """No host's workers have a table, and one has closed it: its name is free; or: nothing on a host waits for it."""


class Gather(_Message):
    """A worker is about to save the tables: its host wants what the others have not sent yet; or: it is there, take."""

    number: int


class Bring(_Message):
    """Another host gathers: settle, while everyone continues; or: what a host had when it was asked is at the homes."""

    host: int
    number: int


class Published(_Message):
    """A worker publishes under a name.

    ``address`` is where other hosts follow it. Of one name the first counts, until one comes ``instead_of`` it.
    """

    name: str
    address: Address
    instead_of: Address | None = None


# -- reports -----------------------------------------------------------------------------------------------------


class Hello(_Message):
    """A node has begun; ``address``: where its copies are reached."""

    address: Address


class Options(_Message):
    """The arguments that a host's first worker gave to init."""

    options: dict[str, Any]


class Settled(_Message):
    """A host's workers have reached a barrier, and what they added is at the homes.

    ``written``: the synchronous tables that they have overwritten; ``turns``: by synchronous table, the first turn that
    the host is not ready for; ``arrived``: by table with a quorum, the last turn whose values the host has.
    """

    barrier: int
    written: list[int] = []
    turns: dict[int, int] = {}
    arrived: dict[int, int] = {}


class Create(_OfTable):
    """A host's workers have asked for a table."""

    spec: dict[str, Any]
    mode: str
    workers: list[int]
    masters: list[int]


class Withdraw(_OfTable):
    """One of them no longer waits."""


class Done(_OfTable):
    """A step of a table's creation is done, or cannot be: ``error`` is a class of `multiverso.errors` and a text."""

    step: Step
    error: tuple[str, str] | None = None


class Unused(_OfNumber):
    """No worker of a host has a table; ``closing``: one of them has closed it."""

    closing: bool


class AllGather(_Message):
    """A worker's note for all workers, after a barrier."""

    number: int
    worker: int
    note: str


class Ask(_Message):
    """A worker asks the coordinator, see ``dealing.py``; with the number 0, it says what has no answer."""

    worker: int
    number: int
    question: dict[str, Any]


class Filled(_Message):
    """A host has told one that was started again all of a table's rows that are to live on it, or be kept there.

    Others say so, too, that have none for it, as soon as they do not ask for what a lost host had been told.

    ``view``: how often hosts were lost, or became homes of its rows again, by then.
    """

    table: int
    host: int
    view: int


class Gone(_Message):
    """All workers of a host have ended, and what they added is at the homes."""


# -- orders ------------------------------------------------------------------------------------------------------


class Peers(_Message):
    """The addresses of all hosts; None for one that was lost before it came. The higher of two connects."""

    addresses: list[Address | None]


class Make(_OfNumber):
    """Make a table's memory; ``writers``: whose initial value counts; ``workers``: those that have asked."""

    spec: dict[str, Any]
    mode: str
    writers: list[int] = []
    workers: list[int] = []


class Begin(_OfTable):
    """Begin a table's next step, as all hosts have done the one before.

    ``join``: it exchanges differences; ``push``: what was written goes to the
    homes; ``finish``: what the others wrote is taken, and the constructors return.
    """

    step: Literal["join", "push", "finish"]


class Drop(_OfTable):
    """A table cannot be made; ``specs``: what each host has asked for, where that is why."""

    error: tuple[str, str]
    specs: dict[str, dict[str, Any]] | None = None


class Free(_OfNumber):
    """All hosts have parted with a table: free its memory."""


class Take(_Message):
    """All hosts have settled: take what is at the homes, and let the workers pass.

    ``written``: by table, whose host's values count, in which turn they go round, and whether all are as far as that;
    ``expected``: by table with a quorum, the last turn whose values a host has, where not all have.
    """

    barrier: int
    written: dict[int, tuple[int, int, bool]] = {}
    expected: dict[int, int] = {}


class AllGathered(_Message):
    """All workers' notes; None of one that has passed that barrier without it."""

    number: int
    notes: dict[int, str | None]


class Answer(_Message):
    """To a worker's question; with ``wait``, another answer follows."""

    worker: int
    number: int
    answer: dict[str, Any]


class Agreed(_Message):
    """The arguments of init are those of the first host: the workers may begin."""


class Refuse(_Message):
    """Another host was first, with other arguments."""

    options: dict[str, Any]


class Lost(_Message):
    """A host is lost."""

    host: int
    why: str


class Joined(_Message):
    """Another node has a lost host's place."""

    host: int
    address: Address


class Returned(_Message):
    """Another host is a home of a table's rows again."""

    table: int
    host: int


class Returns(Struct, forbid_unknown_fields=True):
    """Of a table's rows: how often a host became a home again, and those that are."""

    times: int = 0
    hosts: list[int] = []


class Welcome(_Message):
    """To that node: who is there, and what they have done together.

    ``survivors``: who was left after each loss; ``epoch``: how often hosts were lost or returned; ``released``: the
    last barrier that all have passed; ``overwritten``: by synchronous table, the last turns that carried a host's
    values, and whose; ``ordered``: tables made by order so far; ``published``: what the workers publish;
    ``returns``: by table, of rows by key.
    """

    survivors: list[list[int]]
    epoch: int
    lost: list[int]
    addresses: list[Address | None]
    options: dict[str, Any]
    released: int
    workers: list[Line]
    clocks: Reached
    overwritten: dict[int, dict[int, int]]
    tables: list[Make]
    ordered: int
    published: list[Published] = []
    returns: dict[int, Returns] = {}


class Over(_Message):
    """All workers of all hosts have ended."""


Report = (
    Hello | Options | Workers | Settled | Create | Withdraw | Done | Unused | Used | Part | Gather | Bring
    | AllGather | Ask | Clocks | Published | Filled | Gone
)  # fmt: skip
TableOrder = Make | Begin | Drop | Used | Part | Free
Order = (
    TableOrder | Peers | Workers | Clocks | Published | Take | Bring | Gather | Lost | Joined | Returned | Over
    | AllGathered | Answer | Agreed | Refuse | Welcome
)  # fmt: skip
ToHost = tuple[int, Order]
"""A host's number, and the order for it."""

_encoder = msgspec.json.Encoder()
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


@dataclass(frozen=True)
class Alone:
    """From this host itself: it cannot continue, and why."""

    why: str


def encoded(message: Report | Order) -> bytes:
    """Returns a message as it travels."""
    return _encoder.encode(message)


def report_of(body: bytes | memoryview) -> Report:
    """Returns a report that a host has sent.

    Raises:
        ProtocolError: no host sends that.
    """
    return _decoded(_reports, body, "report")


def order_of(body: bytes | memoryview) -> Order:
    """Returns an order that the coordinator has sent.

    Raises:
        ProtocolError: no coordinator sends that.
    """
    return _decoded(_orders, body, "order")


def _decoded(decoder: msgspec.json.Decoder[_Any], body: bytes | memoryview, what: str) -> _Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"that is no {what}: {error}") from error
