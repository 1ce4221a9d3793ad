"""A worker's request as the controller reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platoon.channel.wire import RESERVED, loads
from platoon.util import PlatoonError

_MISSING = object()


class BadRequest(Exception):
    """A request that no `Worker` sends."""


@dataclass(frozen=True)
class Query:
    """A request that was read: who asks what, and what goes with it."""

    req: Any
    worker_id: int
    info: Any

    @classmethod
    def read(cls, message: bytes) -> Query:
        """Returns what a message asks.

        Raises:
            BadRequest: it is not a request of a worker.
        """
        try:
            query = loads(message)
        except PlatoonError as error:
            raise BadRequest(f"a request cannot be read: {error}") from error
        if not isinstance(query, dict) or query.keys() != {"req", "worker_id", "req_info"}:
            raise BadRequest(f"a request has req, worker_id and req_info; got {query!r:.200}")
        if type(query["worker_id"]) is not int or not 0 < query["worker_id"] < 1 << 31:
            raise BadRequest(f"a request has a process id as worker_id; got {query['worker_id']!r:.200}")
        return cls(query["req"], query["worker_id"], query["req_info"])

    @property
    def reserved(self) -> bool:
        """Whether the controller answers it itself, and not the user's ``handle_control``."""
        return isinstance(self.req, str) and self.req.startswith(RESERVED)

    def field(self, name: str, *kinds: type) -> Any:
        """Returns an entry of what goes with the request, which has to be of one of these types."""
        value = self.info.get(name, _MISSING) if isinstance(self.info, dict) else _MISSING
        if type(value) not in kinds:
            raise BadRequest(f"the request {self.req!r:.100} needs {name}; got {self.info!r:.200}")
        return value
