"""The requests of a process to its node, one record each; see ``docs/protocol.md`` for the answers.

A request travels as a JSON object whose ``do`` names its record. Whatever a process of the same user sends, by mistake
or on purpose, reaches the node's code as one of these records or not at all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from multiverso.errors import StartupError
from multiverso.spec.modes import MODES
from multiverso.wire.messages import Message

_Number = Annotated[int, Meta(gt=-(2**62), lt=2**62)]
_Text = Annotated[str, Meta(max_length=2000)]
Seen = Annotated[int, Meta(ge=0, lt=2**50)]  # a version of a publication, whose word has room for as many
OnLost = Literal["stop", "continue"]


class _Request(Struct, tag_field="do", tag=str.lower, kw_only=True):
    """``id`` is the request's number, which its answers repeat."""

    id: _Number | None = None


# -- from any process --------------------------------------------------------------------------------------------


class Hello(_Request):
    """Answered at once: a process that stays asleep instead is stopped, hangs or is not a node."""


class Challenge(_Request):
    """Asks the node to prove that it knows the job's secret. Sent where the kernel cannot tell users apart."""

    nonce: _Text


class Prove(_Request):
    """Proves that this process knows it; until then it gets no other answer there."""

    proof: Any = None


class Status(_Request):
    """Asks for what ``multiverso top`` shows."""


class Look(_Request):
    """Asks for plain memory of the job, where keyed tables are, to read it only.

    The answer has its ``offset`` (null: none has this name) and ``size``; beside it comes a descriptor of the job's
    memory that cannot be written through. The node ends the connection before it gives the memory to another table.
    """

    name: _Text


class Subscribe(_Request):
    """From a reader of a publication to its publisher: asks for the memory.

    ``seen`` is the newest version that it has had from another publisher of this name; versions here become higher.
    The answer's ``loan`` says what lies where; beside it come the data's descriptor, through which nothing can be
    written, and that of the readers' memory.
    """

    seen: Seen = 0


class Find(_Request):
    """Asks where a worker of another host publishes under a name.

    The answer's ``address``, host and port, is null where none does; ``token`` and ``encrypted`` are as for `Publish`.
    """

    name: _Text


# -- from workers ------------------------------------------------------------------------------------------------


class Consistency(Struct):
    """A mode of `spec.modes`, its bound in ticks, and its quorum in words."""

    mode: str
    staleness: _Number
    quorum: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"there is no consistency {self.mode!r}")


class Attach(_Request):
    """Asks for a place in the job.

    The answer is ``{"later": true}`` while the place's dead owner is not quite gone; otherwise ``worker_id``,
    ``workers_num``, ``incarnation`` (how many processes had the place before), ``control`` (bytes of the control
    segment, which begins the job's memory), ``job``, ``places`` and ``here`` (nothing on one host); beside it comes the
    descriptor of the job's memory.
    """

    protocol: _Number
    consistency: Consistency
    worker_id: _Number | None = None
    workers_num: _Number | None = None
    on_lost: OnLost | None = None
    exchange: dict[str, Any] | None = None


class Ready(_Request):
    """This worker holds its life lock. Answered once all workers of a job of fixed size are ready."""


class Withdraw(_Request):
    """``init`` was interrupted: its process may return, and the others wait on. Refused to one that has begun."""


class Create(_Request):
    """Asks for a table: by the name in its spec, or by ``order``, counted from 1. See *create* in the protocol."""

    spec: dict[str, Any]
    order: _Number | None = None
    master: bool = False


class Share(_Request):
    """Asks for plain memory, as `Create` does for a table; the first worker's turn initialises it."""

    spec: dict[str, Any]


MemoryRequest = Create | Share


class Initialised(_Request):
    """This worker has written its initial value. No answer."""


class Leaving(_Request):
    """This worker is about to leave a node whose standard error nobody reads.

    Answered with ``lines``: to the host's last worker, what the node would have written there at the end.
    """


class Close(_Request):
    """This worker has unmapped a table or plain memory."""

    number: _Number


class Cancel(_Request):
    """The session no longer waits for the answer to its last request. No answer.

    ``why``: it has no room for the table; then no worker gets it, and all raise `OutOfMemoryError`.
    """

    why: _Text | None = None


# -- from workers of a job on several hosts ----------------------------------------------------------------------


class Arrived(_Request):
    """This worker is about to wait at a barrier, or counts as past it. No answer."""

    barrier: _Number


class Gather(_Request):
    """This worker is about to save the tables. No answer.

    The control segment's ``GATHERED`` is ``number`` once what other hosts had not sent is here.
    """

    number: _Number


class AllGather(_Request):
    """Answered with all workers' ``notes`` once each has sent its own."""

    number: _Number
    note: _Text


class Ask(_Request):
    """Asks the coordinator; its ``answer`` may come after some that only say for whom it waits."""

    question: dict[str, Any]


class Notify(_Request):
    """Tells the coordinator something. No answer."""

    saying: dict[str, Any]


class Combine(_Request):
    """This worker's part of a piece of a reduction is in its slot. No answer."""

    number: _Number
    signature: _Number
    nbytes: _Number
    dtype: _Text
    operation: _Text


class Spread(_Request):
    """A keyed table whose rows live on all hosts is in this host's memory. Idempotent.

    ``rows``, ``copies``, ``desks`` and ``bell`` are the numbers of its memory: rows that live here, copies of others,
    where workers ask for rows, and the word by which they say so; ``kept``: rows of others whose backup this host is.
    ``spec`` is the table as all hosts have to mean it.
    """

    called: _Text
    spec: dict[str, Any]
    rows: _Number
    copies: _Number
    desks: _Number
    bell: _Number
    most_copies: Annotated[int, Meta(ge=1)]
    seconds: float
    kept: _Number | None = None


class Publish(_Request):
    """This worker publishes under a name: other hosts follow it at ``port`` of this one. With 0 it asks how.

    The answer has ``bind``, the address to listen at, the ``token`` that followers know, whether what they are sent is
    ``encrypted``, and ``here``, the host and port. ``instead_of`` is the address of a publisher of that name that is
    gone: otherwise the first of a name counts, and `Find` says which one that is.
    """

    name: _Text
    port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    instead_of: tuple[_Text, int] | None = None


Request = (
    Hello | Challenge | Prove | Status | Look | Subscribe | Find | Attach | Ready | Withdraw | Create | Share
    | Initialised | Leaving | Close | Cancel | Arrived | Gather | AllGather | Ask | Notify | Combine | Spread | Publish
)  # fmt: skip


def request_of(message: Message) -> Request:
    """Returns the request that a message is.

    Raises:
        StartupError: it is none.
    """
    try:
        request: Request = msgspec.convert(message, Request)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise StartupError(f"the node does not know this request ({error}): {str(message)[:500]}") from error
    return request


def message_of(request: Request) -> Message:
    """Returns a request as it travels."""
    message: Message = msgspec.to_builtins(request)
    return message
