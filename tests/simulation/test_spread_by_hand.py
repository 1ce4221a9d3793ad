"""Schedules of hosts that return which random ones hardly meet: each message is delivered by hand."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from simulated import spread
from simulated.spread import COLUMNS, NODE, SPEC, TABLE, WORKER, table_memory

from multiverso.compiling.on_demand import compile_update
from multiverso.errors import OutOfMemoryError
from multiverso.hosts.spread.copies import Copies
from multiverso.hosts.spread.frames import NO_KEYS, Frame
from multiverso.hosts.spread.placement import groups_of, places_of
from multiverso.hosts.spread.table import SpreadTable
from multiverso.layout import desk
from multiverso.spec.states import State
from multiverso.updaters.cached import copy_loops


class Site:
    """A host's node and its worker."""

    def __init__(self, net: Net, number: int) -> None:
        own, copied, kept = table_memory(rows=3000), table_memory(State("unsent"), rows=3000), table_memory(rows=3000)
        loops = copy_loops("add")
        take, land = (compile_update(loop, "int64") for loop in (loops.take, loops.land))
        self.number, self.net = number, net
        self.lost = set(net.dead)
        self.later: list[tuple[int, bytes]] = []
        self.shown: list[Any] = []
        self.own, self.copies = WORKER.rows(own), WORKER.rows(copied)
        self.table = SpreadTable(
            TABLE,
            SPEC,
            number,
            net.size,
            NODE.rows(own),
            Copies(NODE.rows(copied), take, land, 1000, 1e9, lambda: net.now),
            compile_update(spread.ADD.apply, "int64"),
            1,
            lambda peer, *parts: net.put(number, peer, *parts),
            self.shown.append,
            NODE.rows(kept),
            set(net.apart),
            set(net.dead),
            net.view,
            now=lambda: net.now,
        )

    def receive(self, peer: int, message: bytes) -> None:
        if peer in self.lost:
            self.later.append((peer, message))
            return
        frame = Frame.of(memoryview(bytearray(message)), self.table.own.size)
        if self.table.is_early(frame):
            self.later.append((peer, message))
        elif not frame.is_question:
            self.table.answered(peer, frame)
        elif (answer := self.table.serve(peer, frame)) is not None:
            self.net.put(self.number, peer, *answer.parts())

    def look_later(self) -> None:
        later, self.later = self.later, []
        for peer, message in later:
            self.receive(peer, message)

    def look(self) -> None:
        self.table.look(True)
        for other in self.table.filled:
            self.net.note(self.number, other, self.table.places.view)
        self.look_later()

    def obey(self) -> None:
        """Hears what the coordinator has said."""
        while orders := self.net.orders[self.number]:
            what, host = orders.popleft()
            if what == "lost":
                self.lost.add(host)
            if what == "joined":
                self.lost.discard(host)
            getattr(self.table, what)(host)
            self.look_later()

    # -- the worker --------------------------------------------------------------------------------------------

    def lives_here(self, key: int) -> bool:
        return bool(self.shown[-1][groups_of(np.array([key]))][0] == self.number)

    def ask(self, kind: int, key: int | None, host: int | None = None) -> list[Any]:
        """Asks the node; returns what grows by the answers."""
        said: list[Any] = []
        keys = NO_KEYS if key is None else np.array([key])
        self.table.ask(
            kind, keys, lambda code, *_: said.append(code), lambda answer, _: said.extend(answer.keys), host=host
        )
        return said

    def add(self, key: int, number: int) -> None:
        delta = np.zeros((1, COLUMNS), np.int64)
        delta[:, 0] = number
        keys = np.array([key])
        if self.lives_here(key):
            self.own.apply(compile_update(spread.ADD.apply, "int64"), self.own.enter(keys), delta)
        else:
            self.copies.apply(compile_update(copy_loops("add").add, "int64"), self.copies.find(keys), delta)

    def get(self, key: int) -> int:
        rows = self.own if self.lives_here(key) else self.copies
        return int(rows.values(np.array([key])).view(np.int64)[0, 0])


