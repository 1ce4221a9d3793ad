"""What the first host's node decides for a job on several: who is there, tables, barriers, the end.

A state machine without sockets, threads and clocks: a report of a host goes in, orders to hosts come out. All orders
and reports are JSON objects; ``docs/protocol.md`` lists them. Each host's reports come in the order in which it
sent them, and it gets its orders in the order in which they were given. That a host is lost it is told:
``conversation.py`` decides that, and ``control_connections.py`` says it here.

Its parts: tables that come to be and end (`table_steps`), barriers (`barriers`), what workers ask (`desk`).

A lost host's place is taken by another node, which says hello again. Once no table is half made it is *welcome*: it
hears what there is, makes and takes it, and its workers begin; the others hear that it has *joined*.
"""

from __future__ import annotations

from typing import Any

from multiverso import layout as at
from multiverso.hosts.control.answers import Answer, Desk
from multiverso.hosts.control.barriers import Barriers
from multiverso.hosts.control.known_hosts import BARRIER, FATE, ID, KnownHost, KnownHosts, Message, Order
from multiverso.hosts.control.table_steps import TableSteps
from multiverso.hosts.roster import Roster


class Coordinator:
    """Owner: whoever calls it, one call at a time.

    Args:
        roster: the job's hosts.

    Attributes:
        over: whether all hosts' workers have gone.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._hosts = KnownHosts(KnownHost() for _ in range(roster.hosts))
        self._coming: dict[int, list[Any]] = {}  # hosts that take a lost one's place, and their addresses
        self._tables = TableSteps(roster.names, self._hosts, self._coming)
        self._barriers = Barriers(self._hosts, self._tables.overwritten)
        # what workers tell each other: by number, then by worker; None of one that has gone on without a word
        self._notes: dict[int, dict[int, str | None]] = {}
        self._options: Message | None = None
        self._desk = Desk()
        self._survivors: list[list[int]] = []  # who was left after each loss
        self._came_again = 0
        self._introduced = False
        self._dead: set[int] = set()  # workers that are lost
        self._since: dict[
            int, int
        ] = {}  # workers in dead ones' places: which barrier was over when each came
        self.over = False

    def receive(self, host: int, report: Message) -> list[Order]:
        """Takes a host's report and returns what is to be done.

        Raises:
            One of `conversation.NONSENSE`: it is not a report of a host.
        """
        if self._hosts[host].lost and report["do"] != "hello":
            return []
        handler = {
            "hello": self._hello,
            "options": self._check_options,
            "workers": self._note_workers,
            "settled": self._barriers.note_settled,
            "create": self._tables.create,
            "withdraw": self._tables.withdraw,
            "done": self._tables.done,
            "unused": self._tables.note_unused,
            "used": self._tables.note_used,
            "parted": self._tables.note_parted,
            "gone": self._gone,
            "tell": self._tell,
            "gather": self._barriers.gather,
            "brought": self._barriers.note_brought,
            "ask": self._ask,
            "say": self._say,
            "statistics": self._relay_statistics,
            "progress": self._relay_progress,
            "clocks": self._relay_progress,
        }[report["do"]]
        return handler(host, report) + self._welcome()

    def lose(self, host: int, why: str) -> list[Order]:
        """A host is lost: its workers are, and nobody waits for it any more.

        Args:
            host: its number.
            why: in words, for whoever reads the error.
        """
        lost = self._hosts[host]
        came = self._coming.pop(host, None) is not None
        if lost.lost or self.over:
            return self._tables.go_on() if came else []  # tables that waited for it
        lost.lost = True
        self._survivors.append(self._hosts.left())
        for worker_id in self._roster.workers_of(host):
            line = lost.workers.setdefault(worker_id, [worker_id, 0, at.FREE, at.NEVER, 0, 0])
            if line[FATE] != at.GONE:
                line[FATE] = at.LOST
                self._dead.add(worker_id)
        orders = self._hosts.to_all({"do": "lost", "host": host, "why": why}, but=host)
        orders += self._hosts.to_all(
            {"do": "workers", "workers": list(lost.workers.values()), "now": None}, but=host
        )
        orders += self._introduce() + self._answers(self._desk.note(list(lost.workers.values())))
        orders += self._tables.lose(host) + self._welcome()
        return orders + self._barriers.look() + self._hand_round() + self._end()

    # -- who comes in a lost one's place -----------------------------------------------------------------------

    def why_not(self) -> str:
        """Returns why no node may take a lost host's place in this job, in words; nothing where one may."""
        options = self._options
        if options is None or self.over:
            return "no worker of the job has begun, or all have ended"
        if options["on_lost"] != "continue":
            return "the job does not go on without it (init(on_lost='continue'))"
        if options["exchange"]["between"] != "sum":
            return "between='sum' is the only rule with which a host is taken in again"
        return ""

    def _welcome(self) -> list[Order]:
        """Admits who takes a lost host's place, once no table is half made and all hosts have come once."""
        missing = any(known.address is None and not known.lost for known in self._hosts)
        if not self._coming or self._tables.half_made or missing:
            return []
        coming = dict(self._coming)
        self._coming.clear()
        orders: list[Order] = []
        for host, address in coming.items():
            self._hosts[host] = KnownHost(address, settled=self._barriers.released)
            self._came_again += 1
            orders += self._hosts.to_all({"do": "joined", "host": host, "address": address}, but=host)
            lines = [line for known in self._hosts for line in known.workers.values()]
            what: Message = {
                "options": self._options,
                "released": self._barriers.released,
                "workers": lines,
                "clocks": self._tables.clocks,
                "progress": self._tables.progress,
                "overwritten": self._tables.overwritten,
            }
            what |= {"tables": self._tables.made(), "ordered": self._tables.ordered}
            who = {
                "survivors": self._survivors,
                "epoch": len(self._survivors) + self._came_again,
                "lost": [other for other, known in enumerate(self._hosts) if known.lost],
                "addresses": [known.address for known in self._hosts],
            }
            orders.append((host, {"do": "welcome", **who, **what}))
        return orders + self._tables.go_on()

    # -- who is there ----------------------------------------------------------------------------------------

    def _hello(self, host: int, report: Message) -> list[Order]:
        """A host's node has begun; all get to know where the others' copies are reached once the last has."""
        if self._hosts[host].lost:
            self._coming[host] = report["address"]
            return []
        self._hosts[host].address = report["address"]
        return self._introduce()

    def _introduce(self) -> list[Order]:
        """Tells all where the others are, once every host has come, or was lost before it did."""
        if self._introduced or any(known.address is None and not known.lost for known in self._hosts):
            return []
        self._introduced = True
        return self._hosts.to_all({"do": "peers", "addresses": [known.address for known in self._hosts]})

    def _check_options(self, host: int, report: Message) -> list[Order]:
        """The arguments that a host's first worker gave to init: they have to be the same everywhere."""
        self._hosts[host].options = options = report["options"]
        self._options = self._options or options
        if options == self._options:
            return [(host, {"do": "agreed"})]
        return [(host, {"do": "refuse", "options": self._options})]

    def _note_workers(self, host: int, report: Message) -> list[Order]:
        """What a host's workers do: the others' mirrors show it."""
        own = self._roster.workers_of(host)
        lines = [line for line in report["workers"] if line[ID] in own]
        for line in lines:
            self._hosts[host].workers[line[ID]] = line
            if line[FATE] == at.LOST:
                self._dead.add(line[ID])
            elif line[ID] in self._dead:
                self._dead.remove(line[ID])
                self._since[line[ID]] = self._barriers.released
        orders = self._hosts.to_all({"do": "workers", "workers": lines, "now": report["now"]}, but=host)
        if not self._hosts[host].is_live:  # the creation of a table waits for those who count
            orders += self._tables.go_on()
        return orders + self._hand_round() + self._answers(self._desk.note(lines))

    def _relay_statistics(self, host: int, report: Message) -> list[Order]:
        """How much a host's workers have done with each table: for whoever looks on another host."""
        own = {str(worker) for worker in self._roster.workers_of(host)}
        tables = {
            str(number): {worker: line for worker, line in lines.items() if worker in own}
            for number, lines in report["tables"].items()
        }
        return self._hosts.to_all({"do": "statistics", "tables": tables}, but=host)

    def _relay_progress(self, host: int, report: Message) -> list[Order]:
        """How far a host's workers are in rounds and clocks: others' pictures show it, and reads wait for it."""
        own = {str(worker) for worker in self._roster.workers_of(host)}
        tables = {
            str(number): {
                worker: [int(word) for word in line] for worker, line in lines.items() if worker in own
            }
            for number, lines in report["tables"].items()
        }
        kept = self._tables.clocks if report["do"] == "clocks" else self._tables.progress
        for number, told in tables.items():
            kept.setdefault(number, {}).update(told)
        return self._hosts.to_all({"do": report["do"], "tables": tables}, but=host)

    def _gone(self, host: int, report: Message) -> list[Order]:
        """The last worker of a host has gone, and what they added is at the homes."""
        self._hosts[host].gone = True
        return self._barriers.look() + self._end()

    def _end(self) -> list[Order]:
        if not all(known.gone or known.lost for known in self._hosts):
            return []
        self.over = True
        return self._hosts.to_all({"do": "over"})

    # -- what workers tell each other ------------------------------------------------------------------------

    def _tell(self, host: int, report: Message) -> list[Order]:
        """A worker tells all others something; they get it once every live worker has told."""
        worker = int(report["worker"])
        if worker in self._roster.workers_of(host):
            self._notes.setdefault(int(report["number"]), {})[worker] = str(report["note"])
        return self._hand_round()

    def _hand_round(self) -> list[Order]:
        live = [known.workers[i] for known in self._hosts if not known.lost for i in known.live]
        ready = []
        for number, notes in self._notes.items():
            awaited = {line[ID]: line for line in live if self._is_to_tell(line, number)}
            # it was interrupted where it was to tell: it comes to the next barrier, and never back to this one
            past = {worker: None for worker, line in awaited.items() if line[BARRIER] > number}
            if awaited.keys() <= notes.keys() | past.keys():
                notes |= past | notes
                ready.append(number)
        return [
            order
            for number in ready
            for order in self._hosts.to_all(
                {"do": "told", "number": number, "notes": self._notes.pop(number)}
            )
        ]

    def _is_to_tell(self, line: list[int], number: int) -> bool:
        """Whether others wait for a worker's note, which it tells between the barrier of that number and the next.

        Not of one in a dead one's place that came when the barrier was over, or counts as past the next one.
        """
        came = self._since.get(line[ID])
        return came is None or (came < number and line[BARRIER] <= number)

    # -- what workers ask -------------------------------------------------------------------------------------

    def _ask(self, host: int, report: Message) -> list[Order]:
        """A worker asks for a number or for batches, see `hosts.control.answers`."""
        worker, number = int(report["worker"]), int(report["number"])
        if worker not in self._roster.workers_of(host):
            return []
        try:
            return self._answers(self._desk.ask(worker, number, report["question"]))
        except (KeyError, TypeError, ValueError) as error:  # its own mistake, not its host's
            return self._answers(
                [(worker, number, {"error": f"the question cannot be understood: {error!r}"})]
            )

    def _say(self, host: int, report: Message) -> list[Order]:
        worker = int(report["worker"])
        if worker not in self._roster.workers_of(host):
            return []
        try:
            return self._answers(self._desk.say(worker, report["saying"]))
        except (KeyError, TypeError, ValueError):
            return []

    def _answers(self, answers: list[Answer]) -> list[Order]:
        return [
            (
                self._roster.host_of(worker),
                {"do": "answer", "worker": worker, "number": number, "answer": answer},
            )
            for worker, number, answer in answers
        ]
