"""What the first host's node decides for a job on several: who is there, tables, barriers, the end.

A state machine without sockets, threads and clocks: a report of a host goes in, orders to hosts come out. All orders
and reports are JSON objects; ``docs/protocol.md`` lists them. Each host's reports come in the order in which it
sent them, and it gets its orders in the order in which they were given.

A table comes to be in steps, each begun when all hosts have done the one before: *ask* (by order: all hosts whose
workers live; by name: the first), *make* (memory, all zero), *write* (the workers whose initial value counts, each on
its own host; nothing comes from other hosts yet, as a mean is divided here), *join* (from here on the hosts exchange
differences), *push* (what was written reaches the homes), *finish* (take what the others wrote; let the constructors
return).

A barrier takes two: a host whose workers are all there pushes what they have added and says so (*settled*); when all
have, everyone takes what the others pushed and lets its workers go (*take*).

A table ends when no worker of any host has it and one of them has closed it (the others may have left): everyone
*parts* with it, so that nobody waits for its values any more, and when all have, *frees* it.

A lost host's place is taken by another node, which says hello again. Once no table is half made it is *welcome*: it
hears what there is, makes and takes it, and its workers begin; the others hear that it has *joined*.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from multiverso import layout as at
from multiverso.hosts.deals import Answer
from multiverso.hosts.desk import Desk
from multiverso.hosts.exchange import Exchange
from multiverso.hosts.roster import Roster

Message = dict[str, Any]
Order = tuple[int, Message]
"""A host's number, and what it is told."""

Key = tuple[str, int | str]
_ORDER = "order"
STEPS = ("make", "write", "join", "push")

ID, PID, FATE, STATE, BARRIER, CREATED = range(6)
"""Where a worker's line has what: the first columns; the others are for the mirror only (`runtime.mirror`)."""


@dataclass
class _Asked:
    """One host's request for a table: what its workers want, who they are, which of them said that they are master."""

    spec: Message
    mode: str
    workers: list[int]
    masters: list[int]


@dataclass
class _Creation:
    """A table in the making; ``waits_for`` are the hosts that have not done the step yet."""

    asked: dict[int, _Asked] = field(default_factory=dict)
    number: int = 0
    step: str = "ask"
    waits_for: set[int] = field(default_factory=set)


@dataclass
class _Unused:
    """A table that some hosts' workers have closed; ``waits_for``: who still has it, once all are to close it."""

    key: Key
    hosts: set[int] = field(default_factory=set)
    closing: bool = False
    waits_for: set[int] | None = None


@dataclass
class _Host:
    """What is known of one host."""

    address: list[Any] | None = None
    options: Message | None = None
    workers: dict[int, list[int]] = field(default_factory=dict)
    settled: int = 0
    gone: bool = False
    lost: bool = False

    @property
    def live(self) -> list[int]:
        """Its workers that live and have not left."""
        return [w[ID] for w in self.workers.values() if w[FATE] == at.ALIVE and w[STATE] == at.ACTIVE]

    @property
    def is_live(self) -> bool:
        """Whether it has one."""
        return bool(self.live)


