"""What the node does when the coordinator, or the thread that moves values, says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from multiverso.hosts.control.messages import (
    Agreed,
    Alone,
    Answer,
    Drop,
    Finish,
    Free,
    Join,
    Make,
    Order,
    Part,
    Peers,
    Push,
    Refuse,
    Told,
    Used,
    Welcome,
    Write,
)
from multiverso.node_log import log
from multiverso.runtime.node.host_creation import HostCreations
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.questions import Questions

if TYPE_CHECKING:
    from multiverso.runtime.several_hosts.other_hosts import OtherHosts


def obey(
    order: Order | Alone,
    members: Membership,
    other_hosts: OtherHosts,
    questions: Questions,
    end: Callable[[], None],
) -> None:
    """Does one thing, in the node's thread.

    Args:
        order: as ``docs/protocol.md`` lists them; `Alone` says that this host cannot continue.
        members: who is in the job.
        other_hosts: this host's part in it.
        questions: what its workers ask the coordinator.
        end: ends the node.
    """
    match order:
        case Agreed():
            members.agree()
        case Refuse():
            members.refuse(order.options)
        case Welcome():
            members.take_over(order)
        case Told():
            members.told(order.number, order.notes)
        case Answer():
            questions.answer(order)
        case Alone():
            if not other_hosts.over.is_set() and (members.control.continues or not other_hosts.lost_hosts):
                log(order.why)
                end()
        case Make() | Write() | Join() | Push() | Finish() | Drop() | Used() | Part() | Free():
            assert isinstance(members.creations, HostCreations)
            members.creations.obey(order)
        case _:
            if isinstance(order, Peers):
                members.begin_with_others()
            for worker_id in other_hosts.obey(order):
                members.changed(worker_id)
