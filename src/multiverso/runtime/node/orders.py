"""What the node does when the coordinator, or the thread that moves values, says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from multiverso.node_log import log
from multiverso.runtime.node.host_creation import HostCreations
from multiverso.runtime.node.membership import Membership
from multiverso.runtime.node.questions import Questions
from multiverso.wire.messages import Message

if TYPE_CHECKING:
    from multiverso.runtime.several_hosts.other_hosts import OtherHosts

_OF_TABLES = ("make", "write", "join", "push", "finish", "drop", "used", "part", "free")


def obey(
    order: Message,
    members: Membership,
    other_hosts: OtherHosts,
    questions: Questions,
    end: Callable[[], None],
) -> None:
    """Does one thing, in the node's thread.

    Args:
        order: as ``docs/protocol.md`` lists them; ``"alone"`` and ``"broken"`` say that this host cannot go on.
        members: who is in the job.
        other_hosts: this host's part in it.
        questions: what its workers ask the coordinator.
        end: ends the node.
    """
    do = order["do"]
    if do in _OF_TABLES:
        assert isinstance(members.creations, HostCreations)
        members.creations.obey(order)
    elif do == "agreed":
        members.agree()
    elif do == "refuse":
        members.refuse(order["options"])
    elif do == "welcome":
        members.take_over(order)
    elif do == "told":
        members.told(int(order["number"]), order["notes"])
    elif do == "answer":
        questions.answer(order)
    elif do in ("alone", "broken"):
        if not other_hosts.over.is_set() and (members.control.continues or not other_hosts.lost_hosts):
            log(
                f"the connection to {other_hosts.roster.names[0]}, which leads the job, is over: {order['why']}"
                if do == "alone"
                else f"values could not be exchanged with the other hosts: {order['why']}"
            )
            end()
    else:
        if do == "peers":
            members.begin_with_others()
        for worker_id in other_hosts.obey(order):
            members.changed(worker_id)
