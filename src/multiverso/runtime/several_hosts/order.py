"""What is given to the node's thread to do: an order of the coordinator's, or something to call."""

from __future__ import annotations

from collections.abc import Callable

from multiverso.wire.messages import Message

Order = Message | Callable[[], None]
