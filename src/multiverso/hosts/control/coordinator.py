"""The first host's node decides for a job on several: members, tables, barriers and the end.

A state machine without sockets, threads and clocks: a report of a host goes in, orders to hosts come out. They are the
records of ``messages.py``. Each host's reports come in the order in which it sent them, and it gets its orders in the
order in which they were given. ``hosts/peer/watched_stream.py`` decides that a host is lost, and ``connections.py``
reports it here.

Its parts: tables that come to be and end (`table_steps`), what workers ask (`answers`).

A barrier takes two steps: a host whose workers are all there pushes what they have added and says so (*settled*); when
all have, everyone takes what the others pushed and lets its workers go (*take*). A *gathering* is the same for one
host, while all continue: each *brings* what it has not sent yet.

A lost host's place is taken by another node, which says hello again. Once no table is half made it is *welcome*: it
hears what there is, makes and takes it, and its workers begin; the others learn that it has *joined*. Once they have
told it what is to live on it of a table of rows by key, it has *returned* there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from multiverso.hosts.control.dealing import AnswerTo, Deals
from multiverso.hosts.control.known_hosts import KnownHost, KnownHosts
from multiverso.hosts.control.messages import (
    Address,
    Agreed,
    AllGather,
    AllGathered,
    Answer,
    Ask,
    Bring,
    Clocks,
    Create,
    Done,
    Filled,
    Gather,
    Gone,
    Hello,
    Joined,
    Line,
    Lost,
    Options,
    Over,
    Part,
    Peers,
    Published,
    Refuse,
    Report,
    Returned,
    Returns,
    Settled,
    Take,
    ToHost,
    Unused,
    Used,
    Welcome,
    Withdraw,
    Workers,
)
from multiverso.hosts.control.news import News
from multiverso.hosts.control.table_steps import TableSteps
from multiverso.hosts.roster import Roster
from multiverso.layout import words as at

# turns that a host which comes later might not have gone through: the others are at most a few behind
_KEPT = 64


class Coordinator:
    """Owner: its caller, one call at a time.

    Args:
        roster: the job's hosts.

    Attributes:
        over: whether all hosts' workers have gone.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._hosts = KnownHosts(KnownHost() for _ in range(roster.hosts))
        self._coming: dict[int, Address] = {}  # hosts that take a lost one's place, and their addresses
        self._tables = TableSteps(roster.names, self._hosts, self._coming)
        self._released = 0  # the last barrier that all have passed
        self._written: dict[int, int] = {}  # since then: whose values a synchronous table has got
        # by host, how far its rounds are, by table; in jobs with a quorum, of which it has the values
        self._turns: dict[int, dict[int, int]] = {}
        self._arrived: dict[int, dict[int, int]] = {}
        # by host and number: the hosts that still have to bring what that one gathers
        self._gatherings: dict[tuple[int, int], set[int]] = {}
        # what workers tell each other: by number, then by worker; None of one that has continued without a note
        self._notes: dict[int, dict[int, str | None]] = {}
        self._published: dict[str, Published] = {}  # by name
        self._news = News(self._hosts)
        self._options: dict[str, Any] | None = None
        self._deals = Deals()
        self._survivors: list[list[int]] = []  # who was left after each loss
        self._returns: dict[int, Returns] = {}  # by table of rows by key
        # by such a table and a host that was started again: who has told it all that is to live on it
        self._filled: dict[tuple[int, int], set[int]] = {}
        self._came_again = 0
        self._introduced = False
        self._dead: set[int] = set()  # workers that are lost
        # workers in dead ones' places: which barrier was over when each came
        self._since: dict[int, int] = {}
        self.over = False
        self._handlers: dict[type[Report], Callable[[int, Any], list[ToHost]]] = {
            Hello: self._hello,
            Options: self._check_options,
            Workers: self._note_workers,
            Settled: self._settled,
            Create: self._tables.create,
            Withdraw: self._tables.withdraw,
            Done: self._tables.done,
            Unused: self._tables.note_unused,
            Used: self._tables.note_used,
            Part: self._tables.note_parted,
            Gather: self._gather,
            Bring: self._brought,
            AllGather: self._all_gather,
            Ask: self._ask,
            Clocks: self._note_clocks,
            Published: self._note_published,
            Filled: self._note_filled,
            Gone: self._gone,
        }

    def receive(self, host: int, report: Report) -> list[ToHost]:
        """Takes a host's report and returns what is to be done."""
        if self._hosts[host].lost and not isinstance(report, Hello):
            return []
        orders = self._handlers[type(report)](host, report)
        news = self._news.tell(sorted({to for to, _ in orders}))  # a host that is welcome hears nothing before that
        return news + orders + self._welcome()

    def tell_news(self) -> list[ToHost]:
        """Tells all hosts what workers do, all of it at once; to be called several times a second."""
        return self._news.tell_all()

    def lose(self, host: int, why: str) -> list[ToHost]:
        """A host is lost: its workers are, and the others no longer wait for it.

        Args:
            host: its number.
            why: in words, for the error.
        """
        lost = self._hosts[host]
        self._coming.pop(host, None)
        if lost.lost or self.over:
            return self._tables.proceed()  # tables may have waited for it
        lost.lost = True
        self._survivors.append(self._hosts.left())
        self._filled.clear()
        for returns in self._returns.values():
            returns.hosts = [other for other in returns.hosts if other != host]
        for worker_id in self._roster.workers_of(host):
            self._news.drop(worker_id)  # it is told below
            line = lost.workers.setdefault(worker_id, Line(worker_id))
            if line.liveness != at.GONE:
                line.liveness = at.LOST
                self._dead.add(worker_id)
        orders = self._hosts.to_all(Lost(host, why), but=host)
        orders += self._hosts.to_all(Workers(list(lost.workers.values())), but=host)
        orders += self._introduce() + self._answers(self._deals.note(list(lost.workers.values())))
        orders += self._tables.lose(host) + self._welcome()
        return orders + self._look_at_barriers() + self._hand_round() + self._end()

    # -- who comes in a lost one's place -----------------------------------------------------------------------

    def why_not(self) -> str:
        """Returns why no node may take a lost host's place in this job, in words; nothing where one may."""
        options = self._options
        if options is None or self.over:
            return "no worker of the job has begun, or all have ended"
        if options.get("on_lost") != "continue":
            return "the job does not continue without it (init(on_lost='continue'))"
        if options.get("exchange", {}).get("between") != "sum":
            return "between='sum' is the only rule with which a host is taken in again"
        return ""

    def _welcome(self) -> list[ToHost]:
        """Admits who takes a lost host's place, once no table is half made and all hosts have come once."""
        if not self._coming or self._tables.half_made or not self._hosts.all_came:
            return []
        coming = dict(self._coming)
        self._coming.clear()
        orders: list[ToHost] = []
        for host, address in coming.items():
            self._hosts[host] = KnownHost(address, settled=self._released)
            self._came_again += 1
            orders += self._hosts.to_all(Joined(host, address), but=host)
            lines = [line for known in self._hosts for line in known.workers.values()]
            welcome = Welcome(
                survivors=list(self._survivors),
                epoch=len(self._survivors) + self._came_again,
                lost=[other for other, known in enumerate(self._hosts) if known.lost],
                addresses=[known.address for known in self._hosts],
                options=self._options or {},
                released=self._released,
                workers=lines,
                clocks=self._tables.clocks,
                overwritten=self._tables.overwritten,
                tables=self._tables.made(),
                ordered=self._tables.ordered,
                published=list(self._published.values()),
                returns=copy.deepcopy(self._returns),
            )
            orders.append((host, welcome))
        return orders + self._tables.proceed()

    def _note_filled(self, host: int, report: Filled) -> list[ToHost]:
        """A host has told another what is to live on it; once all that are left have, it returns."""
        returns = self._returns.setdefault(report.table, Returns())
        every = set(range(self._roster.hosts))
        apart = every - every.intersection(*self._survivors) - set(returns.hosts)
        view = len(self._survivors) + returns.times
        if report.view != view or report.host not in apart or self._hosts[report.host].lost:
            return []  # of before another was lost, or has returned
        filled = self._filled.setdefault((report.table, report.host), set())
        filled.add(host)
        if not filled.issuperset(self._hosts.left()):
            return []
        self._filled.clear()
        returns.times += 1
        returns.hosts.append(report.host)
        return self._hosts.to_all(Returned(report.table, report.host))

    # -- who is there ----------------------------------------------------------------------------------------

    def _hello(self, host: int, report: Hello) -> list[ToHost]:
        """A host's node has begun; all get to know where the others' copies are reached once the last has."""
        if self._hosts[host].lost:
            self._coming[host] = report.address
            return []
        self._hosts[host].address = report.address
        return self._introduce()

    def _introduce(self) -> list[ToHost]:
        """Tells all where the others are, once every host has come, or was lost before it did."""
        if self._introduced or not self._hosts.all_came:
            return []
        self._introduced = True
        return self._hosts.to_all(Peers([known.address for known in self._hosts]))

    def _check_options(self, host: int, report: Options) -> list[ToHost]:
        """The arguments that a host's first worker gave to init: they have to be the same everywhere."""
        self._options = self._options or report.options
        if report.options == self._options:
            return [(host, Agreed())]
        return [(host, Refuse(self._options))]

    def _note_workers(self, host: int, report: Workers) -> list[ToHost]:
        """Passes on what a host's workers do, for the mirrors of the others."""
        own = self._roster.workers_of(host)
        lines = [line for line in report.workers if line.worker_id in own]
        has_come_or_gone = is_lost = False  # else the others may hear of it a little later
        for line in lines:
            before = self._hosts[host].workers.get(line.worker_id, Line(-1))
            self._hosts[host].workers[line.worker_id] = self._news.note(line)
            has_come_or_gone |= (before.liveness, before.participation) != (line.liveness, line.participation)
            if line.liveness == at.LOST:
                is_lost |= before.liveness != at.LOST
                self._dead.add(line.worker_id)
            elif line.worker_id in self._dead:
                self._dead.remove(line.worker_id)
                self._since[line.worker_id] = self._released
        orders = self._news.tell_soon(is_lost) if has_come_or_gone else []
        if not self._hosts[host].is_live:  # the creation of a table waits for those who count
            orders += self._tables.proceed()
        return orders + self._hand_round() + self._answers(self._deals.note(lines))

    def _note_clocks(self, host: int, report: Clocks) -> list[ToHost]:
        """Passes on the clocks of a host's workers, for which reads on other hosts wait."""
        own = self._roster.workers_of(host)
        tables = {
            number: {worker: line for worker, line in lines.items() if worker in own}
            for number, lines in report.tables.items()
        }
        for number, lines in tables.items():
            self._tables.clocks.setdefault(number, {}).update(lines)
        return self._hosts.to_all(Clocks(tables), but=host)

    def _note_published(self, host: int, report: Published) -> list[ToHost]:
        """A worker publishes: readers on other hosts may follow it, if no other worker does."""
        first = self._published.get(report.name)
        if first is not None and first.address not in (report.address, report.instead_of):
            return [(host, first)]
        self._published[report.name] = report
        return self._hosts.to_all(report)

    def _gone(self, host: int, report: Gone) -> list[ToHost]:
        """The last worker of a host has gone, and what they added is at the homes."""
        self._hosts[host].gone = True
        return self._look_at_barriers() + self._end()

    def _end(self) -> list[ToHost]:
        if not all(known.gone or known.lost for known in self._hosts):
            return []
        self.over = True
        return self._hosts.to_all(Over())

    # -- barriers, and everything to one host ----------------------------------------------------------------

    def _look_at_barriers(self) -> list[ToHost]:
        """Drops waits for a host that is lost, or whose workers have gone."""
        return self._release() + self._gathered()

    def _settled(self, host: int, report: Settled) -> list[ToHost]:
        """A host's workers have all reached a barrier, and what they added is at the homes."""
        self._hosts[host].settled = max(self._hosts[host].settled, report.barrier)
        for number in report.written:
            self._written[number] = min(self._written.get(number, host), host)
        self._turns[host], self._arrived[host] = report.turns, report.arrived
        return self._release()

    def _release(self) -> list[ToHost]:
        reached = min((self._hosts[host].settled for host in self._hosts.there()), default=self._released)
        if reached <= self._released:
            return []
        self._released = reached
        written, self._written = self._written, {}
        return self._hosts.to_all(Take(reached, self._in_turn(written), self._expected()))

    def _in_turn(self, written: dict[int, int]) -> dict[int, tuple[int, int, bool]]:
        """Returns whose values come when in each table's rounds, and whether all hosts are as far as that."""
        there = self._hosts.there()
        found = {}
        for number, writer in written.items():
            turns = [self._turns[host][number] for host in there if number in self._turns.get(host, {})]
            if turns:  # else it is closed
                found[number] = (writer, max(turns), min(turns) == max(turns))
                kept = self._tables.overwritten.setdefault(number, {})
                kept[max(turns)] = writer
                while len(kept) > _KEPT:
                    del kept[next(iter(kept))]
        return found

    def _expected(self) -> dict[int, int]:
        """Returns the last turn of each table of rounds with a quorum that some hosts have and others do not."""
        by_host = [self._arrived.get(host, {}) for host in self._hosts.there()]
        found: dict[int, int] = {}
        for number in {number for here in by_host for number in here}:
            turns = [here[number] for here in by_host if number in here]
            if min(turns) < max(turns):
                found[number] = max(turns)
        return found

    def _gather(self, host: int, report: Gather) -> list[ToHost]:
        """A host wants what the others have and have not sent yet, while all continue: each brings it to the homes."""
        there = set(self._hosts.there())
        self._gatherings[host, report.number] = there
        orders = self._hosts.to_all(Bring(host, report.number))
        return [order for order in orders if order[0] in there] + self._gathered()

    def _brought(self, host: int, report: Bring) -> list[ToHost]:
        """A host has brought what it had not sent yet."""
        self._gatherings.get((report.host, report.number), set()).discard(host)
        return self._gathered()

    def _gathered(self) -> list[ToHost]:
        there = set(self._hosts.there())
        done = [which for which, left in self._gatherings.items() if not left & there]
        for which in done:
            del self._gatherings[which]
        return [(host, Gather(number)) for host, number in done if host in there]

    # -- what workers tell each other ------------------------------------------------------------------------

    def _all_gather(self, host: int, report: AllGather) -> list[ToHost]:
        """A worker's note for all others; they get it once every live worker has sent its own."""
        if report.worker in self._roster.workers_of(host):
            self._notes.setdefault(report.number, {})[report.worker] = report.note
        return self._hand_round()

    def _hand_round(self) -> list[ToHost]:
        there = [line for known in self._hosts if not known.lost for line in known.workers.values()]
        ready = []
        for number, notes in self._notes.items():
            awaited = {line.worker_id: line for line in there if self._is_to_tell(line, number)}
            # it was interrupted where its note was due: it comes to the next barrier, and never back to this one
            past = {worker: None for worker, line in awaited.items() if line.barrier > number}
            if awaited.keys() <= notes.keys() | past.keys():
                notes |= past | notes
                ready.append(number)
        return [order for number in ready for order in self._hosts.to_all(AllGathered(number, self._notes.pop(number)))]

    def _is_to_tell(self, line: Line, number: int) -> bool:
        """Whether others wait for a worker's note, due between the barrier of that number and the next.

        Not of one in a dead one's place that came when the barrier was over, or counts as past the next one.
        """
        came = self._since.get(line.worker_id)
        return line.is_live and (came is None or (came < number and line.barrier <= number))

    # -- what workers ask -------------------------------------------------------------------------------------

    def _ask(self, host: int, report: Ask) -> list[ToHost]:
        """A worker asks for a number or for batches, see ``dealing.py``."""
        if report.worker not in self._roster.workers_of(host):
            return []
        return self._answers(self._deals.ask(report.worker, report.number, report.question))

    def _answers(self, answers: list[AnswerTo]) -> list[ToHost]:
        return [(self._roster.host_of(worker), Answer(worker, number, answer)) for worker, number, answer in answers]