class Net:
    """Hosts, the messages between them, and the coordinator.

    Attributes:
        may_return: hosts that the coordinator lets return.
    """

    def __init__(self, size: int) -> None:
        self.size, self.now, self.view, self.sent = size, 1.0, 0, 0
        self.dead, self.apart, self.may_return = set[int](), set[int](), set[int]()
        self.wires: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self.orders: dict[int, deque[tuple[str, int]]] = defaultdict(deque)
        self.filled: dict[int, set[int]] = defaultdict(set)
        self.sites = [Site(self, number) for number in range(size)]

    def put(self, sender: int, to: int, *parts: Any) -> None:
        self.sent += 1
        if to not in self.dead:
            self.wires[sender, to].append(b"".join(bytes(part) for part in parts))

    def deliver(self, *wires: tuple[int, int]) -> int:
        """Delivers what is on the wires now; returns how many messages."""
        number = 0
        for sender, to in wires:
            for _ in range(len(self.wires[sender, to])):
                number += 1
                self.sites[to].receive(sender, self.wires[sender, to].popleft())
        return number

    def order(self, what: str, host: int) -> None:
        for number in set(range(self.size)) - self.dead - ({host} if what != "returned" else set()):
            self.orders[number].append((what, host))

    def note(self, host: int, other: int, view: int) -> None:
        if view == self.view and other in self.apart & self.may_return - self.dead:
            self.filled[other].add(host)
            if self.filled[other] >= set(range(self.size)) - self.dead:
                self.filled.clear()
                self.apart.discard(other)
                self.view += 1
                self.order("returned", other)

    def lose(self, host: int) -> None:
        self.dead.add(host)
        self.apart.add(host)
        self.view += 1
        self.filled.clear()
        self.orders[host].clear()
        for wire in self.wires:
            if host in wire:
                self.wires[wire].clear()
        self.order("lost", host)
        self.run()

    def again(self, host: int) -> None:
        self.dead.discard(host)
        self.sites[host] = Site(self, host)
        self.order("joined", host)
        self.run()

    def run(self, times: int = 80, slow: tuple[tuple[int, int], ...] = (), deaf: tuple[int, ...] = ()) -> None:
        """Lets everything happen, but messages on slow wires, and orders for deaf hosts."""
        live = [self.sites[number] for number in range(self.size) if number not in self.dead]
        for _ in range(times):
            self.now += 0.02
            for site in live:
                if site.number not in deaf:
                    site.obey()
            for site in live:
                site.look()
            while self.deliver(*(wire for wire in list(self.wires) if wire not in slow)):
                pass


def key_of(*order: int) -> int:
    """Returns a key whose group has these hosts in this order."""
    keys = np.arange(20_000)
    places = np.stack(places_of(range(len(order)), len(order)))[:, groups_of(keys)]
    return int(keys[(order == places.T).all(axis=1)][0])


@pytest.fixture
def net() -> Net:
    """Of three hosts the second was lost and has rejoined; the third has a copy of a row that is about to leave."""
    net = Net(3)
    net.run(5)
    key = key_of(1, 0, 2)
    net.sites[2].ask(desk.FETCH, key)
    net.run(5)
    net.sites[2].add(key, 1)
    net.lose(1)
    net.sites[2].ask(desk.FETCH, key)
    net.run()
    net.again(1)
    net.may_return = {1}
    return net


def report_filled(net: Net) -> None:
    net.now += 1.0
    for site in net.sites:
        site.look()
    assert net.orders[2] == deque([("returned", 1)])


def test_a_worker_reads_what_it_has_pushed_to_an_old_home_and_to_a_new_one(net: Net) -> None:
    key, worker = key_of(1, 0, 2), net.sites[2]
    worker.add(key, 10)
    report_filled(net)  # and the push goes to the old home, which hears of the return first
    net.sites[0].obey()
    net.sites[1].obey()
    worker.add(key, 100)
    worker.obey()
    for _ in range(12):
        net.now += 0.004
        for site in net.sites:
            site.look()
        net.deliver((0, 1), (1, 0), (1, 2), (2, 1))
        assert worker.get(key) == 111
    net.run()
    assert worker.get(key) == net.sites[1].get(key) == 111


def test_who_has_not_heard_of_a_return_does_not_ask_the_old_home_again_and_again(net: Net) -> None:
    key, worker = key_of(1, 0, 2), net.sites[2]
    worker.add(key, 10)
    report_filled(net)
    net.sites[0].obey()
    net.sites[1].obey()
    before = net.sent
    for _ in range(100):
        net.deliver((2, 0), (0, 2))
    assert net.sent - before < 10
    net.run()
    assert worker.get(key) == net.sites[1].get(key) == 11


def test_a_list_of_an_old_home_is_none_before_its_reader_has_heard_of_the_return(net: Net) -> None:
    report_filled(net)
    net.run(deaf=(2,))
    shown = len(net.sites[2].shown)
    said = net.sites[2].ask(desk.LIST, None, 0)
    net.run(deaf=(2,))
    assert not said
    net.run()
    assert said
    assert len(net.sites[2].shown) > shown, "so that who goes through all rows hears of it"