class Coordinator:
    """Owner: whoever calls it, one call at a time.

    Args:
        roster: the job's hosts.

    Attributes:
        over: whether all hosts' workers have gone.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._hosts = [_Host() for _ in range(roster.hosts)]
        self._creations: dict[Key, _Creation] = {}
        self._made: dict[Key, int] = {}
        self._unused: dict[int, _Unused] = {}
        self._tables = 0
        self._released = 0
        self._written: dict[int, int] = {}  # since the last barrier: whose values a synchronous table has got
        self._turns: dict[int, dict[int, int]] = {}  # how far each host's rounds are, by table
        self._notes: dict[int, dict[int, str]] = {}  # what workers tell each other: by number, then by worker
        self._options: Message | None = None
        self._desk = Desk()
        self._orders_to_make: dict[Key, Message] = {}  # of the tables that there are
        self._ordered = 0  # tables made by order, those that are closed included
        self._clocks: dict[
            str, dict[str, list[int]]
        ] = {}  # by table and worker, as far as they have been told
        self._lives: list[list[int]] = []  # who was left after each loss
        self._coming: dict[int, list[Any]] = {}  # hosts that take a lost one's place, and their addresses
        self._gatherings: dict[
            tuple[int, int], set[int]
        ] = {}  # by host and number: the hosts that still have to bring
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
            "settled": self._note_settled,
            "create": self._create,
            "withdraw": self._withdraw,
            "done": self._done,
            "unused": self._note_unused,
            "used": self._note_used,
            "parted": self._note_parted,
            "gone": self._gone,
            "tell": self._tell,
            "gather": self._gather,
            "brought": self._note_brought,
            "ask": self._ask,
            "say": self._say,
            "statistics": self._relay_statistics,
            "progress": self._relay_progress,
            "clocks": self._relay_progress,
        }[report["do"]]
        return handler(host, report)

    def lose(self, host: int, why: str) -> list[Order]:
        """A host is lost: its workers are, and nobody waits for it any more.

        Args:
            host: its number.
            why: in words, for whoever reads the error.
        """
        lost = self._hosts[host]
        came = self._coming.pop(host, None) is not None
        if lost.lost or self.over:
            return self._go_on_with_all() if came else []  # tables that waited for it
        lost.lost = True
        self._lives.append([other for other, known in enumerate(self._hosts) if not known.lost])
        for worker_id in self._roster.workers_of(host):
            line = lost.workers.setdefault(worker_id, [worker_id, 0, at.FREE, at.NEVER, 0, 0])
            if line[FATE] != at.GONE:
                line[FATE] = at.LOST
        orders = self._to_all({"do": "lost", "host": host, "why": why}, but=host)
        orders += self._to_all(
            {"do": "workers", "workers": list(lost.workers.values()), "now": None}, but=host
        )
        orders += self._answers(self._desk.note(list(lost.workers.values())))
        for key, creation in list(self._creations.items()):
            creation.asked.pop(host, None)
            creation.waits_for.discard(host)
            orders += self._go_on(key, creation)
        for number in list(self._unused):
            orders += self._part_or_free(number)
        return orders + self._release() + self._hand_round() + self._gathered() + self._end()

    # -- who comes in a lost one's place -----------------------------------------------------------------------

    def why_not(self) -> str:
        """Returns why no node may take a lost host's place in this job, in words; nothing where one may."""
        options = self._options
        if options is None or self.over:
            return "no worker of the job has begun, or all have ended"
        if options["on_lost"] != "continue":
            return "the job does not go on without it (init(on_lost='continue'))"
        if options["consistency"]["mode"] == "sync":
            return "a synchronous job takes in no host again"
        if Exchange.from_message(options["exchange"]).between != "sum":
            return "between='sum' is the only rule with which a host is taken in again"
        return ""

    def _welcome(self) -> list[Order]:
        """Lets those in who come, once each table is made on all hosts or on none."""
        if not self._coming or any(creation.step != "ask" for creation in self._creations.values()):
            return []
        coming, self._coming = self._coming, {}
        orders: list[Order] = []
        for host, address in coming.items():
            self._hosts[host] = _Host(address, settled=self._released)
            orders += self._to_all({"do": "joined", "host": host, "address": address}, but=host)
            lines = [line for known in self._hosts for line in known.workers.values()]
            tables = [{"key": list(key), **order} for key, order in self._orders_to_make.items()]
            what: Message = {
                "options": self._options,
                "released": self._released,
                "workers": lines,
                "clocks": self._clocks,
            }
            what |= {"tables": tables, "ordered": self._ordered}
            who = {
                "lives": self._lives,
                "lost": [other for other, known in enumerate(self._hosts) if known.lost],
                "addresses": [known.address for known in self._hosts],
            }
            orders.append((host, {"do": "welcome", **who, **what}))
        return orders + self._go_on_with_all()

    # -- who is there ----------------------------------------------------------------------------------------

    def _hello(self, host: int, report: Message) -> list[Order]:
        """A host's node has begun; all get to know where the others' copies are reached once the last has."""
        if self._hosts[host].lost:
            self._coming[host] = report["address"]
            return self._welcome()
        self._hosts[host].address = report["address"]
        if any(known.address is None for known in self._hosts):
            return []
        return self._to_all({"do": "peers", "addresses": [known.address for known in self._hosts]})

    def _check_options(self, host: int, report: Message) -> list[Order]:
        """The arguments that a host's first worker gave to init: they have to be the same everywhere."""
        self._hosts[host].options = options = report["options"]
        self._options = self._options or options
        if options == self._options:
            return []
        return [(host, {"do": "refuse", "options": self._options})]

    def _note_workers(self, host: int, report: Message) -> list[Order]:
        """What a host's workers do: the others' mirrors show it."""
        own = self._roster.workers_of(host)
        lines = [line for line in report["workers"] if line[ID] in own]
        for line in lines:
            self._hosts[host].workers[line[ID]] = line
        orders = self._to_all({"do": "workers", "workers": lines, "now": report["now"]}, but=host)
        if not self._hosts[host].is_live:  # the creation of a table waits for those who count
            for key, creation in list(self._creations.items()):
                orders += self._go_on(key, creation)
        return orders + self._hand_round() + self._answers(self._desk.note(lines))

    def _relay_statistics(self, host: int, report: Message) -> list[Order]:
        """How much a host's workers have done with each table: for whoever looks on another host."""
        own = {str(worker) for worker in self._roster.workers_of(host)}
        tables = {
            str(number): {worker: line for worker, line in lines.items() if worker in own}
            for number, lines in report["tables"].items()
        }
        return self._to_all({"do": "statistics", "tables": tables}, but=host)

    def _relay_progress(self, host: int, report: Message) -> list[Order]:
        """How far a host's workers are in rounds and clocks: others' pictures show it, and reads wait for it."""
        own = {str(worker) for worker in self._roster.workers_of(host)}
        tables = {
            str(number): {
                worker: [int(word) for word in line] for worker, line in lines.items() if worker in own
            }
            for number, lines in report["tables"].items()
        }
        if report["do"] == "clocks":
            for number, told in tables.items():
                self._clocks.setdefault(number, {}).update(told)
        return self._to_all({"do": report["do"], "tables": tables}, but=host)

    def _gone(self, host: int, report: Message) -> list[Order]:
        """The last worker of a host has gone, and what they added is at the homes."""
        self._hosts[host].gone = True
        return self._release() + self._gathered() + self._end()

    def _end(self) -> list[Order]:
        if not all(known.gone or known.lost for known in self._hosts):
            return []
        self.over = True
        return self._to_all({"do": "over"})

    # -- barriers --------------------------------------------------------------------------------------------

    def _note_settled(self, host: int, report: Message) -> list[Order]:
        self._hosts[host].settled = max(self._hosts[host].settled, int(report["barrier"]))
        for number in report.get("written", ()):
            writer = self._written.setdefault(int(number), host)
            self._written[int(number)] = min(writer, host)
        self._turns[host] = {int(number): int(turn) for number, turn in report.get("turns", {}).items()}
        return self._release()

    def _release(self) -> list[Order]:
        there = [known.settled for known in self._hosts if not (known.gone or known.lost)]
        reached = min(there, default=self._released)
        if reached <= self._released:
            return []
        self._released = reached
        written, self._written = self._written, {}
        return self._to_all({"do": "take", "barrier": reached, "written": self._in_turn(written)})

    def _in_turn(self, written: dict[int, int]) -> dict[int, tuple[int, int, bool]]:
        """Returns whose values come when in each table's rounds, and whether all hosts are as far as that."""
        there = [host for host, known in enumerate(self._hosts) if not (known.gone or known.lost)]
        found = {}
        for number, writer in written.items():
            turns = [self._turns[host][number] for host in there if number in self._turns.get(host, {})]
            if turns:  # else it is closed
                found[number] = (writer, max(turns), min(turns) == max(turns))
        return found

    # -- what workers tell each other ------------------------------------------------------------------------

    def _tell(self, host: int, report: Message) -> list[Order]:
        """A worker tells all others something; they get it once every live worker has told."""
        worker = int(report["worker"])
        if worker in self._roster.workers_of(host):
            self._notes.setdefault(int(report["number"]), {})[worker] = str(report["note"])
        return self._hand_round()

    def _hand_round(self) -> list[Order]:
        live = {worker for known in self._hosts if not known.lost for worker in known.live}
        ready = [number for number, notes in self._notes.items() if live <= notes.keys()]
        return [
            order
            for number in ready
            for order in self._to_all({"do": "told", "number": number, "notes": self._notes.pop(number)})
        ]

    # -- everything to one host ------------------------------------------------------------------------------

    def _gather(self, host: int, report: Message) -> list[Order]:
        """A host wants what the others have and have not sent yet, while all go on: each brings it to the homes."""
        number = int(report["number"])
        there = {other for other, known in enumerate(self._hosts) if not (known.lost or known.gone)}
        self._gatherings[host, number] = there
        orders = self._to_all({"do": "bring", "host": host, "number": number})
        return [order for order in orders if order[0] in there] + self._gathered()

    def _note_brought(self, host: int, report: Message) -> list[Order]:
        self._gatherings.get((int(report["host"]), int(report["number"])), set()).discard(host)
        return self._gathered()

    def _gathered(self) -> list[Order]:
        there = {other for other, known in enumerate(self._hosts) if not (known.lost or known.gone)}
        done = [which for which, left in self._gatherings.items() if not left & there]
        for which in done:
            del self._gatherings[which]
        return [(host, {"do": "gathered", "number": number}) for host, number in done if host in there]

    # -- what workers ask -------------------------------------------------------------------------------------

    def _ask(self, host: int, report: Message) -> list[Order]:
        """A worker asks for a number or for batches, see `hosts.desk`."""
        worker, number = int(report["worker"]), int(report["number"])
        if worker not in self._roster.workers_of(host):
            return []
        try:
            return self._answers(self._desk.ask(worker, number, report["question"]))
        except (KeyError, TypeError, ValueError) as error:  # its own mistake, not its host's
            return self._answers([(worker, number, {"error": f"it makes no sense: {error!r}"})])

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

    # -- tables ----------------------------------------------------------------------------------------------

    def _create(self, host: int, report: Message) -> list[Order]:
        """All live workers of a host (by name: one or more) have asked for a table."""
        key = _key(report)
        if key in self._made:
            # another host's worker has made it meanwhile: the order to make it is under way, or was obeyed
            return []
        creation = self._creations.setdefault(key, _Creation())
        if creation.step != "ask":
            return []  # by name, as above
        creation.asked[host] = _Asked(
            report["spec"], str(report["mode"]), list(report["workers"]), list(report["masters"])
        )
        return self._go_on(key, creation)

    def _withdraw(self, host: int, report: Message) -> list[Order]:
        """A worker of a host no longer waits: the host asks again when all have."""
        key = _key(report)
        creation = self._creations.get(key)
        if creation is not None and creation.step == "ask":
            creation.asked.pop(host, None)
            if not creation.asked:
                del self._creations[key]
        return []

    def _done(self, host: int, report: Message) -> list[Order]:
        """A host has done a table's step, or cannot."""
        key = _key(report)
        creation = self._creations.get(key)
        if creation is None or creation.step != report["step"]:
            return []
        if report.get("error"):
            return self._drop(key, *report["error"])
        creation.waits_for.discard(host)
        return self._go_on(key, creation)

    def _go_on_with_all(self) -> list[Order]:
        found = list(self._creations.items())
        return [order for key, creation in found for order in self._go_on(key, creation)]

    def _go_on(self, key: Key, creation: _Creation) -> list[Order]:
        if self._creations.get(key) is not creation:
            return []  # it was dropped when another one had gone on
        if creation.step == "ask":
            return self._decide(key, creation) if self._all_asked(key, creation) else []
        if creation.waits_for:
            return []
        then = dict(itertools.pairwise(STEPS)).get(creation.step)
        if then is not None:
            return self._begin(key, creation, then, {})
        del self._creations[key]
        return self._to_all({"do": "finish", "key": list(key)}) + self._welcome()

    def _all_asked(self, key: Key, creation: _Creation) -> bool:
        if self._coming:
            return False  # they are let in first
        concerned = {host for host, known in enumerate(self._hosts) if known.is_live and not known.lost}
        return bool(creation.asked) and (key[0] != _ORDER or concerned <= creation.asked.keys())

    def _decide(self, key: Key, creation: _Creation) -> list[Order]:
        """All that have to ask have asked: for the same thing?"""
        first = min(creation.asked)
        asked = creation.asked[first]
        if any(other.spec != asked.spec or other.mode != asked.mode for other in creation.asked.values()):
            each = {self._roster.names[host]: other.spec for host, other in sorted(creation.asked.items())}
            return self._drop(key, "TableMismatchError", "", each)
        workers = sorted(i for other in creation.asked.values() for i in other.workers)
        masters = sorted(i for other in creation.asked.values() for i in other.masters)
        if key[0] == _ORDER and asked.spec["initial"] == "master":
            writers = (masters or workers)[:1]
        else:
            writers = workers
        self._tables += 1
        creation.number = self._made[key] = self._tables
        order = {"number": creation.number, "spec": asked.spec, "mode": asked.mode}
        self._orders_to_make[key] = dict(order)
        self._ordered += key[0] == _ORDER
        order |= {"writers": writers, "workers": workers}
        return self._begin(key, creation, "make", order)

    def _begin(self, key: Key, creation: _Creation, step: str, order: Message) -> list[Order]:
        creation.step = step
        creation.waits_for = {host for host, known in enumerate(self._hosts) if not known.lost}
        return self._to_all({"do": step, "key": list(key), **order})

    def _drop(self, key: Key, kind: str, message: str, specs: Message | None = None) -> list[Order]:
        """A table cannot be made: whoever waits for it gets an error, and may ask again."""
        del self._creations[key]
        if self._made.pop(key, None) is not None:
            del self._orders_to_make[key]
            self._ordered -= key[0] == _ORDER
        dropped = {"do": "drop", "key": list(key), "error": [kind, message], "specs": specs}
        return self._to_all(dropped) + self._welcome()

    def _note_unused(self, host: int, report: Message) -> list[Order]:
        """No worker of a host has a table any more, or none ever had."""
        key, number = _key(report), int(report["number"])
        if self._made.get(key) != number or key in self._creations:
            return []
        unused = self._unused.setdefault(number, _Unused(key))
        unused.hosts.add(host)
        unused.closing |= bool(report["closing"])
        return self._part_or_free(number)

    def _note_used(self, host: int, report: Message) -> list[Order]:
        """A worker asks again for a table of which its host had said that nobody there uses it."""
        key, number = _key(report), int(report["number"])
        if self._made.get(key) != number:
            return []  # too late: it is told to part with it
        self._unused[number].hosts.discard(host)
        return [(host, {"do": "used", "key": list(key), "number": number})]

    def _note_parted(self, host: int, report: Message) -> list[Order]:
        number = int(report["number"])
        unused = self._unused.get(number)
        if unused is None or unused.waits_for is None:
            return []
        unused.waits_for.discard(host)
        return self._part_or_free(number)

    def _part_or_free(self, number: int) -> list[Order]:
        unused = self._unused[number]
        there = {host for host, known in enumerate(self._hosts) if not known.lost}
        which = {"key": list(unused.key), "number": number}
        if unused.waits_for is None:
            if not unused.closing or not there <= unused.hosts:
                return []
            del self._made[unused.key], self._orders_to_make[unused.key]
            self._clocks.pop(str(number), None)
            unused.waits_for = there
            return self._to_all({"do": "part", **which})
        if unused.waits_for & there:
            return []
        del self._unused[number]
        return self._to_all({"do": "free", **which})

    # -- telling ---------------------------------------------------------------------------------------------

    def _to_all(self, order: Message, but: int | None = None) -> list[Order]:
        return [(host, order) for host, known in enumerate(self._hosts) if host != but and not known.lost]


def _key(report: Message) -> Key:
    kind, which = report["key"]
    return str(kind), which if isinstance(which, int) else str(which)


def lines_of(workers: Iterable[list[int]]) -> list[list[int]]:
    """Returns workers' lines, checked: of integers, as long as they have to be.

    Raises:
        ValueError: they are no such lines.
    """
    lines = [list(line) for line in workers]
    if any(len(line) <= CREATED or any(type(word) is not int for word in line) for line in lines):
        raise ValueError("a worker's line is a list of integers")
    return lines
