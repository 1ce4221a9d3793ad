"""Where workers of all hosts ask the coordinator: numbers that all count on, and the batches of an epoch.

Without sockets, threads and clocks, as the coordinator that has it: a question goes in, answers come out.
"""

from __future__ import annotations

from multiverso.hosts.deals import Answer, Deals, Message

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_LONGEST_NAME = 200
_MOST_COUNTERS = 100_000


class Desk:
    """Owner: the coordinator, one call at a time."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._deals = Deals()

    def ask(self, worker: int, number: int, question: Message) -> list[Answer]:
        """A worker asks something; the answers may be to others, too, and its own may come later.

        Raises:
            KeyError, TypeError, ValueError: that is not a question.
        """
        if question["about"] == "count":
            return [(worker, number, self._count(str(question["name"]), int(question["amount"])))]
        if question["about"] == "batches":
            return self._deals.ask(worker, number, question)
        raise ValueError(f"nobody answers questions about {question['about']!r}")

    def say(self, worker: int, saying: Message) -> list[Answer]:
        """A worker says what needs no answer.

        Raises:
            KeyError, TypeError, ValueError: that means nothing.
        """
        if saying["about"] != "batches":
            raise ValueError(f"nobody listens to what is said about {saying['about']!r}")
        return self._deals.say(worker, saying)

    def note(self, lines: list[list[int]]) -> list[Answer]:
        """Workers have come, left or died: their lines, as the coordinator has them."""
        return self._deals.note(lines)

    def _count(self, name: str, amount: int) -> Message:
        before = self._counters.get(name, 0)
        if not _LOWEST <= before + amount <= _HIGHEST:
            return {"overflow": before}
        if len(name) > _LONGEST_NAME or (
            name not in self._counters and len(self._counters) >= _MOST_COUNTERS
        ):
            raise ValueError("there are too many counters, or its name is too long")
        self._counters[name] = before + amount
        return {"before": before}