def test_a_host_that_is_lost_as_soon_as_it_has_returned_takes_nothing_with_it(net: Net) -> None:
    key, worker = key_of(1, 0, 2), net.sites[2]
    report_filled(net)
    returned = net.sites[1].table.places
    while returned.view < net.view:
        net.now += 0.001
        for site in (net.sites[0], net.sites[2], net.sites[1]):
            site.obey()
            site.look()
        if returned.view == net.view:
            break  # and what it says to its own backup is lost, too
        net.deliver(*((a, b) for a in range(3) for b in range(3)))
    assert not net.sites[0].own.has(np.array([key])).any()
    net.lose(1)
    worker.ask(desk.FETCH, key)
    net.run()
    assert worker.get(key) == 1


def test_what_a_worker_has_added_to_a_copy_is_there_when_its_key_is_removed() -> None:
    """Also while the row arrives at its host."""
    net = Net(3)
    net.run(5)
    key = key_of(1, 0, 2)
    net.lose(1)
    net.again(1)
    worker = net.sites[1]
    worker.ask(desk.FETCH, key)
    net.run(5)
    worker.add(key, 7)
    net.may_return = {1}
    report_filled(net)
    worker.add(key, 100)
    for _ in range(200):
        net.now += 0.0001  # pushes wait for longer
        for site in net.sites:
            site.obey()
            if site is not worker:
                site.look()
        net.deliver(*((a, b) for a in range(3) for b in range(3)))
        if worker.table.places.look():
            break
    assert worker.table.places.arriving.any()
    said = worker.ask(desk.REMOVE, key)
    net.run()
    assert said == [1, desk.DONE_WELL]
    assert not net.sites[1].own.has(np.array([key])).any()


@pytest.fixture
def two_apart() -> Net:
    """Of three hosts two were lost and have rejoined: a row lives on the first, the second is to return first."""
    net = Net(3)
    net.run(5)
    key, worker = key_of(2, 1, 0), net.sites[0]
    worker.ask(desk.FETCH, key)
    net.run(5)
    worker.add(key, 1)
    net.run()
    for host in (1, 2):
        net.lose(host)
    for host in (1, 2):
        net.again(host)
    net.may_return = {1}
    return net


def test_a_key_that_is_removed_while_another_host_returns_stays_so(two_apart: Net) -> None:
    net, key = two_apart, key_of(2, 1, 0)
    report_filled(net)
    net.sites[0].own.remove(np.array([key]))
    net.run()
    net.may_return = {1, 2}
    net.run()
    assert not net.apart
    assert not any(site.own.has(np.array([key])).any() for site in net.sites)


def test_an_old_homes_late_row_does_not_replace_a_later_one(two_apart: Net) -> None:
    net, key, worker = two_apart, key_of(2, 1, 0), two_apart.sites[0]
    report_filled(net)
    worker.add(key, 10)
    for _ in range(3):
        worker.look()
    assert net.wires[0, 2]
    net.run(slow=((0, 2),))
    worker.ask(desk.FETCH, key)
    net.run(slow=((0, 2),))
    worker.add(key, 100)
    net.run(slow=((0, 2),))
    net.run()
    net.may_return = {1, 2}
    net.run()
    assert not net.apart
    assert net.sites[2].get(key) == 111


def test_rows_that_a_host_had_no_memory_for_are_told_by_their_next_home(two_apart: Net) -> None:
    net, key = two_apart, key_of(2, 1, 0)
    kept = net.sites[2].table.kept
    assert kept is not None
    overwrite = kept.overwrite

    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no memory")

    kept.overwrite = refuse  # type: ignore[method-assign]
    net.sites[0].add(key, 10)
    for _ in range(6):
        net.now += 0.001
        for site in net.sites:
            site.obey()
            site.look()
        net.deliver(*list(net.wires))
    kept.overwrite = overwrite  # type: ignore[method-assign]
    net.run()
    assert net.sites[1].own.has(np.array([key])).any()
    net.now += 2.0
    net.may_return = {1, 2}
    net.run()
    assert not net.apart
    assert net.sites[2].get(key) == 11


@pytest.mark.parametrize("kind", [desk.COUNT_KEYS, desk.LIST])
def test_two_hosts_at_which_rows_arrive_answer_each_other(kind: int) -> None:
    net = Net(3)
    net.run(5)
    first, last = net.sites[0], net.sites[2]
    first.ask(desk.FETCH, key_of(2, 0, 1))
    last.ask(desk.FETCH, key_of(0, 2, 1))
    net.run(20)
    first.add(key_of(2, 0, 1), 1)
    last.add(key_of(0, 2, 1), 1)
    said = [site.ask(kind, None, None if kind == desk.COUNT_KEYS else other) for site, other in ((first, 2), (last, 0))]
    net.lose(1)  # which both hear of before the other one's question, with a push of before
    net.run(200)
    assert all(said)


def test_what_a_full_home_has_refused_goes_to_the_next_one(net: Net) -> None:
    key, worker, home = key_of(1, 0, 2), net.sites[2], net.sites[0].table.own
    enter = home.enter

    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no memory")

    worker.add(key, 10)
    home.enter = refuse  # type: ignore[assignment]
    report_filled(net)
    net.deliver((2, 0))
    home.enter = enter  # type: ignore[method-assign]
    for site in net.sites:
        site.obey()
    net.run(200)
    assert net.sites[1].get(key) == 11
    assert not net.sites[0].own.has(np.array([key])).any()


def test_a_copy_that_is_fetched_again_comes_from_the_new_home(net: Net) -> None:
    key, worker = key_of(1, 0, 2), net.sites[2]
    while not worker.table.leave_all():
        worker.look()
    report_filled(net)
    said = worker.ask(desk.FETCH, key)
    net.deliver((2, 0))
    worker.table.leave_all()  # a barrier: what is under way is fetched anew
    worker.obey()
    net.deliver((0, 2))
    net.sites[0].obey()
    net.sites[1].obey()
    for _ in range(200):
        net.now += 0.001
        for site in net.sites:
            site.look()
        net.deliver((0, 1), (1, 0), (1, 2), (2, 1))
    net.run(5)
    assert said == [desk.DONE_WELL]
    assert worker.get(key) == 1


def test_rows_that_there_is_no_memory_for_at_first_are_taken_over_later(net: Net) -> None:
    key, own = key_of(1, 0, 2), net.sites[1].table.own
    overwrite, failed = own.overwrite, []

    def refuse_once(*arguments: Any) -> None:
        if not failed:
            failed.append(True)
            raise OutOfMemoryError("no memory")
        overwrite(*arguments)

    own.overwrite = refuse_once  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError):
        net.run()
    net.run()
    assert not net.apart
    assert net.sites[1].get(key) == 1


def test_what_there_is_no_memory_for_where_it_arrives_is_added_later() -> None:
    net = Net(3)
    net.run(5)
    key = key_of(1, 0, 2)
    net.lose(1)
    net.again(1)
    worker = net.sites[1]
    worker.ask(desk.FETCH, key)
    net.run(5)
    worker.add(key, 7)
    own = worker.table.own
    enter = own.enter

    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no memory")

    net.may_return = {1}
    report_filled(net)
    worker.add(key, 100)
    own.enter = refuse  # type: ignore[assignment]
    for _ in range(200):
        net.now += 0.0001  # pushes wait for longer
        for site in net.sites:
            site.obey()
            site.look()
        net.deliver(*((a, b) for a in range(3) for b in range(3)))
    troubles = worker.table.trouble
    own.enter = enter  # type: ignore[method-assign]
    net.now += 2.0
    net.run()
    assert not net.apart
    assert worker.get(key) == 107
    assert troubles == (desk.HOST_FULL, 1)
    assert worker.table.trouble[0] == desk.DONE_WELL


def test_a_host_leaves_a_barrier_although_a_backup_has_not_heard_of_the_last_changes() -> None:
    """Others go on at once, so that there are always some."""
    net = Net(3)
    net.run(5)
    site, key = net.sites[1], key_of(1, 0, 2)
    site.add(key, 1)
    site.ask(desk.FETCH, key_of(2, 0, 1))
    for _ in range(5):
        net.run(1, slow=((1, 0),))
    assert net.wires[1, 0]
    assert site.copies.has(np.array([key_of(2, 0, 1)])).all()
    assert any(site.table.leave_all() for _ in range(3))
    assert not site.copies.has(np.array([key_of(2, 0, 1)])).any()


def test_what_a_host_that_returns_is_told_after_a_later_loss_is_not_dropped() -> None:
    """It hears of the loss last, and was no backup of the row before."""
    net = Net(4)
    net.run(5)
    key = key_of(2, 0, 1, 3)
    net.lose(1)
    net.again(1)
    net.sites[2].add(key, 1)
    net.run()
    net.may_return = {1}
    report_filled(net)
    net.run(10, slow=((3, 1),))  # all but one of its homes have answered
    assert net.sites[1].table.places.is_returning
    net.dead.add(0)
    net.apart.add(0)
    net.view += 1
    net.filled.clear()
    net.order("lost", 0)
    net.orders[1].pop()  # for now
    for wire in net.wires:
        if 0 in wire:
            net.wires[wire].clear()
    net.run(10, slow=((3, 1),))
    net.run(10)
    net.orders[1].append(("lost", 0))
    net.run()
    assert net.sites[1].table.places.view == net.view
    kept = net.sites[1].table.kept
    assert kept is not None
    assert kept.values(np.array([key])).view(np.int64)[0, 0] == 1
